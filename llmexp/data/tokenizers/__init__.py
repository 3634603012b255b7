"""The tokenizers of conf/tokenizer: a kind a file, with its knobs.

In reading order:

base      what a tokenizer is
own       those of other libraries and of the user's own, checked
bytes     a token per byte
tiktoken  tiktoken's encodings, and files of ranks
files     files of Hugging Face, tiktoken and sentencepiece
settings  knobs of which settings knows
training  a byte-level BPE from documents
"""
