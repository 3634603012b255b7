"""Drive llmexp from a program: `import llmexp` offers what stands here (docs/python.md).

Torch, numpy and plotly are imported where they are used. In reading order:

folder    a run in its folder
calling   the function of a command
training  train in a process of its own
"""
