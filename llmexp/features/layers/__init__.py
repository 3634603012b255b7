"""Figures of chosen steps layer by layer, in layers.jsonl.

figures    what is taken of a step on the device
reading    read layers.jsonl
"""
