"""Exchange models with other programs: Hugging Face's folders in and out. In reading order:

families   one table a family: names of weights and of sizes, ours and Hugging Face's
average    the mean of several checkpoints, as a folder like a run's
reading    weights of a folder, tensor by tensor, and what of them does not fit a model
writing    weights into a folder, tensor by tensor
pieces     a sentencepiece model as a tokenizer.json
tokenizer  a tokenizer as the files that transformers reads
card       the page about an exported model
export     all of these, into one folder
"""
