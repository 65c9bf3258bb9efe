"""What is shown to people, as functions of plain values: pages, text for terminals; needs neither torch nor swift."""
