"""Tensors and rows; torch allowed, ms-swift not."""
