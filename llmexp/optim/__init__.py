"""From gradients to new parameters.

In reading order:
precision  what `auto` computes in, autocast, the loss scale of fp16 (`train.step` skips)
patterns   parameters by patterns of their names
schedule   the learning rate's factor after so many updates
updating   decay of matrices alone, not of biases and norms; a step's rate; an update that the
           device can skip
optimizers adamw, sgd, muon, lion and those of other packages, each a file
states     what an optimizer keeps, taken apart into tensors and plain values
eval_weights optimizers that train at one point and are evaluated at another (schedule-free)
held       what optimizers hold, each parameter once
trying     a trial on a few tensors of those that are none of ours
groups     further factors on the rate and the decay of parameters: by name, by width (muP)
twin       other last bits of the initial weights
"""
