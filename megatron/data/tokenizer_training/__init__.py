"""A vocabulary made from a sample of text."""
