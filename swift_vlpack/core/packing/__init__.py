"""Who shares a pack: strategies, the packer over them, and where samples start in a pack."""
