"""Feed packs to the trainer, planned ahead of time or made as rows come. Begin with `feed.py`."""
