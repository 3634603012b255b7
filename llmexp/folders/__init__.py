"""Write, read and find run folders: what a run leaves on the disk.

In reading order:

rundir      claim a folder under a free name, lock it; its config and status; who is alive
steps       steps.bin, what each step came to
door        check what a folder holds, once, where it is read
rows        read metrics.jsonl, and write both while a run trains
folder      read what a run has left, strict or not: its files, state and lost rows
ledger      sweep.json: the points of a sweep
find        the runs and sweeps that paths mean
naming      names of checkpoints, such as RUN@STEP
ending      how a run ended, in one table, whoever watched it
remembered  what runs of a kind were found to take, in the cache folder
versions    of llmexp, its source and its commit; of the packages that it computes with
"""
