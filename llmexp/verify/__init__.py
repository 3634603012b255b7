"""Prove the promises of the project on the user's machine and config. In reading order:

checks       a check with its figure and its limit
runs         ordinary short runs in processes of their own
record       the hook that digests what every rank computes
geometry     all cuts compute the same
reference    the independent float64 loop that geometry compares with
resume       killed and resumed: bit-equal
determinism  the same run twice: bit-equal
data         every token in range, each sequence once
"""
