"""Train a run: `python -m llmexp.train RUN_DIR`.

No Hydra in here. In reading order:

assembly       from a config to everything that a run needs, each part checked
feature        the events at which optional parts of a run (`features`) and hooks act
step           one optimizer step: the factor of the loss, whether it is skipped; `Setup`
clipping       the rule of clipping of a step: by the norm, or none
limiting       what other rules limit, measured for rows and tables
set_up         builds the `Setup` of steps from the parts of a run
evaluation     the losses over the validation sets
windows        the windows that this rank trains on
loop           the loop around the step: when to evaluate, save, stop (Ctrl-C, SIGTERM); the rows
finishing      finishes each step, one later: counts it, or ends the run (advice: modes.diagnosis)
state          `Loop`: what it holds, how far it is, and what a checkpoint restores
hooks          the user's own functions, called in one place
checkpointing  stages of a save between the steps, and one that fails; data files that change
worker         the process: request or folder -> trained run, status, exit code
folder         the run folder: made or found, what makes it another run, written
beginning      what there is before the first step: console, checkpoint, rows, loop
failing        what an exception means for the run, and the places where that is written
group          several ranks: joined, the folder held, reports; a hung or lost one is named
summary        figures of the end
sampling       text from a model
"""
