"""The data sources of conf/data: a source a file, with its knobs.

A source is a function of its knobs, and of those of tokenizer, vocab_size and sequence_length that
its signature asks for, that returns a `Corpus`. One of documents is a class of its knobs: its
`documents` are read by commands, its `build` makes a `Corpus` of them. `shuffle` and `ignore_id`
belong to the loop and never get here.

In reading order:

settings   knobs that several share
shares     what those of files share: the files of training and of validation
synthetic  a stream of known entropy
tokens     ids that somebody else has prepared
text       files of text
stdlib     Python's standard library
corpus     named sources, mixed, with named validation sets
"""
