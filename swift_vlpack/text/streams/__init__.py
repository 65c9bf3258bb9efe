"""Streams of documents as windows and batches of fixed shape."""
