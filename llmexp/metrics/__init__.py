"""Measure a run and show it.

In reading order:

keys      the keys of a row: names, units, digits, which way is better
meter     counts and rates since the last row (`eta`: train.loop)
ratio     the standard error of a ratio of sums
robust    the middle of values, which values far off do not move
lines     a row as a line of the console
plot      loss.png; running means of curves
"""
