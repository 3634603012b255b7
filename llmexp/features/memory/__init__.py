"""Compare the memory that a run takes, measured before, with what its host has."""
