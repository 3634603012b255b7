"""The gradient noise scale, from norms of gradients that a step has anyway.

scale      its measurement and its estimate
"""
