"""Packs for a trainer, planned ahead of time or made as rows come."""
