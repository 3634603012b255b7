"""The order of several sources: a brute-force walk, the shares of any prefix, ranks and stages."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmexp.data.mixture import FINEST, LONGEST, Mixed, Mixture, whole_weights

WEIGHTS = st.lists(
    st.one_of(st.integers(1, 40), st.sampled_from([0.1, 0.25, 0.3, 0.7, 1e-3, 12.5])),
    min_size=1,
    max_size=8,
)


@given(WEIGHTS, st.integers(1, 3000))
def test_any_prefix_is_within_one_sequence_of_its_weight(weights, n):
    source, position = Mixture({0: weights}).at(np.arange(n))
    whole = whole_weights(weights)
    counts, total = [0] * len(weights), sum(whole)
    for k in range(n):
        assert position[k] == counts[source[k]]  # no sequence of a source is left out or repeated
        counts[source[k]] += 1
        for count, weight in zip(counts, whole, strict=True):
            assert abs(count * total - weight * (k + 1)) < (
                total if total <= LONGEST else 1.7 * total
            )


@given(WEIGHTS)
def test_weights_are_exact_where_a_short_pattern_can_be(weights):
    whole = whole_weights(weights)
    exact = [Fraction(str(w)) / sum(Fraction(str(w)) for w in weights) for w in weights]
    shares = [Fraction(w, sum(whole)) for w in whole]
    if sum(whole) < FINEST:
        assert shares == exact
    assert all(
        abs(a - b) <= Fraction(len(whole), FINEST) for a, b in zip(shares, exact, strict=True)
    )
    assert min(whole) > 0


SIZES = st.lists(
    st.one_of(st.integers(1, 30), st.integers(10_000, 100_000), st.integers(1, 10**6)),
    min_size=2,
    max_size=8,
)


@given(SIZES, st.integers(1, 500), st.integers(0, 10**7))
def test_sources_without_weights_have_the_share_of_their_size(sizes, n, first):
    """Any prefix to within two sequences, and one epoch of the corpus is one of each source."""
    mixture = Mixture({0: [float(size) for size in sizes]})
    counts = mixture.counts(first).tolist()
    k = np.arange(first, first + n)
    source, position = mixture.at(k)
    total = sum(sizes)
    for i in range(n):
        assert position[i] == counts[source[i]]
        counts[source[i]] += 1
        for count, size in zip(counts, sizes, strict=True):
            assert abs(count * total - size * (first + i + 1)) < 1.7 * total
    assert counts == mixture.counts(first + n).tolist()
    for epochs in (1, 3):
        assert mixture.counts(epochs * total).tolist() == [epochs * size for size in sizes]


def test_a_tiny_source_beside_a_large_one_is_walked_once():
    mixed = Mixed(
        {"web": 4 * 300_000 + 1, "notes": 4 * 7 + 1}, {0: {"web": 3e5, "notes": 7.0}}, 1.0
    )
    assert mixed.shares(300_007, 4) == {"web": (300_000, 1.0), "notes": (7, 1.0)}
    starts = mixed.starts(np.arange(300_007), 0, True, 4)
    assert len(np.unique(starts)) == 300_007


@given(
    st.lists(st.tuples(st.integers(1, 400), WEIGHTS), min_size=1, max_size=4),
    st.integers(1, 2000),
)
def test_stages_go_on_where_the_one_before_ended(stages, n):
    size = min(len(weights) for _, weights in stages)
    starts = np.cumsum([0, *(length for length, _ in stages[1:])]).tolist()
    given_weights = {s: w[:size] for s, (_, w) in zip(starts, stages, strict=True)}
    mixture = Mixture(given_weights)
    source, position = mixture.at(np.arange(n))
    for i in range(size):
        assert position[source == i].tolist() == list(range(int((source == i).sum())))
    for start, end in zip(starts, [*starts[1:], n], strict=True):
        if start < n:
            alone = Mixture({0: given_weights[start]}).at(np.arange(min(end, n) - start))[0]
            assert (source[start : min(end, n)] == alone).all()
    assert mixture.counts(n).tolist() == np.bincount(source, minlength=size).tolist()


@given(st.integers(0, 2**40), st.booleans(), st.lists(st.integers(9, 90), min_size=1, max_size=4))
def test_each_source_is_walked_whole_in_an_order_of_its_own(seed, shuffle, tokens):
    names = [f"s{i}" for i in range(len(tokens))]
    mixed = Mixed(dict(zip(names, tokens, strict=True)), {0: dict.fromkeys(names, 1.0)})
    starts = mixed.starts(np.arange(200), seed, shuffle, 4)
    first = 0
    for name, size in zip(names, tokens, strict=True):
        mine = starts[(starts >= first) & (starts < first + size)] - first
        n = (size - 1) // 4
        for epoch in range(len(mine) // n):
            walked = mine[epoch * n : (epoch + 1) * n]
            assert sorted(walked.tolist()) == [4 * i for i in range(n)]
        other = Mixed({name: size}, {0: {name: 3.0}})  # alone, and with another weight
        alone = other.starts(np.arange(len(mine)), seed, shuffle, 4)
        assert mine.tolist() == alone.tolist()
        first += size


def test_a_place_is_found_without_the_places_before_it():
    mixture = Mixture({0: [0.5, 0.3, 0.2], 10**9: [1, 0, 0]})
    far = np.array([10**9 - 1, 10**9, 10**12])
    source, position = mixture.at(far)
    assert source[1:].tolist() == [0, 0]
    assert position[1:].tolist() == [5 * 10**8, 5 * 10**8 + 10**12 - 10**9]
    assert mixture.counts(10**9).tolist() == [5 * 10**8, 3 * 10**8, 2 * 10**8]


@pytest.mark.parametrize("weights", [[1e-9, 2.0], [1 / 3, 2 / 3, 1e-5]])
def test_long_patterns_are_rounded_to_a_known_length(weights):
    whole = whole_weights(weights)
    assert sum(whole) == FINEST
    assert min(whole) >= 1
