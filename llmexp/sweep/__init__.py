"""Run a sweep: many runs, one folder, one record.

In reading order:

main      from a command to its exit code
section   the section `sweep`: how points are run
composer  from the overrides of a point to its config
points    compose and name the points and their folders; equal ones are refused, or left out
planning  the table of `plan -m`
current   what all parts of the running sweep share; `check` assembles points, in another process
table     which runs the sweep has of what is asked for: new ones, longer ones, copies; none
          is trained twice
running   the loop that drives local, Slurm or Ray: submit, look, cancel; rungs of halving
grid      policies, which ask for runs: all combinations, or a screen; twins of the leader
deciding  seeds, until it is decided which setting is best
search    points that Optuna chooses, and the best of them with fresh seeds
local     process trees on this machine, each with GPUs of its own; kills a run that is silent
slurm     job arrays, and their jobs; slurm_job runs inside, and goes on after a preemption
ray       tasks of a Ray cluster
answer    the comparison at the end
show      the live table; a warning of losses that will not compare
"""
