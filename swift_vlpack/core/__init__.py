"""Decisions about ids, lengths and costs: pure Python and numpy, the same on every rank and every machine."""
