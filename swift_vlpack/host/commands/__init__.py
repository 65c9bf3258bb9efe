"""Commands that need ms-swift."""
