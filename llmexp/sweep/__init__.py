"""Run a sweep: many points, one folder, one record.

In reading order:

main            from the points to the exit code
settings        the section `sweep`: how points are run
points          compose, check and name the points and their folders
composing       compose each point; what points share once; a bar that counts them
checker, check  assemble the points and make their folders, in another process
planning        the table of `plan -m`
current         what all parts share of the running sweep
batch           check a batch of points, give them their places in the ledger; the answer
matching        which points an existing sweep has already; another budget for all of them
running         run the points, rungs of halving, retries
deciding        seeds until it is decided which setting is best
launchers       the loop that drives local, Slurm or Ray
local           process trees on this machine, a device slot each
slurm           job arrays, and their jobs; slurm_job is what runs inside
ray             tasks of a Ray cluster
screen          points of a screen: a fraction of all combinations
search          points that Optuna chooses, and the best of them with fresh seeds
twins           points once more: the leading setting, for the floor of rounding
show            the live table; a warning of losses that will not compare
"""
