"""What is looked at outside of training: whether planned lengths are true, and the files that remember them."""
