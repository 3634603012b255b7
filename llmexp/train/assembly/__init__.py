"""Build the parts of a run from its config, and check them. In reading order:

assemble   config -> `Parts`: every check and every fact
solving    the solved `Run` from facts
placement  device, ranks and arithmetic
inputs     tokenizer and data, each checked when it is built; without torch
parts      tasks, model and optimizers, likewise
parent     the checkpoint that a fork goes on from
opening    a checkpoint for use without training
remembered  what runs of a kind were found to take
trial      one tiny batch through a user's own model, before anything is written
"""
