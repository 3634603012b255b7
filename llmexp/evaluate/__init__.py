"""Evaluate a checkpoint: `llmexp evaluate`. In reading order:

sets   losses of an opened run over its validation sets or over other data
units  documents or sequences, and the standard error that follows from how they differ
"""
