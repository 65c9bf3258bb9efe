"""What a machine is like for training, and what to do about it."""
