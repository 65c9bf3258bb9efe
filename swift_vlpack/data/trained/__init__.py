"""What is proved on the batches that train: a real one of the loader, with the trainer's own loss and its draws."""
