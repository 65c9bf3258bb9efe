"""Completion of the command line, written for each shell from the parser itself."""
