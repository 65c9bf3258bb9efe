"""Measure the size of every row before training, and remember it."""
