"""The only code that names ms-swift: where packing holds on to it, and what it puts there."""
