"""What of other packages is put out of the way for a time."""
