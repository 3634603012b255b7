"""Declare what can be set, and what a value may be.

In reading order:

kinds      the kinds of refusals, one word each
values     how a knob is declared, and how a value is refused; the spelling of "Did you mean"
variables  variables of the environment in values, and which names mean secrets
forms      values of a form of their own: a batch ramp, hooks
sections   the closed sections: meaning, unit, range and effect of each knob
clipping   how a rule of clipping is declared
execution  the closed sections that change no result
parts      finds the arguments that models, data sources, optimizers and schedules share
rules      what of these follows from few numbers: shapes, and hyperparameters by optimizer.rule
convert    from a mapping to a checked `Config`
targets    `_target_`: from a dotted name to a function, of packages that --allow names; arguments
tracking   wandb's variables in the section `tracker`
knobs      what of a config decides its result and what its work; what a resume may change
keys       how a figure of a row is declared
labels     short names of swept values: `accum=1 clip=0.5`
arguments  the parser of a command, of its function's annotated arguments
commands   commands to paste, and what installs a missing package
"""
