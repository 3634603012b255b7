"""The order of several sources: a brute-force walk, the shares of any prefix, ranks and stages."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmexp.data.mixture import WHOLE, Mixture

ANY_SIZE = st.integers(1, 30) | st.integers(10_000, 100_000) | st.integers(1, 10**6)
SIZES = st.lists(ANY_SIZE, min_size=2, max_size=8)
ANY_WEIGHT = st.integers(1, 40) | st.sampled_from([0.1, 0.25, 0.3, 0.7, 1e-3, 12.5])
WEIGHTS = st.lists(ANY_WEIGHT, min_size=1, max_size=8)


def mixture(weights, *stages) -> Mixture:
    """Return the mixture of sources that are large enough, in stages of (start, weights)."""
    names = [f"s{i}" for i in range(len(weights))]
    given = {start: dict(zip(names, some, strict=True)) for start, some in ((0, weights), *stages)}
    return Mixture(dict.fromkeys(names, 10**9), given)


@given(st.one_of(WEIGHTS, SIZES), st.integers(1, 2000), st.integers(0, 10**7))
def test_any_prefix_is_near_its_weights(weights, n, first):
    """No sequence of a source is left out or repeated, and each source has its share."""
    mixed, k = mixture(weights), np.arange(first, first + n)
    source, position = mixed.at(k)
    is_mine = source[:, None] == np.arange(len(weights))
    after = mixed.counts(first) + np.cumsum(is_mine, axis=0)
    assert (position == (after - is_mine)[np.arange(n), source]).all()
    wanted = (k[:, None] + 1) * np.array(weights) / sum(weights)
    assert np.abs(after - wanted).max() < 0.5 + (1 + math.log(len(weights))) / 2
    assert after[-1].tolist() == mixed.counts(first + n).tolist()


@given(SIZES)
def test_an_epoch_is_one_of_each_source(sizes):
    mixed, total = mixture([float(size) for size in sizes]), sum(sizes)
    for epochs in (1, 3):
        assert mixed.counts(epochs * total).tolist() == [epochs * size for size in sizes]


def test_a_tiny_source_beside_a_large_one_is_walked_once():
    sizes = {"web": 4 * 300_000 + 1, "notes": 4 * 7 + 1}
    mixed = Mixture(sizes, {0: {"web": 3e5, "notes": 7.0}}, 1.0)
    assert mixed.shares(300_007, 4) == {"web": (300_000, 1.0), "notes": (7, 1.0)}
    starts = mixed.starts(np.arange(300_007), 0, True, 4)
    assert len(np.unique(starts)) == 300_007


STAGES = st.lists(st.tuples(st.integers(1, 400), WEIGHTS), min_size=1, max_size=4)


@given(STAGES, st.integers(1, 2000))
def test_stages_go_on_where_the_one_before_ended(stages, n):
    size = min(len(weights) for _, weights in stages)
    starts = np.cumsum([0, *(length for length, _ in stages[1:])]).tolist()
    given_weights = {s: w[:size] for s, (_, w) in zip(starts, stages, strict=True)}
    all_weights = dict(given_weights)
    mixed = mixture(given_weights.pop(0), *given_weights.items())
    source, position = mixed.at(np.arange(n))
    for i in range(size):
        assert position[source == i].tolist() == list(range(int((source == i).sum())))
    for start, end in zip(starts, [*starts[1:], n], strict=True):
        if start < n:
            alone = mixture(all_weights[start]).at(np.arange(min(end, n) - start))[0]
            assert (source[start : min(end, n)] == alone).all()
    assert mixed.counts(n).tolist() == np.bincount(source, minlength=size).tolist()


@given(st.integers(0, 2**40), st.booleans(), st.lists(st.integers(9, 90), min_size=1, max_size=4))
def test_each_source_is_walked_whole_in_an_order_of_its_own(seed, shuffle, tokens):
    names = [f"s{i}" for i in range(len(tokens))]
    mixed = Mixture(dict(zip(names, tokens, strict=True)), {0: dict.fromkeys(names, 1.0)})
    starts = mixed.starts(np.arange(200), seed, shuffle, 4)
    first = 0
    for name, size in zip(names, tokens, strict=True):
        mine = starts[(starts >= first) & (starts < first + size)] - first
        n = (size - 1) // 4
        for epoch in range(len(mine) // n):
            walked = mine[epoch * n : (epoch + 1) * n]
            assert sorted(walked.tolist()) == [4 * i for i in range(n)]
        other = Mixture({name: size}, {0: {name: 3.0}})  # alone, and with another weight
        alone = other.starts(np.arange(len(mine)), seed, shuffle, 4)
        assert mine.tolist() == alone.tolist()
        first += size


def test_a_place_is_found_without_the_places_before_it():
    mixed = mixture([0.5, 0.3, 0.2], (10**9, [1, 0, 0]))
    far = np.array([10**9 - 1, 10**9, 10**12])
    source, position = mixed.at(far)
    assert source[1:].tolist() == [0, 0]
    assert position[1:].tolist() == [5 * 10**8, 5 * 10**8 + 10**12 - 10**9]
    assert mixed.counts(10**9).tolist() == [5 * 10**8, 3 * 10**8, 2 * 10**8]


@pytest.mark.parametrize("weights", [[1e-12, 2.0], [1 / 3, 2 / 3, 1e-5], [10**18, 1]])
def test_a_weight_above_zero_is_never_left_out(weights):
    mixed = mixture(weights)
    assert min(mixed.counts(2 * WHOLE)) >= 1
