"""Clip by a limit of the norm that follows the norms before.

moving            what both rules share
zscore, quantile  the rules
"""
