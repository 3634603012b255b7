"""Write, read and find run folders: what a run leaves on the disk.

In reading order:

rundir      claim and lock a folder; read and write its config, status and rows
folder      read what a run has left, strict or not: its files, state and lost rows
ledger      sweep.json: the points of a sweep
find        the runs and sweeps that paths mean
rows        write metrics.jsonl while a run trains
naming      names of checkpoints, such as RUN@STEP
ending      how a run ended, in one table
provenance  commit, diff, packages and drivers
"""
