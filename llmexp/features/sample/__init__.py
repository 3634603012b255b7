"""Texts from the model, in mid-run and at its end."""
