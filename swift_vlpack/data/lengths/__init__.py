"""The size of every row before any is trained on."""
