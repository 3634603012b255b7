"""What memory a run takes: measured before, and compared with what its host has."""
