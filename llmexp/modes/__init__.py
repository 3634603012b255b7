"""Do what a plain run never needs: in place of training, before it, or once it has gone wrong.

Each file is one such work, and `run` its one door. The code that trains imports it where it is
asked for and nowhere else (`.importlinter` lists these places). What a worker does in place of
training stands in the file asked.json of its folder, which all its ranks read; what it finds there
is found.json.

In reading order:

calibration    a run's steps and what comes between them, timed before it is started
replay         a run repeated up to a step, which is looked into; verify/replay judges it
diagnosis      the module of a step gone wrong
ranks          started on this host, watched, and started again when one is lost
micro_batch    batch.micro_batch_size=auto, found where the run starts
fork           the checkpoint that a fork goes on from, and where its data go on
extending      another budget for a run that would have come as far as it has
own_model      one tiny batch through a user's own model, before anything is written
own_optimizer  two steps of a user's own optimizers on small tensors, likewise
"""
