"""What packing asks of a model: attention that knows boundaries, one row of a pack, and the proof."""
