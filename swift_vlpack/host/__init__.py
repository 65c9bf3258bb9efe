"""Connect packing to ms-swift. Only this room names ms-swift. Begin with `pipeline.py`."""
