"""What packing asks of a model: attention that knows boundaries, and one row of a pack."""
