"""Clip groups of parameters, each by the norm of its own gradient."""
