"""Hand packs to the trainer, planned ahead of time or made as rows come."""
