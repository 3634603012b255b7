"""Compose a config with Hydra and hand on plain dataclasses.

In reading order:

command_line  Hydra's flags, overrides, --allow
overrides     read, and chosen of options; where each value of a config comes from
putting       checked against a config and put in; the key that was meant
security      refuse what would run code, secrets, and variables that hold them
loading       files put together by Hydra, overrides put in; options that do not go together
app           start Hydra, compose, check; the folder that a run wants
adopting      values that nobody gave: sizes of weights, what a rule decides
forking       overrides over the config of a run: a fork, or a run that is gone on with
"""
