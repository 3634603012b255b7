"""Prove the promises of the project on the user's machine and config.

In reading order:

checks       a check with its figure and its limit
runs         ordinary short runs in processes of their own
record       the hook that digests what every rank computes
pair         two recorded runs, compared bit by bit
geometry     all cuts compute the same
reference    the independent float64 loop that geometry compares with
clipping     its rules of clipping, from their formulas
tolerance    how far from it rounding may take a run
resume       killed and resumed: bit-equal
kills        how a run is killed at random moments
determinism  the same run twice: bit-equal
transfer     models of several widths: activations of like size
replay       a step of a run again: the data or the state
data         every token in range, each sequence once; documents of corpora: none in two sets
"""
