"""Rows by ms-swift's own loader."""
