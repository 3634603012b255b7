"""Run a sweep: many points, one folder, one record. In reading order:

main            from the points to the answer and the exit code
settings        the section `sweep`: how points are run
points          compose, check and name the points and their folders
composing       compose each point; what points share once
checker, check  assemble the points and make their folders, in another process
ledger          sweep.json
matching        which points an existing sweep has already
planning        the table of `plan -m`
budget_warning  points whose losses will not compare
current         what all parts know of the running sweep
running         run the points, rungs of halving, retries
launchers       local, Slurm or Ray
local           process trees on this machine, a device slot each
slurm           jobs, and what runs inside a job
ray             tasks of a Ray cluster
search          points that Optuna chooses
twins           the leading setting once more, for the floor of rounding
show, progress  the live table
"""
