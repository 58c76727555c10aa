"""A program that reads its standard input, and prints."""
