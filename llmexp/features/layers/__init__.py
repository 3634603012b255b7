"""Figures of chosen steps layer by layer, in layers.jsonl."""
