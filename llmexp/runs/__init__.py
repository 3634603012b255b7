"""Run folders: what a run leaves on the disk. In reading order:

rundir      claim and lock a folder; read and write its config, status and rows
rows        write metrics.jsonl while a run trains
naming      names of runs and checkpoints, such as RUN@STEP
ending      how a run ended, in one table
provenance  commit, diff, packages and drivers
"""
