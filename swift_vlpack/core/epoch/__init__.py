"""One epoch as a value: what is drawn, which packs it becomes, how ranks share them, how far they have come."""
