"""Read tokens in a reproducible order. In reading order:

order        sequence k of a run: a pure function of the seed and k
reader       from tokens to the windows of a rank, read ahead by a thread
stream       `TokenStream` (ids on disk or in memory), `Corpus` (what a source returns)
sources      the sources of conf/data
documents    text files as documents, for training and for validation
encode       documents -> token ids
prepare      token shards in the cache
token_files  ids that somebody else has prepared
files        find and identify input files
tokenizers   tiktoken's encodings, bytes, the user's own
"""
