"""Read one row of data: where it comes from, how it is encoded, what it holds, and why it cannot be used."""
