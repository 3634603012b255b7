"""How much of the validation text train has too: whole documents, or stretches of a text without ends of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from llmexp.data.stream import TokenStream
from llmexp.verify.checks import Check, at_most

OVERLAP_LIMIT = 0.01  # of the validation tokens: licences, empty modules and templates come twice in honest data
MOST_SLOTS = 1 << 24
DOCUMENT_TOKENS = 1 << 16  # longer documents are compared in parts of so many tokens
PROBES = 8  # ids of a document that are looked at before it is hashed
STRETCH_TOKENS = 256  # of a text without ends of documents
HASH_BLOCK = 1 << 16  # tokens that are hashed at a time: what is made of them stays in the core's cache
BASE = 0x9E3779B97F4A7C15  # of the polynomial; odd, so that it has an inverse
BLOCK_TOKENS = 1 << 20


@dataclass(frozen=True)
class Pieces:
    """Documents and parts of them: int64 starts and lengths in the stream; a uint64 key that equal ones share."""

    starts: np.ndarray
    lengths: np.ndarray
    keys: np.ndarray


def pieces_of(stream: TokenStream, end_id: int, most: int, block_tokens: int = BLOCK_TOKENS) -> Iterator[Pieces]:
    """The documents of the stream, in parts of `most` tokens from their start; `end_id` stands between two of them.

    Empty documents are left out.
    """
    first = 0  # of what is left of the present document
    for at, ids in stream.blocks(block_tokens):
        stop = at + len(ids)
        ends = at + np.flatnonzero(ids == end_id)
        firsts = np.concatenate([[first], ends + 1])
        last = stop if stop == len(stream) else stop - (stop - firsts[-1]) % most  # a part may go on in the next block
        lasts = np.concatenate([ends, [last]])
        first = int(last)
        counts = -(-(lasts - firsts) // most)  # 0 for an empty document
        nth = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        starts = np.repeat(firsts, counts) + nth * most
        lengths = np.minimum(most, np.repeat(lasts, counts) - starts)
        if len(starts):
            probes = starts[:, None] + np.arange(PROBES) * (lengths[:, None] - 1) // (PROBES - 1)
            probed = ids[np.maximum(probes - at, 0)]
            for row in np.flatnonzero(starts < at):  # it began in an earlier block
                probed[row] = stream.gather(probes[row], 1)[:, 0]
            yield Pieces(starts, lengths, _keys(lengths, probed))


def _keys(lengths: np.ndarray, probed: np.ndarray) -> np.ndarray:
    """Of the length and PROBES ids of each piece, the first and the last among them: tells apart nearly all."""
    keys = lengths.astype(np.uint64)
    for ids in probed.T.astype(np.uint64):
        keys = (keys ^ (keys >> np.uint64(29))) * np.uint64(0x9E3779B97F4A7C15) + ids
    return keys


def _digests(stream: TokenStream, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """uint64 [n]: blake2b of each piece's ids."""
    found = np.empty(len(starts), np.uint64)
    for i, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        found[i] = int.from_bytes(hashlib.blake2b(stream.read(start, length).data, digest_size=8).digest(), "little")
    return found


def _join(found: list[Pieces]) -> Pieces:
    none = Pieces(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.uint64))
    names = ("starts", "lengths", "keys")
    return Pieces(*(np.concatenate([getattr(p, name) for p in (none, *found)]) for name in names))


def _like(pieces: Pieces, keys: np.ndarray) -> Pieces:
    """Those with one of `keys`, which are sorted."""
    kept = np.zeros(len(pieces.keys), dtype=np.bool_)
    if len(keys):
        kept = keys[np.minimum(np.searchsorted(keys, pieces.keys), len(keys) - 1)] == pieces.keys
    return Pieces(pieces.starts[kept], pieces.lengths[kept], pieces.keys[kept])


def check_overlap(train: TokenStream, val: TokenStream, end_id: int | None) -> Check:
    """How much of the validation text train has too, token for token: whole documents, which end at `end_id`, or where
    one of the two has no such id stretches of STRETCH_TOKENS."""
    what = "share of the validation tokens that train has too"
    if not len(val):
        return Check(what, None, note="there is no validation text")
    if end_id is not None and _holds(val, end_id) and _holds(train, end_id):
        share, note = documents_in_train(train, val, end_id)
    else:
        share, note = stretches_in_train(train, val)
    if share is None:
        return Check(what, None, note="there is no validation text")
    return at_most(what, share, OVERLAP_LIMIT, note)


def documents_in_train(train: TokenStream, val: TokenStream, end_id: int) -> tuple[float | None, str]:
    """(share of the validation tokens in documents that train has too, in words). Of `train` only what has a key of
    `val` is hashed."""
    of_val = _join(list(pieces_of(val, end_id, DOCUMENT_TOKENS)))
    if not len(of_val.starts):
        return None, ""
    wanted = np.unique(of_val.keys)
    of_train = _join([_like(pieces, wanted) for pieces in pieces_of(train, end_id, DOCUMENT_TOKENS)])
    likely = _like(of_val, np.unique(of_train.keys))
    digests, first = np.unique(_digests(train, of_train.starts, of_train.lengths), return_index=True)
    val_digests = _digests(val, likely.starts, likely.lengths)
    twice = np.flatnonzero(np.isin(val_digests, digests))
    note = f"{len(twice):,} of {len(of_val.starts):,} documents"
    if len(twice):
        longest = twice[np.argmax(likely.lengths[twice])]
        place = of_train.starts[first[np.searchsorted(digests, val_digests[longest])]]
        note += _example(likely.lengths[longest], likely.starts[longest], place)
    return float(likely.lengths[twice].sum() / of_val.lengths.sum()), note


def stretches_in_train(
    train: TokenStream, val: TokenStream, most: int = STRETCH_TOKENS, block_tokens: int = HASH_BLOCK
) -> tuple[float, str]:
    """(share of the validation tokens that stand in a stretch equal to one of train's, in words).

    Train is cut into stretches of `most` tokens, which are looked for at every position of `val` (as rsync does,
    Tridgell and Mackerras 1996): whatever the two have in common is found where it has 2 `most` - 1 tokens or more. Of
    a shorter `val` that is one copied whole.
    """
    length = min(most, (len(val) + 1) // 2)
    hashes = _stretch_hashes(train, length, block_tokens)
    places = np.argsort(hashes)
    hashes = hashes[places]
    # Nearly every position is told apart by a look into a small table; the upper bits of a hash are its best ones.
    bits = min(MOST_SLOTS, 64 * len(hashes)).bit_length()
    shift = np.uint64(64 - bits)
    table = np.zeros(1 << bits, np.bool_)
    table[hashes >> shift] = True
    covered, reached, note = 0, 0, ""
    for at, here in windows(val, length, block_tokens):
        likely = np.flatnonzero(np.take(table, (here >> shift).view(np.int64), mode="wrap"))  # without a look at bounds
        near = np.minimum(np.searchsorted(hashes, here[likely]), len(hashes) - 1)
        hits = np.flatnonzero(hashes[near] == here[likely])
        for some in np.array_split(hits, 1 + len(hits) // 4096):
            starts = at + likely[some]
            of_train = np.minimum(places[near[some]] * length, len(train) - length)
            same = (val.gather(starts, length) == train.gather(of_train, length)).all(1)
            starts, of_train = starts[same], of_train[same]
            if len(starts):
                note = note or _example(length, starts[0], of_train[0])
                stops = np.append(reached, starts + length)  # `reached`: what is covered by now ends there
                covered += int((stops[1:] - np.maximum(starts, stops[:-1])).sum())
                reached = int(stops[-1])
    return covered / len(val), f"{covered:,} of {len(val):,} tokens in stretches of {length}{note}"


def _example(length: int, of_val: int, of_train: int) -> str:
    return f"; for example the {length:,} tokens at {of_val:,} of validation and {of_train:,} of train"


def _stretch_hashes(stream: TokenStream, length: int, block_tokens: int) -> np.ndarray:
    """uint64 [n]: the hash, as of `windows`, of each stretch of `length` tokens from the start, and of the last."""
    powers = _powers(BASE, length)
    found, kept = [np.empty(0, np.uint64)], np.empty(0, np.uint64)  # the start of a stretch that goes on
    for _, block in stream.blocks(max(1, block_tokens // length) * length):
        ids = block.astype(np.uint64)
        ids = np.concatenate([kept, ids]) if len(kept) else ids
        count = len(ids) // length
        found.append(np.einsum("ij,j->i", ids[: count * length].reshape(count, length), powers))
        kept = ids[count * length :]
    if len(kept) and len(stream) >= length:
        found.append(stream.gather(np.array([len(stream) - length]), length).astype(np.uint64) @ powers)
    return np.concatenate(found)


def windows(stream: TokenStream, length: int, block_tokens: int) -> Iterator[tuple[int, np.ndarray]]:
    """(position, uint64 hashes of the windows of `length` tokens there and at the positions that follow), of all.

    The hash of a window x is the sum of x[j] BASE^j modulo 2^64 (Karp and Rabin 1987), from differences of running
    sums.
    """
    powers, inverse = (_powers(base, block_tokens + length) for base in (BASE, pow(BASE, -1, 1 << 64)))
    kept = np.empty(0, np.uint64)  # the start of windows that go on in the next block
    for at, block in stream.blocks(block_tokens):
        first = at - len(kept)
        ids = np.concatenate([kept, block.astype(np.uint64)])
        sums = np.zeros(len(ids) + 1, np.uint64)
        np.cumsum(ids * powers[: len(ids)], out=sums[1:])
        count = max(0, len(ids) - length + 1)
        if count:
            yield first, (sums[length:] - sums[:count]) * inverse[:count]
        kept = ids[count:]


def _powers(base: int, count: int) -> np.ndarray:
    """uint64 [count]: base^0, base^1, ... modulo 2^64."""
    factors = np.full(count, base, np.uint64)
    factors[0] = 1
    return np.cumprod(factors, dtype=np.uint64)


def _holds(stream: TokenStream, token: int) -> bool:
    return any((ids == token).any() for _, ids in stream.blocks(BLOCK_TOKENS))
