"""Fit scaling laws: runs or a CSV in, the best size for a budget and what ladders gain out.

In reading order:
points         runs at their own ends, lines of a CSV file, which is one ladder: sizes, losses
ladders        which runs are one ladder
surface        E + A N^-alpha + B D^-beta, or over one axis: the fit, of many samples at a time
law            what every law has: draws of what could have been measured as well, intervals from
               them, what it makes of runs that it has not seen
optimum        the best size at some compute, the compute for some loss
fitting        the surface of a ladder: rungs, frontier, its exponent, prediction, what is held out
power          a power law over one axis
isoflop        parabolas, one a budget, and their bias
gain           two ladders: the compute that a change needs
answer         all of the above in order: paths -> `Answer`
words          the answer in sentences; numbers with their intervals
narrowing      the rung, size or seed that would narrow a prediction most
table          for the terminal, JSON
page           the HTML page and its figures
"""
