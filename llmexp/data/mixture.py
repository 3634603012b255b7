"""Mix several sources: which source the sequence k comes from, and how many of that source came
before it.

A pure function of k: the sources follow each other in a pattern that repeats, and the pattern is
made from the weights alone. In every stretch that begins with a stage, each source has its share
of the sequences to within one.
"""

from __future__ import annotations

import functools
import hashlib
import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from llmexp.data.order import sequence_index

LONGEST = 1 << 14  # of a pattern; weights that need a longer one are rounded to parts of this


def whole_weights(weights: Sequence[float]) -> list[int]:
    """Return whole numbers in the proportions of the weights, with the smallest sum: exactly where
    a sum up to LONGEST can do that, else rounded to a sum of LONGEST.

    The weights are at least 0 and one is above 0; what is above 0 stays above 0.
    """
    exact = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    divisor = math.gcd(*whole)
    whole = [number // divisor for number in whole]
    total = sum(whole)
    if total <= LONGEST:
        return whole
    rounded = [max(number > 0, number * LONGEST // total) for number in whole]
    # The largest remainders get what rounding down left; the largest gives what is too much.
    order = sorted(range(len(whole)), key=lambda i: -(whole[i] * LONGEST % total))
    for i in order[: max(0, LONGEST - sum(rounded))]:
        rounded[i] += 1
    rounded[rounded.index(max(rounded))] -= sum(rounded) - LONGEST
    return rounded


def pattern(weights: Sequence[int]) -> np.ndarray:
    """Return int64 [sum of weights]: the source at each place of the pattern.

    Each source's n-th turn lies in its window [(n - 1) / share, n / share); of the turns whose
    window has begun the one that ends first is next. On one processor that meets every window
    (Baruah et al. 1996, "Proportionate progress"), so no count is ever a whole turn off its share.
    """
    total = sum(weights)
    waiting = [(0, i) for i, weight in enumerate(weights) if weight]  # (begin, source)
    heapq.heapify(waiting)
    begun: list[tuple[int, int]] = []  # (end, source)
    turns = [0] * len(weights)
    found = np.empty(total, dtype=np.int64)
    for place in range(total):
        while waiting and waiting[0][0] <= place:
            _, i = heapq.heappop(waiting)
            heapq.heappush(begun, (-(-(turns[i] + 1) * total // weights[i]), i))
        _, i = heapq.heappop(begun)
        found[place] = i
        turns[i] += 1
        heapq.heappush(waiting, (turns[i] * total // weights[i], i))
    return found


@dataclass(frozen=True)
class Stage:
    """A stretch of the run with one set of weights."""

    start: int  # the first sequence of the run in it
    before: np.ndarray  # int64 [sources]: sequences of each source before it
    weights: tuple[int, ...]  # in whole parts of `len(places)`
    places: np.ndarray  # int64 [p]: the source at each place of the pattern
    turns: np.ndarray  # int64 [p]: how many places before have the same source


class Mixture:
    """The order of the sources over a run.

    `stages`: the first sequence of each -> the weights of its sources, in one order in all; the
    first stage begins at 0.
    """

    def __init__(self, stages: Mapping[int, Sequence[float]]) -> None:
        self.stages: list[Stage] = []
        for start, weights in sorted(stages.items()):
            before = self.counts(start) if self.stages else np.zeros(len(weights), np.int64)
            whole = whole_weights(weights)
            places = pattern(whole)
            turns = np.empty_like(places)
            for source, weight in enumerate(whole):
                turns[places == source] = np.arange(weight)
            self.stages.append(Stage(start, before, tuple(whole), places, turns))

    def _starts(self) -> np.ndarray:
        return np.array([stage.start for stage in self.stages])

    def at(self, k: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return, for sequences `k` (int64 [n], at least 0) of the run, (source, how many sequences
        of that source come before), both int64 [n]."""
        sources, positions = np.empty_like(k), np.empty_like(k)
        which = np.searchsorted(self._starts(), k, side="right") - 1
        for number in np.unique(which).tolist():
            stage = self.stages[number]
            mine = which == number
            rounds, place = np.divmod(k[mine] - stage.start, len(stage.places))
            found = stage.places[place]
            sources[mine] = found
            positions[mine] = (
                stage.before[found] + rounds * np.array(stage.weights)[found] + stage.turns[place]
            )
        return sources, positions

    def counts(self, k: int) -> np.ndarray:
        """Return int64 [sources]: how many of the first `k` sequences come from each source."""
        stage = self.stages[int(np.searchsorted(self._starts(), max(0, k - 1), side="right")) - 1]
        if k <= stage.start:
            return stage.before.copy()
        rounds, rest = divmod(k - stage.start, len(stage.places))
        weights = np.array(stage.weights)
        partial = np.bincount(stage.places[:rest], minlength=len(weights))
        return stage.before + rounds * weights + partial


@dataclass(frozen=True)
class Mixed:
    """Several sources that lie one after the other in the training stream."""

    tokens: dict[str, int]  # by source, in the order of the stream
    weights: dict[int, dict[str, float]]  # by the first sequence of the run that they count for
    max_epochs: float | None = None  # the most often that a source may be walked

    @functools.cached_property
    def mixture(self) -> Mixture:
        return Mixture({k: [found[n] for n in self.tokens] for k, found in self.weights.items()})

    def starts(self, k: np.ndarray, seed: int, shuffle: bool, sequence_length: int) -> np.ndarray:
        """Return int64 [n]: the first token of the sequences `k` (int64 [n]) of the run.

        Each source has an order of its own, which no other source and no weight changes.
        """
        source, position = self.mixture.at(k)
        there = self.sequences(sequence_length)
        starts, first = np.empty_like(k), 0
        for number, (name, tokens) in enumerate(self.tokens.items()):
            mine = source == number
            index = sequence_index(_seed_of(seed, name), position[mine], there[name], shuffle)
            starts[mine] = first + index * sequence_length
            first += tokens
        return starts

    def sequences(self, sequence_length: int) -> dict[str, int]:
        """Return the whole sequences of each source."""
        return {name: max(0, n - 1) // sequence_length for name, n in self.tokens.items()}

    def shares(self, total_sequences: int, sequence_length: int) -> dict[str, tuple[int, float]]:
        """Return, for a run of so many sequences, (sequences, epochs) of each source."""
        counts = self.mixture.counts(total_sequences).tolist()
        there = self.sequences(sequence_length)
        return {
            name: (count, count / there[name])
            for name, count in zip(self.tokens, counts, strict=True)
        }


def _seed_of(seed: int, name: str) -> int:
    """Return the seed of one source's order."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
