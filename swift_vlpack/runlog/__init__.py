"""Record what a run did, and read it back."""
