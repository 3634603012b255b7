"""Tell at the end what a rule of clipping did, and what other limits would have done.

norms  norms of the gradient, counted; the share that other limits would have clipped
"""
