"""Fit scaling laws: runs or a table in, the best size for a budget and what ladders gain out.

In reading order:
ladders        runs at their own ends, runs of others, and which of them are one ladder
surface        E + A N^-alpha + B D^-beta, or over one axis: the fit, of many samples at a time;
               the best size at some compute, the compute for some loss
law            what every law has: draws of what could have been measured as well, intervals from
               them, what it makes of runs that it has not seen; the surface of a ladder with its
               rungs and its frontier, a power law over one axis
isoflop        parabolas, one a budget, and their bias
gain           two ladders: the compute that a change needs
answer         all of the above in order: paths -> `Fits`
words          the answer in sentences, as a table, as JSON; numbers with their intervals
narrowing      the rung, size or seed that would narrow a prediction most
page           the HTML page and its figures
"""
