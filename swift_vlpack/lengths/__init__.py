"""Measure the size of every row before training, and cache the sizes. Begin with `measure.py`."""
