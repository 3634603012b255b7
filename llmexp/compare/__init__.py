"""Compare runs: run folders in, an answer, tables and a page out. No torch, no Hydra.

In reading order, along the data flow:
records        what a comparison is made of
reading, rows  run folders and metrics.jsonl, none of it trusted
figures        the figures of a run, at its end or at a common position
settings       which runs are one setting, and which settings are one computation
selection      which runs take part; the others with the reason
places         where their losses are read
statistics     means, intervals, differences
judging        how two settings differ
findings       budgets, leader, verdicts, floor of rounding, effects of single keys
comparing      all of the above in order: runs -> `Comparison`
answer, notes  the result in one line; what must be known beside it
table          for the terminal, JSON, CSV, Markdown
page           the HTML page; pagetables, plotting, plot_training and plot_settings make its parts
picture        the same as PNG
curves         rows of one quantity, smoothed and thinned, for page and picture
budgets        unequal budgets, before a sweep starts
provenance     runs that differ in code, packages or drivers
throughput     the table of a timing grid
"""
