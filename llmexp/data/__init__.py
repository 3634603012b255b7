"""Read tokens in a reproducible order.

In reading order:

order        sequence k of a run: a pure function of the seed and k
window       what one optimizer step is fed with
sampler      the windows of a rank from a step on, also of a resumed run, read ahead by a thread
stream       `TokenStream` (ids on disk or in memory), `Corpus` (what a source returns)
mixture      which source sequence k of a mixture comes from, by its weights at that stage
hub          datasets of Hugging Face
sniffing     what a file is, by its first bytes; files that are compressed
documents    documents, records that are none, counts; of text, JSON, Parquet and Arrow
stored       the token shards of a source that the cache has
prepared     those of all sources, written where they are missing; documents that two share
beside       the files beside a shard of documents, and its record
text_bytes   bytes of text that ids stand for
work         a source of documents: its splits, units of its files (other content, other shards);
             parts, for several processes
shards       documents -> token shards, in order, by threads of one process
remote       files here, and addresses that fsspec reads
encode       pieces of text that are encoded one by one, by several threads
token_files  ids that somebody else has prepared, and which of them are no targets
cache        the cache folder: its lock, and what is known of files
progress     a line while a preparation lasts
matching     the files that paths, folders and globs name
files        identify input files, and keep them open
"""
