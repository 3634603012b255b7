"""The models, written for one device, and the loss at their end.

In reading order:
gpt2, llama  the two families
settings     the knobs that they share
experts      mixtures of experts in place of the MLP of a Llama: router, balance loss (its bias:
             `features.moe`)
hf           any causal language model of transformers
common       what both share: initial values, logits, FLOPs of a token
initial      values drawn in blocks, the same ones however ranks cut the parameters; seeds
loss         `SummedLoss`: token ids and targets -> summed cross-entropy; torch.compile
chunked      its kernel for large vocabularies, which never holds all logits: on a CPU in tiles
rows         the same on an accelerator, in chunks of whole rows
operands     what both have in common; tokens that ranks share
recompute    activation checkpointing: what the backward pass computes again
offload      the same by the host's memory
logits       the largest logit of each head of attention
documents    causal attention, inside documents where a model knows their last id
planned      the kind of device that computes, or that is planned for
sampling     text, token by token
"""
