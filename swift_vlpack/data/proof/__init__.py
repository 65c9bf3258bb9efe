"""The proof that a packed sample is trained as it is alone: what it measures, on which samples, and why it failed."""
