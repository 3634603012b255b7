"""`llmexp verify data`: check that tokens are in range, files as written, sequences once per epoch.

Documents of prepared corpora are counted, and found again where a set holds one twice.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from llmexp.config.sections import Config
from llmexp.config.values import ConfigError
from llmexp.data.beside import beside, digests_of, noted
from llmexp.data.documents import Counts
from llmexp.data.order import sequence_index
from llmexp.data.sampler import RankSlice, Sampler, read_windows
from llmexp.data.stream import DataChanged, Shard, TokenStream
from llmexp.data.text_bytes import known_documents
from llmexp.data.work import sources_of, works_of, works_to_prepare
from llmexp.models.operands import IGNORE_INDEX
from llmexp.system import fileio
from llmexp.system.devices import cpu_count
from llmexp.system.redact import redacted
from llmexp.train.assembly.assemble import Parts, assemble
from llmexp.train.windows import sampler_of
from llmexp.verify.checks import Check, none_differ
from llmexp.verify.reference import starts_of

SUMS = "sha256.txt"  # of all token files, as `sha256sum -c` reads it
_SHOWN = 20  # files with a check of their own; of more, only those that fail have one
_BLOCK_BYTES = 1 << 20  # stays in the core's cache between the hash and the scan
WINDOWS, RANKS = 10, 4  # so many are sampled


def verify(config: Config, path: Path, steps: int | None, shrink: bool) -> list[Check]:
    """Read the whole corpus of the config, which is prepared where it is not yet.

    Ids are checked against the model's vocabulary (or the tokenizer's, where the model says none),
    all of them, from the files: no note in the cache is believed. Raises ConfigError.
    """
    try:
        parts = assemble(config)
    except ConfigError as error:
        # the one refusal that is what is to be proven here
        if "is not in the vocabulary" not in str(error):
            raise
        return [Check("token ids in range", False, note=str(error))]
    corpus, run = parts.corpus, parts.run
    size = sum(s.array.nbytes for s in corpus.shards())
    print(f"reading {size / 1e6:,.1f} MB of tokens", flush=True)
    checks: list[Check] = []
    try:
        checks += check_shards(corpus.shards(), run.vocab_size or parts.tokenizer.n_vocab, path)
        checks += check_sources(parts)
        checks += check_documents(parts)
        checks += check_order(parts)
        changed = ", ".join(corpus.check_content())
    except DataChanged as error:  # what is left could not be looked at
        changed = str(error)
    if changed:
        checks.append(Check("the files did not change meanwhile", False, note=changed))
    return checks


class Scanned(NamedTuple):
    """The ids of one array, read once: least, largest, first one out of range, sha256.

    `sha256` is of its bytes; with those before it, where it fills the rest of its file: then it is
    that of the `whole_file`.
    """

    smallest: int
    largest: int
    first_bad: int | None
    sha256: str
    whole_file: bool


def scan(shard: Shard, vocab_size: int) -> Scanned:
    """Read every id once. Raises DataChanged when the file is cut meanwhile."""
    offset, digest = getattr(shard.array, "offset", 0), hashlib.sha256()
    whole = shard.state is not None and offset + shard.array.nbytes == shard.state[1]
    if whole:
        with open(shard.name, "rb") as file:
            digest.update(file.read(offset))
    ends, first_bad = set[int](), None  # the least and the largest id of each block
    stream = TokenStream([replace(shard, ids=shard.array)])
    for start, ids in stream.blocks(_BLOCK_BYTES // shard.array.itemsize):
        digest.update(np.ascontiguousarray(ids).data)
        ends |= {low := int(ids.min()), high := int(ids.max())}
        if first_bad is None and (low < 0 or high >= vocab_size):
            first_bad = start + int(np.flatnonzero((ids < 0) | (ids >= vocab_size))[0])
    return Scanned(min(ends), max(ends), first_bad, digest.hexdigest(), whole)


def check_shards(shards: list[Shard], vocab_size: int, path: Path) -> list[Check]:
    """Check of each array whether its ids are in [0, vocab_size), and whether it is as written.

    Lists the digests of the files in `path`/sha256.txt.
    """
    # hashlib and numpy let go of the interpreter lock
    with ThreadPoolExecutor(min(8, cpu_count())) as pool:
        scanned = list(pool.map(lambda s: scan(s, vocab_size), shards))
    in_range, written, sums, unknown = list[Check](), list[Check](), "", 0
    for number, (shard, found) in enumerate(zip(shards, scanned, strict=True), 1):
        name = shard.name if shard.mapped is not None else f"array {number} in memory"
        figure = f"{len(shard.array):,} ids from {found.smallest} to {found.largest}"
        note = f"sha256 {found.sha256}"
        if (bad := found.first_bad) is not None:
            note = f"id {int(shard.array[bad])} at position {bad:,} is the first; {note}"
        what, limit = f"token ids of {name} in range", f"0 to {vocab_size - 1}"
        in_range.append(Check(what, bad is None, figure, limit, note))
        if found.whole_file:
            sums += f"{found.sha256}  {Path(shard.name).absolute()}\n"
            sha256 = noted(Path(shard.name)).get("sha256")
            unknown += sha256 is None
            if sha256 is not None:
                what, same = f"sha256 of {shard.name} as it was written", found.sha256 == sha256
                written.append(Check(what, same, found.sha256[:16], sha256[:16]))
    if sums:
        fileio.write_whole(path / SUMS, redacted(sums))
    checks = _few(in_range, "token ids of all others in range")
    checks += _few(written, "all other files as written")
    if unknown:
        note = f"no sha256 was noted when these files were written; now it is in {SUMS}"
        checks.append(Check("other files are what was written", None, unknown, note=note))
    return checks


def _few(checks: list[Check], others: str) -> list[Check]:
    """Return the checks, or where they are many those that fail and one for the rest."""
    failed = [c for c in checks if not c.passed]
    if len(checks) <= _SHOWN or len(failed) == len(checks):
        return checks
    return [*failed, Check(others, True, len(checks) - len(failed))]


def check_order(parts: Parts) -> list[Check]:
    """Check that epochs 0 and 1 visit each sequence once, and each window holds those of its place.

    Windows are looked at over all ranks.
    """
    run, order = parts.run, sampler_of(parts)
    n, real, begin = run.train_sequences, run.real_batch_size, run.first_step
    if order.mixed is None:
        checks = [covers(epoch, order.seed, n, order.shuffle) for epoch in (0, 1)]
    else:
        checks = [mixes(order, name) for name in order.mixed.tokens]
    some = np.random.default_rng(0).integers(begin, run.max_steps, WINDOWS).tolist()
    stages = [stage for stage in run.stages if stage.first_sequence <= n]
    # the window with the first sequence of epoch 1
    boundary = [(n - s.offset) // s.real_batch_size for s in stages[-1:]]
    edges = [step for stage in run.stages for step in (stage.first_step, stage.first_step - 1)]
    sampled = sorted(
        s for s in {*edges, *boundary, run.max_steps - 1, *some} if begin <= s < run.max_steps
    )
    ranks = sorted({round(i * (run.dp_size - 1) / (RANKS - 1)) for i in range(RANKS)})
    differing = []
    for step in sampled:
        for rank in ranks:
            cut = RankSlice(run.micro_batch_size, rank, run.dp_size)
            if text := other_window(sampler_of(parts, run.stage_at(step)), cut, step):
                differing.append(f"step {step + 1:,} on rank {rank}: {text}")
    cut_text = f"{run.micro_batch_size} x {run.gradient_accumulation_steps} x {run.dp_size} ranks"
    place = "of their place in the ramp" if run.ramp else f"[s x {real}, (s + 1) x {real})"
    what = f"batches, in layout {cut_text}, hold the sequences {place}"
    looked = len(sampled) * len(ranks)
    return [*checks, none_differ(what, differing, looked, "sampled, the last one among them")]


def _visits(
    count: int, n: int, places: Callable[[np.ndarray], np.ndarray]
) -> tuple[np.ndarray, int]:
    """Return how often each of n sequences is visited, and how many visits are of none of them.

    `places` gives those of some of `count` numbers.
    """
    visits, outside = np.zeros(n, dtype=np.int64), 0
    for start in range(0, count, 1 << 18):
        index = places(np.arange(start, min(count, start + (1 << 18))))
        inside = index[(index >= 0) & (index < n)]
        outside += len(index) - len(inside)
        visits += np.bincount(inside, minlength=n)
    return visits, outside


def covers(epoch: int, seed: int, n: int, shuffle: bool) -> Check:
    visits, outside = _visits(n, n, lambda k: sequence_index(seed, epoch * n + k, n, shuffle))
    visited = int((visits > 0).sum())  # n visits in all: so none was twice, if each was
    note = f"train.seed={seed}"
    if visited < n:
        note += f"; sequence {int(visits.argmin()):,} is the first that is missing"
    if outside:
        note += f"; {outside:,} outside the corpus"
    what = f"sequences that epoch {epoch} visits, each once"
    return Check(what, visited == n and not outside, visited, n, note)


def mixes(order: Sampler, name: str) -> Check:
    """Check that a source of a mixture has its share of the run.

    None of its sequences comes again before all have come.
    """
    assert order.mixed is not None
    sizes, length = order.mixed.tokens, order.sequence_length
    first = sum(sizes[other] for other in itertools.takewhile(lambda other: other != name, sizes))
    n = order.mixed.sequences(length)[name]

    def places(k: np.ndarray) -> np.ndarray:
        at = order.starts(k) - first
        at = at[(at >= 0) & (at < sizes[name])]
        return np.where(at % length, -1, at // length)

    visits, outside = _visits(order.total_sequences, n, places)
    wanted, _ = order.mixed.shares(order.total_sequences, length)[name]
    total = int(visits.sum())
    what = f"sequences of the source {name}, none twice in an epoch"
    passed = total == wanted and np.ptp(visits) <= 1 and not outside
    note = f"train.seed={order.seed}; {n:,} in the source"
    return Check(what, bool(passed), total, wanted, note)


def other_window(order: Sampler, cut: RankSlice, step: int) -> str:
    """Return how the window of a rank's reader differs from the sequences of its place.

    Empty where it does not.
    """
    (window,) = read_windows(order, cut, step, step + 1)
    length, per_rank = order.sequence_length, order.real_batch_size // cut.dp_size
    first = order.offset + step * order.real_batch_size + cut.dp_rank * per_rank
    starts = starts_of(order, np.arange(first, min(first + per_rank, order.total_sequences)))
    tokens, targets = (torch.cat(both).numpy() for both in zip(*window.micro_batches, strict=True))
    if len(tokens) < len(starts):
        return f"{len(tokens)} rows, not {len(starts)}"
    valid = 0
    for row, start in enumerate(starts):
        ids = order.stream.read(start, length + 1)
        labels = order.stream.hidden(np.array([start]), length + 1)
        hidden = order.mask.at(ids, None if labels is None else labels[0])
        wanted = ids[1:] if hidden is None else np.where(hidden, IGNORE_INDEX, ids[1:])
        if not np.array_equal(tokens[row], ids[:-1]) or not np.array_equal(targets[row], wanted):
            return f"row {row} is not sequence {first + row:,} of the run"
        valid += int((wanted != IGNORE_INDEX).sum())
    surplus = np.flatnonzero((targets[len(starts) :] != IGNORE_INDEX).any(axis=1))
    if len(surplus):
        return f"row {len(starts) + surplus[0]}, which is missing, is not masked"
    if window.target_count != valid:
        return f"the batch claims {window.target_count} targets, {valid} are there"
    return ""


def check_sources(parts: Parts) -> list[Check]:
    """Check that the shards were made of what the sources hold now: each file is hashed again.

    Buckets and the hub are asked, and no answer is kept. Other data have no check.
    """
    if not parts.corpus.is_text:
        return []
    what = "was prepared from the files of today"
    try:
        sources, remote = sources_of(parts.config.data, keep=False)
        works = works_of(sources, parts.tokenizer, remote)
    except ConfigError as error:  # such as of a bucket that does not answer
        return [Check(f"{what}: the sources", None, note=str(error))]
    used = {Path(shard.name).parent for shard in parts.corpus.shards()}
    # a source of weight 0 has no shards in use
    return [
        Check(f"{w.source.key} {what}", w.folder in used) for w in works if w.source.weight != 0
    ]


def check_documents(parts: Parts) -> list[Check]:
    """Check that the documents fill their shards, and that none is in two sets.

    They are told by the digest of their text. Copies inside a set are counted. Nothing for data
    without documents.
    """
    corpus = parts.corpus
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
    unique = {name: np.unique(digests_of(shards)) for name, shards in sets.items()}
    for first, second in combinations(unique, 2):
        both, note = np.intersect1d(unique[first], unique[second], assume_unique=True), ""
        if len(both):
            one, other = (_place(both[0], sets[name], parts) for name in (first, second))
            note = f"{one} is {other}; leave it out of one of them"
        what = f"documents in both {first} and {second}"
        checks.append(Check(what, not len(both), len(both), 0, note))
    return checks


def _filled(what: str, shards: Sequence[Shard]) -> Check:
    """Check that the ends of documents are in order up to the end of each shard.

    Each document has a digest and its bytes, too.
    """
    wrong = ""
    for shard in shards:
        known = known_documents(shard)
        if known is None or len(beside(shard, "digests")) != len(known[0]):
            wrong = wrong or f"{shard.name}: its documents do not fill it"
    digests = digests_of(shards)
    copies = len(digests) - len(np.unique(digests))
    note = wrong or (f"exact copies among them: {copies:,}" if copies else "")
    return Check(f"documents of the {what}", not wrong, f"{len(digests):,}", note=note)


def _place(digest: np.void, shards: Sequence[Shard], parts: Parts) -> str:
    """Return where a document of a set was read: the files of its unit are read again."""
    path = next(Path(s.name) for s in shards if digest in beside(s, "digests"))
    works, _ = works_to_prepare(parts.config.data, parts.tokenizer)
    work = next(work for work in works if work.folder == path.parent)
    unit = int(path.name.split("-")[0])
    try:
        for document in work.source.read(Counts(), work.units[unit]):
            if document.digest == digest.tobytes():
                return document.where
    except ValueError:  # such as of a bucket that does not answer now
        pass
    return f"a document of {work.source.key}"
