"""Prove the promises of the project on the user's machine and config.

In reading order:

checks       a check with its figure and its limit
runs         ordinary short runs in processes of their own
record       the hook that digests what every rank computes
determinism  the same run twice: bit-equal, compared by tables of columns
resume       killed at random moments and resumed: bit-equal
reference    the independent float64 loop that geometry compares with, its rules of clipping
geometry     all cuts compute the same, as far as rounding may take them
transfer     models of several widths: activations of like size
replay       the step at which a run went wrong, again: the data or the state
data         every token in range, each sequence once; documents of corpora: none in two sets
"""
