"""Optimizers, each a file with its knobs, which a run imports when it is named.

A function takes the model and its knobs and returns one torch optimizer or a list of them.

settings                the knobs that they share
adamw, sgd, lion, muon  ours, on torch's
library                 any of torch.optim, schedulefree, torchao, pytorch_optimizer, by its name
adafactor, schedule_free, soap, adamw_8bit  those of them that conf/ ships
"""
