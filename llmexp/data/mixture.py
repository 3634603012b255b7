"""Mix several sources: which one sequence k of a run comes from follows from k and the weights.

The sources, the heaviest first, share out the sequences one after the other. Of the first n
sequences that are left, a source of weight w takes the nearest whole number to n w / (w + the
weights after it), and passes the others on. So each has its share of any prefix to within
1 + ln(sources) / 2 sequences, and a division for each source finds the place of sequence k.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from llmexp.data.order import sequence_index

WHOLE = 1 << 30  # the sum that weights are rounded to: products of two stay in int64


def whole_weights(weights: list[float]) -> list[int]:
    """Return whole numbers in the proportions of the weights; what is above 0 stays above 0.

    Sizes of sources that add up to WHOLE at most stay as they are, so their shares are exact.
    """
    total = sum(weights)
    if total <= WHOLE and all(weight == int(weight) for weight in weights):
        return [int(weight) for weight in weights]
    return [max(int(weight > 0), round(weight * WHOLE / total)) for weight in weights]


def shared_out(n: np.ndarray, weights: list[int]) -> np.ndarray:
    """Return int64 [sources, m]: how many of the first n (int64 [m]) sequences each source has."""
    found = np.zeros((len(weights), len(n)), np.int64)
    left = sum(weights)
    for source in sorted(range(len(weights)), key=lambda i: -weights[i]):
        if weight := weights[source]:
            found[source] = n // left * weight + (2 * (n % left) * weight + left) // (2 * left)
            n, left = n - found[source], left - weight
    return found


class WeightSpan(NamedTuple):
    """A stretch of the run with one set of weights."""

    start: int  # the first sequence of the run in it
    before: np.ndarray  # int64 [sources]: sequences of each source before it
    weights: list[int]

    def counts(self, k: int) -> np.ndarray:
        """Return int64 [sources]: how many of the run's first `k` come from each source."""
        return self.before + shared_out(np.array([k - self.start]), self.weights)[:, 0]


@dataclass(frozen=True)
class Mixture:
    """Several sources that lie one after the other in the training stream."""

    tokens: dict[str, int]  # by source, in the order of the stream
    weights: dict[int, dict[str, float]]  # by the first sequence of the run that they count for
    max_epochs: float | None = None  # the most often that a source may be walked

    @functools.cached_property
    def _stages(self) -> list[WeightSpan]:
        stages: list[WeightSpan] = []
        for start, weights in sorted(self.weights.items()):
            before = stages[-1].counts(start) if stages else np.zeros(len(self.tokens), np.int64)
            whole = whole_weights([weights[name] for name in self.tokens])
            stages.append(WeightSpan(start, before, whole))
        return stages

    def at(self, k: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (source, how many sequences of that source come before), both int64 [n].

        `k`: int64 [n], sequences of the run, at least 0.
        """
        sources, turns = np.empty_like(k), np.empty_like(k)
        which = np.searchsorted([stage.start for stage in self._stages], k, side="right") - 1
        for number in np.unique(which).tolist():
            mine, (start, before, weights) = which == number, self._stages[number]
            there = shared_out(k[mine] - start, weights)
            more = shared_out(k[mine] - start + 1, weights) - there
            sources[mine] = found = more.argmax(axis=0)
            turns[mine] = before[found] + there[found, np.arange(len(found))]
        return sources, turns

    def counts(self, k: int) -> np.ndarray:
        """Return int64 [sources]: how many of the first `k` sequences come from each source."""
        return [stage for stage in self._stages if stage.start < max(1, k)][-1].counts(k)

    def starts(self, k: np.ndarray, seed: int, shuffle: bool, sequence_length: int) -> np.ndarray:
        """Return int64 [n]: the first token of the sequences `k` (int64 [n]) of the run.

        Each source has an order of its own, which no other source and no weight changes.
        """
        source, position = self.at(k)
        there = np.array([*self.sequences(sequence_length).values()])
        names = (f"{seed}/{name}".encode() for name in self.tokens)
        digests = [blake2b(name, digest_size=8).digest() for name in names]
        seeds = np.frombuffer(b"".join(digests), "<u8")
        index = sequence_index(seeds[source], position, there[source], shuffle)
        first = np.cumsum([0, *self.tokens.values()])
        return first[source] + index * sequence_length

    def sequences(self, sequence_length: int) -> dict[str, int]:
        """Return the whole sequences of each source."""
        return {name: max(0, n - 1) // sequence_length for name, n in self.tokens.items()}

    def shares(self, total_sequences: int, sequence_length: int) -> dict[str, tuple[int, float]]:
        """Return, for a run of so many sequences, (sequences, epochs) of each source."""
        there = self.sequences(sequence_length)
        pairs = zip(self.tokens, self.counts(total_sequences).tolist(), strict=True)
        return {name: (count, count / there[name]) for name, count in pairs}
