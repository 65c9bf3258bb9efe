"""Decide from numbers alone which samples share a pack, in which step, on which rank.

Begin with `packer.py`, then read `epoch.py`.
"""
