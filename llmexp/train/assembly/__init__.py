"""Build what a run needs from its config, and check it.

In reading order:

assemble    the five stages, place, inputs, model, data and run: config -> `Parts`
placement   place: device, ranks and arithmetic
inputs      inputs and data: the tokenizer and the corpus, each checked when it is built; no torch
building    model and optimizers, likewise
solving     run: the facts, and the solved `Run`
opening     a checkpoint for use without training
"""
