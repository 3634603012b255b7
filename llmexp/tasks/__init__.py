"""Score multiple choice by log-likelihood.

In reading order:

items    request files: one item a line, found by the name of their task
scoring  items -> requests in batches by length -> accuracy, bits per byte and their errors
make     `python -m llmexp.tasks.make`: request files from sets of the hub
"""
