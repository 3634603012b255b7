"""Run the commands: each file reads its arguments and calls the other packages.

A command is one function with annotated arguments, of which the parser, `--help`, `--json` and the
call from Python are made. In reading order:

running      the words of a command line in, what the function returns out
train        one run or a sweep (-m)
worker       starts the process that trains while `train` still composes, and waits for it
resume       go on with a run or a sweep
plan         check everything, print the banner, start nothing
prepare      tokenise the data into the cache
preparing    the section `prepare`: a part of the work, and where
prepare_on_ray  the parts as tasks of a Ray cluster
tokenizer    train a tokenizer
explain      a knob, a number or a group on one screen
compare      arguments of the comparison
fit          scaling laws of runs
next         the one command that would tell most
sync         uploads runs, and the answers of sweeps
replay       a step of a run, repeated and looked into
runs         list runs and sweeps, remove checkpoints
sample       text from a checkpoint
evaluate     losses of a checkpoint, with standard errors
average      the mean of several checkpoints
export       a trained model as a folder of Hugging Face
verify       run a proof, print and record its checks
help         `--help` of train, plan and prepare
hydra_flags  --cfg, --info and Hydra's other flags
"""
