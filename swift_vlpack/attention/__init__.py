"""Keep packed samples apart in attention."""
