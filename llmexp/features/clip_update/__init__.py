"""Limit the update of each tensor in the place of its gradient."""
