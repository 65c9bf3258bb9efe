"""Prove that a packed sample is trained as it would be alone."""
