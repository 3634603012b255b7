"""A digest of each window's tokens in its row."""
