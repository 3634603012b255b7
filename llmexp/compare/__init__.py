"""Compare runs: run folders in, an answer, tables and a page out. No torch, no Hydra.

Along the data flow. In reading order:
records        what a comparison is made of
reading        run folders, metrics.jsonl and steps.bin, none of it trusted
strangers      records of runs that llmexp did not train: settings, seed, figure
tables         such runs in CSV, JSON lines, Parquet, data frames
projects       and in wandb: a project, offline folders
sources        the one door: run folders, tables, wandb, TensorBoard, as records
figures        which runs take part, their figures, and where they first reach a target
position       the tokens, steps or seconds at which losses are compared
folding        which runs are one setting, and which settings are one computation
inference      one statistical model of all settings of a sweep: whether a difference is real
statistics     means and their intervals, quantiles, seeds that would be needed
alpha_spending 5 % of error, shared out over the looks of a sweep that decides by itself
looks          how settings stand at one look, or at several
judging        verdicts: budgets, who leads, how the others stand, rounding, effects of keys
headline       the result in one line of one shape
notes          what must be known beside it, and what both rest on (provenance: other code)
screening      which of many knobs matter: of a fraction of all combinations, or of a search
comparing      all of the above in order: runs -> `Result`
table          for the terminal, JSON, CSV, Markdown
document       HTML from sections and a template (page.html), that asks the network for nothing
page           the sections of a comparison's page, and the answer as a tracker gets it
plots          figures of settings; curves: over training
next_step      the one command that would tell most, from what is known of the runs
budgets        unequal budgets, before a sweep starts
throughput     the table of a timing grid
"""
