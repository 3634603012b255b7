"""Outlier steps: loss or gradient norm far above the steps before; their updates may be skipped.

limits     by a trailing window
"""
