"""What is in a row, for people to look at: tokens as text, by what they are; images in small."""
