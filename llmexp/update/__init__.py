"""From gradients to new parameters.

In reading order:

precision  autocast, loss scale, dtype of parameters
clip       limit a gradient by norms, values or units, or the update of a tensor
limits     the limit of the norm: fixed, or from the norms before
heads      limit the logits of attention
patterns   parameters by patterns of their names
schedule   the learning rate's factor after so many updates
muon       its polynomials, and its work shared among ranks
optim      the optimizers, and an update that the device can skip
groups     factors on the rate and the weight decay of single parameters
twin       other last bits of the initial weights
"""
