"""Rows that are longer than a pack: what they are made of, and a sample of some of their tokens."""
