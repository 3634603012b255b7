"""Mix several sources: which source the sequence k comes from, and how many of that source came
before it.

A pure function of k and the weights. Weights in few whole parts make a pattern that repeats: in
every stretch that begins with a stage, each source has its share of the sequences to within one.
Other weights, such as the sizes of sources, split the sequences in two again and again: exactly
too, and to within two.
"""

from __future__ import annotations

import functools
import hashlib
import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from llmexp.data.order import sequence_index

LONGEST = 1 << 16  # of a pattern
FINEST = 1 << 30  # parts that weights are rounded to where they need more: products stay in int64


def whole_weights(weights: Sequence[float]) -> list[int]:
    """Return whole numbers in the proportions of the weights, with the smallest sum: exactly where
    a sum up to FINEST can do that, else rounded to a sum of FINEST.

    The weights are at least 0 and one is above 0; what is above 0 stays above 0.
    """
    exact = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    divisor = math.gcd(*whole)
    whole = [number // divisor for number in whole]
    total = sum(whole)
    if total <= FINEST:
        return whole
    rounded = [max(number > 0, number * FINEST // total) for number in whole]
    # The largest remainders get what rounding down left; the largest gives what is too much.
    order = sorted(range(len(whole)), key=lambda i: -(whole[i] * FINEST % total))
    for i in order[: max(0, FINEST - sum(rounded))]:
        rounded[i] += 1
    rounded[rounded.index(max(rounded))] -= sum(rounded) - FINEST
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


class Pattern:
    """Sources that follow each other in a pattern."""

    def __init__(self, weights: Sequence[int]) -> None:
        self._weights = np.array(weights, dtype=np.int64)
        self._places = pattern(weights)  # the source at each place
        self._turns = np.empty_like(self._places)  # how many places before have the same source
        for source, weight in enumerate(weights):
            self._turns[self._places == source] = np.arange(weight)

    def at(self, k: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rounds, place = np.divmod(k, len(self._places))
        found = self._places[place]
        return found, rounds * self._weights[found] + self._turns[place]

    def counts(self, k: int) -> np.ndarray:
        rounds, rest = divmod(k, len(self._places))
        partial = np.bincount(self._places[:rest], minlength=len(self._weights))
        counts: np.ndarray = rounds * self._weights + partial
        return counts


class Halves:
    """Sources as the leaves of a binary tree, whose nodes share out their sequences in two.

    Of the first k sequences of a node the left one gets k times its share, rounded. The tree is
    Huffman's: the share of a leaf in the nodes above falls as the reciprocals of Fibonacci numbers,
    and so do the roundings that add up in it: to less than 1.7 sequences.
    """

    def __init__(self, weights: Sequence[int]) -> None:
        self._sources = len(weights)
        nodes: list[tuple[int, int, Any]] = [
            (weight, i, i) for i, weight in enumerate(weights) if weight
        ]
        heapq.heapify(nodes)
        while len(nodes) > 1:
            (left, i, below), (right, _, beside) = heapq.heappop(nodes), heapq.heappop(nodes)
            heapq.heappush(nodes, (left + right, i, (left, left + right, below, beside)))
        self._root = nodes[0][2]

    def at(self, k: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        sources, turns = np.empty_like(k), np.empty_like(k)
        waiting = [(self._root, np.arange(len(k)), k)]
        while waiting:
            node, where, turn = waiting.pop()
            if isinstance(node, int):
                sources[where], turns[where] = node, turn
                continue
            share, whole, left, right = node
            before = _shared(turn, share, whole)
            is_left = _shared(turn + 1, share, whole) > before
            waiting.append((left, where[is_left], before[is_left]))
            waiting.append((right, where[~is_left], (turn - before)[~is_left]))
        return sources, turns

    def counts(self, k: int) -> np.ndarray:
        found = np.zeros(self._sources, dtype=np.int64)
        waiting = [(self._root, k)]
        while waiting:
            node, count = waiting.pop()
            if isinstance(node, int):
                found[node] = count
                continue
            share, whole, left, right = node
            first = int(_shared(count, share, whole))
            waiting += [(left, first), (right, count - first)]
        return found


def _shared(k: Any, share: int, whole: int) -> Any:
    """Return k x share / whole, rounded; the next k gives as many or one more."""
    return k // whole * share + (2 * (k % whole) * share + whole) // (2 * whole)


@dataclass(frozen=True)
class Stage:
    """A stretch of the run with one set of weights."""

    start: int  # the first sequence of the run in it
    before: np.ndarray  # int64 [sources]: sequences of each source before it
    order: Pattern | Halves


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
            order = Pattern(whole) if sum(whole) <= LONGEST else Halves(whole)
            self.stages.append(Stage(start, before, order))

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
            found, turns = stage.order.at(k[mine] - stage.start)
            sources[mine], positions[mine] = found, stage.before[found] + turns
        return sources, positions

    def counts(self, k: int) -> np.ndarray:
        """Return int64 [sources]: how many of the first `k` sequences come from each source."""
        stage = self.stages[int(np.searchsorted(self._starts(), max(0, k - 1), side="right")) - 1]
        found: np.ndarray = stage.before + stage.order.counts(max(0, k - stage.start))
        return found


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
