"""Prove that a packed sample is trained as it would be alone. Begin with `prove.py`, then read docs/isolation.md."""
