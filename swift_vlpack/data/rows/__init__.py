"""Rows: where they come from, how one is encoded, and why one cannot be."""
