"""Commands beside training: what holds, what is installed and remembered, what options there are, how fast it is."""
