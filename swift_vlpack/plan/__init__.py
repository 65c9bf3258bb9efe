"""Decide which rows share a pack, in which step and on which rank, from numbers alone."""
