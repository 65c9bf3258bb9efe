"""The length pass with ms-swift's template."""
