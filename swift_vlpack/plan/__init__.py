"""Decide from numbers alone which samples share a pack, in which step, on which rank: read packer.py, then epoch.py."""
