"""Evaluate a checkpoint: `llmexp evaluate`. In reading order:

sets   losses of an opened run over its validation sets or over other data
units  the units that are independent: documents, or sequences
harness  scores by lm-eval of the exported model
"""
