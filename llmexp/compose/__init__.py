"""Compose a config with Hydra and hand on plain dataclasses.

In reading order:

command_line  Hydra's flags, overrides, --allow
app           start Hydra, compose, check; the folder of a run
forking       overrides over the config of a run: a fork, or a run that is gone on with
adopting      the sizes of a run that begins with given weights
guard         refuse what would run code
environment   variables stay names; refuse secrets
origin        where each value comes from; refuse knobs that do nothing
overrides     keys of overrides, and their values by Hydra's grammar
errors        Hydra's exceptions in plain words; the nearest key to one that is unknown
"""
