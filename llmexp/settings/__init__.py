"""Settings: what can be set, and what a value may be. In reading order:

values    how a value is refused, and variables of the environment in values
config    the closed sections: meaning, unit, range and effect of each knob
convert   from a mapping to a checked `Config`
knobs     where a knob acts and what it changes
labels    short names of swept values
"""
