"""From gradients to new parameters.

In reading order:
precision  which one `auto` is, autocast, loss scale, dtype of parameters
patterns   parameters by patterns of their names
schedule   the learning rate's factor after so many updates
muon       its polynomials, and its work shared among ranks
optim      adamw, sgd, muon, lion; rates, decay, and an update that the device can skip
states     what an optimizer keeps, taken apart into tensors and plain values
faces      optimizers that train at one point and are evaluated at another (schedule-free)
held       what optimizers hold, each parameter once; a trial of them on a few tensors
library    optimizers of torch.optim and of other packages, by name
options    those of them that conf/ ships, with their knobs
groups     factors on the rate and the weight decay of single parameters
twin       other last bits of the initial weights
"""
