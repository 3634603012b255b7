"""What preparing and reading a corpus cost beside what they cannot do without: ratios of one run.

    python benchmarks/prepare.py [megabytes] [shards]

Each ratio is the median of pairs in turns, of CPU time, so that a busy machine counts little:

encoding      encode_ordinary_batch of tiktoken over `llmexp prepare` of a jsonl.zst (at least 0.95)
jsonl_zst, parquet   reading the documents alone, as a share of encoding them (far below 1)
mixture       windows of 8 sources over windows of one (at most 1.03)
shards        seconds to the first batch of many shards, more than of one (at most 1)

Prints JSON. gpt2 needs its files: TIKTOKEN_CACHE_DIR.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow
import zstandard
from pyarrow import parquet

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from llmexp.data import shards
from llmexp.data.documents import Counts, read_documents
from llmexp.data.sampler import RankSlice, Sampler, read_windows
from llmexp.data.sources.corpus import corpus
from llmexp.data.stream import Corpus
from llmexp.data.tokenizers.base import Tokenizer
from llmexp.data.tokenizers.bytes import byte_level
from llmexp.data.tokenizers.tiktoken import pretrained
from llmexp.system.devices import cpu_count

PAIRS = 5
LENGTH = 1024


def texts_of(megabytes: int) -> list[str]:
    """Return pieces of the standard library's sources, in a random order."""
    library = Path(sysconfig.get_path("stdlib"))
    whole = "".join(path.read_text() for path in sorted(library.glob("*.py")))
    rng, found, size = random.Random(0), [], 0
    while size < megabytes * 1_000_000:
        start, length = rng.randrange(len(whole)), rng.randrange(200, 8000)
        found.append(whole[start : start + length])
        size += len(found[-1])
    return found


def made(folder: Path, files: dict[str, Path], tokenizer: Tokenizer, cache: str) -> Corpus:
    found = corpus(
        sources={name: {"files": str(path)} for name, path in files.items()}, val={}, val_main=None,
        stages=[], max_epochs=None, on_bad_record="refuse", cache_dir=str(folder / cache),
    )  # fmt: skip
    return found.build(tokenizer, LENGTH)


def cpu(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def ratio(one: Callable[[], object], other: Callable[[], object]) -> float:
    """Return the median over pairs of the CPU time of `one` over that of `other`."""
    return round(statistics.median(cpu(one) / cpu(other) for _ in range(PAIRS)), 4)


def read(path: Path) -> int:
    found = read_documents("k", str(path), "text", False, Counts())
    return sum(len("".join(document.pieces)) for document in found)


def windows(found: Corpus, count: int) -> Callable[[], None]:
    order = Sampler(found.train, LENGTH, 32, 32 * count, 0, mixed=found.mixed)

    def walk() -> None:
        for _ in read_windows(order, RankSlice(8), 0, count):
            pass

    return walk


def first_batch(folder: Path, path: Path, cache: str) -> float:
    started = time.perf_counter()
    windows(made(folder, {"a": path}, byte_level(), cache), 1)()
    return time.perf_counter() - started


def main(megabytes: int = 20, count: int = 10_000) -> None:
    tokenizer, threads = pretrained("gpt2"), cpu_count()
    texts = texts_of(megabytes)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        packed, table = folder / "a.jsonl.zst", folder / "a.parquet"
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        packed.write_bytes(zstandard.compress(lines.encode()))
        parquet.write_table(pyarrow.table({"text": texts}), table)
        caches = iter(range(100))

        def encode() -> None:
            tokenizer.encode_ordinary_batch(texts, num_threads=threads)

        def prepare() -> None:
            made(folder, {"a": packed}, tokenizer, f"cache{next(caches)}")

        found = {
            "encoding": ratio(encode, prepare),
            "jsonl_zst": ratio(lambda: read(packed), encode),
            "parquet": ratio(lambda: read(table), encode),
        }
        parts = {}
        for n in range(8):
            parts[f"s{n}"] = folder / f"part{n}.jsonl"
            part = (json.dumps({"text": text}) + "\n" for text in texts[n::8])
            parts[f"s{n}"].write_text("".join(part))
        one = windows(made(folder, {"a": packed}, byte_level(), "one"), 100)
        eight = windows(made(folder, parts, byte_level(), "eight"), 100)
        found["mixture"] = ratio(eight, one)
        os.fsync = lambda handle: None  # only to make so many files sooner
        few = folder / "few.jsonl"
        words = (json.dumps({"text": texts[0][:100] + str(n)}) + "\n" for n in range(count))
        few.write_text("".join(words))
        shards.CHUNK_BYTES = 1
        made(folder, {"a": few}, byte_level(), "many")
        shards.CHUNK_BYTES = 1 << 26
        made(folder, {"a": few}, byte_level(), "single")
        pairs = [
            first_batch(folder, few, "many") - first_batch(folder, few, "single")
            for _ in range(PAIRS)
        ]
        found["shards"] = round(min(pairs), 4)
    print(json.dumps({"threads": threads, "megabytes": megabytes, "shards_in_all": count, **found}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
