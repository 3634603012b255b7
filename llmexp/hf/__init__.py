"""Exchange models with other programs: Hugging Face's folders in and out.

In reading order:

families     one table a family: names of weights and of sizes, ours and Hugging Face's
sizes        the sizes of a model whose weights a run begins with, without torch
multipliers  those of model.parametrization=mup, folded into weights
average      the mean of several checkpoints, as a folder like a run's
reading      weights of a folder, tensor by tensor, and what of them does not fit a model
tokenizer    a tokenizer as the files that transformers reads
check        what transformers makes of a written folder: its tensors, the ids of texts
export       weights, config, tokenizer and a page about the model, into one folder
"""
