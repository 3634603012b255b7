"""Fit scaling laws: runs or a table in, the best size for a budget and what ladders gain out.

In reading order:
ladders        runs at their own ends, runs of others, and which of them are one ladder
surface        arrays of E + A N^-alpha + B D^-beta, or over one axis: fitted to many samples at
               a time; the best size at some compute, the compute for some loss
law            laws fitted to ladders, and their intervals: draws of what could have been measured
               as well; what a law makes of runs that it has not seen
isoflop        parabolas, one a budget, and their bias
gain           two ladders: the compute that a change needs
answer         all of the above in order: paths -> `Fits`
words          the answer in sentences, as a table, as JSON; numbers with their intervals
narrowing      the rung, size or seed that would narrow a prediction most
page           the HTML page and its figures
"""
