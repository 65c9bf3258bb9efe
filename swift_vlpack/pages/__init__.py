"""Show packs and runs to people, in a terminal and as HTML pages."""
