"""Evaluate a checkpoint: `llmexp evaluate`.

In reading order:

sets     losses of an opened run over its validation sets or over other data
harness  scores by lm-eval of the exported model
"""
