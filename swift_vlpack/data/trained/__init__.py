"""Prove isolation on a real batch of the loader, with the trainer's own loss and random draws."""
