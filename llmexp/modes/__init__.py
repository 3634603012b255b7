"""Do what a plain run never needs: in place of training, before it, or once it has gone wrong.

Each file is one such work, and `run` its one door. The code that trains imports it where it is
asked for and nowhere else (`.importlinter` lists these places). What a worker does in place of
training stands in the file asked.json of its folder, which all its ranks read; what it finds there
is found.json.

In reading order:

calibration    a run's steps and what comes between them, timed before it is started
replay         a run repeated up to a step, which is looked into; verify/replay judges it
diagnosis      the first module of a step that is NaN or infinite, and what to try
ranks          those of a run on this host (`mesh.ranks` starts them), and how it ended
micro_batch    batch.micro_batch_size=auto: the trials of `forecast.fitting` on all ranks
fork           the checkpoint that a fork goes on from (`train.beginning` restores it,
               `compose.forking` has its settings), and where its data go on
extending      another budget for a run that would have come as far as it has
own_model      one tiny batch through a user's own model, before anything is written
own_optimizer  two steps of a user's own optimizers on small tensors, likewise
"""
