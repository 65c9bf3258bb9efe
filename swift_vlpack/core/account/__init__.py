"""What became of every sample: reasons, counters, and reports for people and machines."""
