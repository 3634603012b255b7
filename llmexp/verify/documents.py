"""Documents of prepared corpora: counted by source, and found again where a set holds one twice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from pathlib import Path

import numpy as np

from llmexp.data.readers import Counts
from llmexp.data.stream import Corpus, Shard
from llmexp.data.work import Work
from llmexp.verify.checks import Check

DIGEST = np.dtype([("first", "<u8"), ("second", "<u8")])  # 16 bytes


def check_documents(corpus: Corpus, works: Callable[[], Sequence[Work]]) -> list[Check]:
    """Check that the documents fill their shards, and that none is in two sets, by the digest of
    its text. Copies inside a set are counted. Nothing for data without documents."""
    if corpus.mixed is None:
        return []
    groups: dict[str, list[Shard]] = {name: [] for name in corpus.mixed.tokens}
    left = iter(corpus.train.shards)
    for name, tokens in corpus.mixed.tokens.items():
        while sum(len(shard.array) for shard in groups[name]) < tokens:
            groups[name].append(next(left))
    checks = [_filled(f"source {name}", shards) for name, shards in groups.items()]
    sets = {"train": corpus.train.shards}
    for name, stream in corpus.val_sets.items():
        checks.append(_filled(f"validation set {name}", stream.shards))
        sets[name] = stream.shards
    unique = {name: np.unique(_digests(shards)) for name, shards in sets.items()}
    return checks + [_apart(a, b, unique, sets, works) for a, b in combinations(unique, 2)]


def _beside(shard: Shard, ending: str, kind: np.dtype | str) -> np.ndarray:
    return np.fromfile(Path(shard.name).with_suffix(f".{ending}"), kind)


def _digests(shards: Sequence[Shard]) -> np.ndarray:
    return np.concatenate([np.empty(0, DIGEST), *(_beside(s, "digests", DIGEST) for s in shards)])


def _filled(what: str, shards: Sequence[Shard]) -> Check:
    """Return whether the ends of documents are in order up to the end of each shard, and whether
    each document has a digest."""
    wrong = ""
    for shard in shards:
        ends = _beside(shard, "ends", "<u8")
        begins = np.concatenate((np.zeros(1, "<u8"), ends[:-1]))
        whole = len(ends) > 0 and bool((begins < ends).all()) and int(ends[-1]) == len(shard.array)
        if not whole or len(_beside(shard, "digests", DIGEST)) != len(ends):
            wrong = wrong or f"{shard.name}: its documents do not fill it"
    digests = _digests(shards)
    copies = len(digests) - len(np.unique(digests))
    note = wrong or (f"exact copies among them: {copies:,}" if copies else "")
    return Check(f"documents of the {what}", not wrong, f"{len(digests):,}", note=note)


def _apart(
    first: str,
    second: str,
    unique: Mapping[str, np.ndarray],
    sets: Mapping[str, Sequence[Shard]],
    works: Callable[[], Sequence[Work]],
) -> Check:
    both = np.intersect1d(unique[first], unique[second], assume_unique=True)
    note = ""
    if len(both):
        one, other = (_place(both[0], sets[name], works) for name in (first, second))
        note = f"{one} is {other}; leave it out of one of them"
    return Check(f"documents in both {first} and {second}", not len(both), len(both), 0, note)


def _place(digest: np.void, shards: Sequence[Shard], works: Callable[[], Sequence[Work]]) -> str:
    """Return where a document of a set was read: the files of its unit are read again."""
    path = next(Path(s.name) for s in shards if digest in _beside(s, "digests", DIGEST))
    work = next(work for work in works() if work.folder == path.parent)
    unit = int(path.name.split("-")[0])
    try:
        for document in work.source.read(Counts(), True, work.units[unit]):
            if document.digest == digest.tobytes():
                return document.where
    except ValueError:  # such as of a bucket that does not answer now
        pass
    return f"a document of {work.source.key}"
