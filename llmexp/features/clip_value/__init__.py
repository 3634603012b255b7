"""Clip each entry of the gradient."""
