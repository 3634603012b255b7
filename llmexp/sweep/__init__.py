"""Run a sweep: many points, one folder, one record.

In reading order:

main            from the points to the exit code; the points of a screen
section         the section `sweep`: how points are run
composer        from the overrides of a point to its config
points          compose and name the points and their folders; equal ones are refused
planning        the table of `plan -m`
current, check  what all parts of the running sweep share; the process that assembles its points
batch           check a batch of points, give them their places in the ledger; the answer; twins
matching        which points an existing sweep has already; another budget for all of them
running         the loop that drives local, Slurm or Ray: retries, rungs of successive halving
deciding        seeds until it is decided which setting is best
local           process trees on this machine, a device slot each
slurm           job arrays, and their jobs; slurm_job runs inside, and goes on after a preemption
ray             tasks of a Ray cluster
search          points that Optuna chooses, and the best of them with fresh seeds
show            the live table; a warning of losses that will not compare
"""
