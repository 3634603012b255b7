"""The models, written for one device, and the end of the loss. In reading order:

gpt2, llama  the two families
checks       checks of their arguments
loss         `WindowLoss`: hidden states and targets -> summed cross-entropy, without whole logits
recompute    activation checkpointing
memory       what a forward pass keeps, counted
sampling     text, token by token
"""
