"""Mix several sources: which one sequence k of a run comes from follows from k and the weights.

The sources, the heaviest first, share out the sequences one after the other. Of the first n
sequences that are left, a source of weight w takes the nearest whole number to n w / (w + the
weights after it), and passes the others on. So no two sources ever want one sequence, each has its
share of any prefix to within 1 + ln(sources) / 2 sequences, and the source of sequence k, and how
many of that source came before it, follow from k by one division for each source.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

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


def taken(n: np.ndarray, weight: int, left: int) -> np.ndarray:
    """Return n x weight / left, rounded: the sequences that a source takes of the first n."""
    return n // left * weight + (2 * (n % left) * weight + left) // (2 * left)


@dataclass(frozen=True)
class Stage:
    """A stretch of the run with one set of weights."""

    start: int  # the first sequence of the run in it
    before: np.ndarray  # int64 [sources]: sequences of each source before it
    weights: list[int]

    def takers(self) -> Iterator[tuple[int, int, int]]:
        """Yield (source, its weight, the weights from it on), the heaviest first."""
        left = sum(self.weights)
        for source in sorted(range(len(self.weights)), key=lambda i: -self.weights[i]):
            if weight := self.weights[source]:
                yield source, weight, left
                left -= weight

    def at(self, k: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (source, how many sequences of it come before) of the run's sequences `k`."""
        sources, turns = np.empty_like(k), np.empty_like(k)
        where, n = np.arange(len(k)), k - self.start
        for source, weight, left in self.takers():
            before = taken(n, weight, left)
            mine = taken(n + 1, weight, left) > before
            sources[where[mine]] = source
            turns[where[mine]] = before[mine] + self.before[source]
            where, n = where[~mine], (n - before)[~mine]
        return sources, turns

    def counts(self, k: int) -> np.ndarray:
        """Return int64 [sources]: how many of the run's first `k` come from each source."""
        found, n = self.before.copy(), np.array(k - self.start)
        for source, weight, left in self.takers():
            found[source] += taken(n, weight, left)
            n = n - taken(n, weight, left)
        return found


@dataclass(frozen=True)
class Mixture:
    """Several sources that lie one after the other in the training stream."""

    tokens: dict[str, int]  # by source, in the order of the stream
    weights: dict[int, dict[str, float]]  # by the first sequence of the run that they count for
    max_epochs: float | None = None  # the most often that a source may be walked

    @functools.cached_property
    def _stages(self) -> list[Stage]:
        stages: list[Stage] = []
        for start, weights in sorted(self.weights.items()):
            before = stages[-1].counts(start) if stages else np.zeros(len(self.tokens), np.int64)
            whole = whole_weights([weights[name] for name in self.tokens])
            stages.append(Stage(start, before, whole))
        return stages

    def at(self, k: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (source, how many sequences of that source come before), both int64 [n].

        `k`: int64 [n], sequences of the run, at least 0.
        """
        sources, turns = np.empty_like(k), np.empty_like(k)
        starts = [stage.start for stage in self._stages]
        which = np.searchsorted(starts, k, side="right") - 1
        for number in np.unique(which).tolist():
            mine = which == number
            sources[mine], turns[mine] = self._stages[number].at(k[mine])
        return sources, turns

    def counts(self, k: int) -> np.ndarray:
        """Return int64 [sources]: how many of the first `k` sequences come from each source."""
        return [stage for stage in self._stages if stage.start < max(1, k)][-1].counts(k)

    def starts(self, k: np.ndarray, seed: int, shuffle: bool, sequence_length: int) -> np.ndarray:
        """Return int64 [n]: the first token of the sequences `k` (int64 [n]) of the run.

        Each source has an order of its own, which no other source and no weight changes.
        """
        source, position = self.at(k)
        there = np.array(list(self.sequences(sequence_length).values()))
        seeds = np.array([_seed_of(seed, name) for name in self.tokens], dtype=np.uint64)
        index = sequence_index(seeds[source], position, there[source], shuffle)
        first = np.cumsum([0, *self.tokens.values()])
        return first[source] + index * sequence_length

    def sequences(self, sequence_length: int) -> dict[str, int]:
        """Return the whole sequences of each source."""
        return {name: max(0, n - 1) // sequence_length for name, n in self.tokens.items()}

    def shares(self, total_sequences: int, sequence_length: int) -> dict[str, tuple[int, float]]:
        """Return, for a run of so many sequences, (sequences, epochs) of each source."""
        counts = self.counts(total_sequences).tolist()
        there = self.sequences(sequence_length)
        pairs = zip(self.tokens, counts, strict=True)
        return {name: (count, count / there[name]) for name, count in pairs}


def _seed_of(seed: int, name: str) -> int:
    """Return the seed of one source's order."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
