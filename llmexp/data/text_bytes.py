"""Count the bytes of text that ids of a stream stand for, whatever the tokenizer.

An id of a byte-level tokenizer stands for its own bytes. Other tokenizers change the text first (a
space in front, other forms of letters, pieces for what they do not know), so their ids only share
out what the shards know: each document's bytes, in proportion to the lengths of its ids' pieces.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from llmexp.data.beside import beside
from llmexp.data.stream import Shard, TokenStream
from llmexp.data.tokenizers.base import Tokenizer

_Documents = tuple[np.ndarray, np.ndarray, np.ndarray]


class TextBytes:
    """The bytes of text at places of streams, which one tokenizer made."""

    def __init__(self, tokenizer: Tokenizer, is_text: bool, vocab_size: int | None) -> None:
        lengths = tokenizer.byte_lengths
        self._lengths = np.pad(lengths, (0, max(0, (vocab_size or 0) - len(lengths))))
        self._is_text = is_text
        self._by_id = tokenizer.counts_bytes
        self._exact = getattr(tokenizer, "exact_bytes", True)
        self._known: dict[TokenStream, _Documents | None] = {}

    def at(self, stream: TokenStream, starts_b: np.ndarray, targets_bt: np.ndarray) -> np.ndarray:
        """Return float64 [b, t]: the bytes of each target, 0 for those below 0.

        All are 0 where the bytes are not known. The inputs of row b begin at `starts_b[b]` of the
        stream.
        """
        valid_bt = targets_bt >= 0
        found_bt = np.where(valid_bt, self._lengths[np.where(valid_bt, targets_bt, 0)], 0.0)
        if not self._is_text:
            return np.zeros_like(found_bt)
        if self._by_id:
            return found_bt
        if stream not in self._known:
            self._known[stream] = self._read(stream)
        if (documents := self._known[stream]) is None:
            return found_bt if self._exact else np.zeros_like(found_bt)
        ends, scale, even = documents
        at_bt = starts_b[:, None] + 1 + np.arange(targets_bt.shape[1])
        number_bt = np.minimum(np.searchsorted(ends, at_bt, side="right"), len(ends) - 1)
        return found_bt * scale[number_bt] + valid_bt * even[number_bt]

    def _read(self, stream: TokenStream) -> _Documents | None:
        """Return the ends of the documents in the stream, and how ids share out their bytes.

        These are the bytes of text per byte of the pieces of a document's ids, and the bytes of
        each id of a document whose ids have no pieces. None where the bytes of the text are not
        known. Every id of the shards is read once; the stream may stop before they do.
        """
        ends, sizes, pieces, first = [], [], [], 0
        for shard in stream.shards:
            if (known := known_documents(shard)) is None:
                return None
            end_n, bytes_n = known
            found_n = np.zeros(len(end_n))  # the bytes of the pieces of each document's ids
            for at, ids in TokenStream([replace(shard, ids=shard.array)]).blocks(1 << 20):
                number = np.searchsorted(end_n, at + np.arange(len(ids)), side="right")
                low = int(number[0])
                sums = np.bincount(number - low, self._lengths[ids])
                found_n[low : low + len(sums)] += sums
            ends.append(first + end_n)
            sizes.append(bytes_n)
            pieces.append(found_n)
            first += len(shard.array)
        if not ends or not stream.starts_its_shards():
            return None
        end_n, size_n = np.concatenate(ends), np.concatenate(sizes).astype(np.float64)
        pieces_n, counts_n = np.concatenate(pieces), np.diff(end_n, prepend=0)
        scale_n = size_n / np.where(pieces_n, pieces_n, np.inf)
        return end_n, scale_n, np.where(pieces_n, 0.0, size_n / counts_n)


def known_documents(shard: Shard) -> tuple[np.ndarray, np.ndarray] | None:
    """Return where the documents of a whole shard end, and the bytes of the text of each.

    None for other arrays.
    """
    try:
        ends, sizes = beside(shard, "ends").astype(np.int64), beside(shard, "bytes")
    except (OSError, ValueError):
        return None
    whole = len(ends) == len(sizes) > 0 and int(ends[-1]) == len(shard.array)
    return (ends, sizes) if whole and (np.diff(ends, prepend=0) > 0).all() else None
