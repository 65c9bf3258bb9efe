"""What a run comes to, from the files it left: read, summed up, shown."""
