"""Train a run: `python -m llmexp.train RUN_DIR`. No Hydra in here. In reading order:

step           one optimizer step, one evaluation, and the live parts they work on
loop           the loop around the step: rows, evaluation, checkpoints, stop
state          what the loop holds, and what a checkpoint restores
hooks          the user's own functions, called in one place
checkpointing  when to save, in stages between the steps
worker         the process: request or folder -> trained run, status, exit code
group          a run on several ranks: watch them, join them, collect their reports
summary        figures of the end
sampling       text from a model
diagnose       find the first module that is not finite
"""
