"""ms-swift's trainer, and what is around it."""
