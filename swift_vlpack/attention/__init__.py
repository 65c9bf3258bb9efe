"""Keep packed samples apart in attention. Begin with `attention.py`; docs/isolation.md has the whole picture."""
