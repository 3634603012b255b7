"""Drive llmexp from a program: `import llmexp` offers what stands here (docs/python.md).

Each function calls what a command calls; torch, numpy and plotly are imported where they are used.
In reading order:

folder   a run in its folder
judging  compare runs, what to do next, evaluate a checkpoint
work     train, plan, prepare, train a tokenizer, average, export
"""
