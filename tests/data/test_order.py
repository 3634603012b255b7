"""The order of sequences is a permutation per (seed, epoch), a pure function, mixes well, and never
changes."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmexp.data.order import sequence_index

seeds = st.integers(0, 2**64)


@settings(max_examples=60)
@given(
    seed=seeds, n=st.one_of(st.integers(1, 40), st.integers(1, 5000)), epoch=st.integers(0, 10**9)
)
def test_each_epoch_visits_each_sequence_once(seed, n, epoch):
    order = sequence_index(seed, epoch * n + np.arange(n), n, True)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(n))


@pytest.mark.parametrize("n", [2**20, 2**20 + 1, 10**12 + 39, 2**62])
def test_huge_corpora_stay_injective(n: int) -> None:
    order = sequence_index(7, np.arange(n - 20_000, n), n, True)
    assert 0 <= order.min() <= order.max() < n
    assert len(np.unique(order)) == 20_000


@given(
    streams=st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(1, 5000)), min_size=1),
    k=st.integers(0, 2**40),
    shuffle=st.booleans(),
)
def test_streams_may_differ_by_position(streams, k, shuffle):
    seed = np.array([seed for seed, _ in streams], np.uint64)
    n = np.array([size for _, size in streams], np.int64)
    positions = k + np.arange(len(streams))
    together = sequence_index(seed, positions, n, shuffle)
    alone = [
        int(sequence_index(s, positions[i : i + 1], size, shuffle)[0])
        for i, (s, size) in enumerate(streams)
    ]
    assert together.tolist() == alone


def test_unshuffled_is_file_order_again_and_again_and_an_empty_stream_has_none() -> None:
    assert sequence_index(3, np.arange(7), 3, False).tolist() == [0, 1, 2, 0, 1, 2, 0]
    with pytest.raises(ValueError, match="at least one"):
        sequence_index(0, np.arange(3), 0, True)


@pytest.mark.parametrize("n", [1009, 1024, 1025, 4099])
def test_seeds_and_epochs_differ_like_random_permutations(n: int) -> None:
    """Two random permutations agree in Poisson(1) places: more than 12 has a chance below 1e-10."""
    pairs = itertools.product(range(3), range(3))
    orders = [sequence_index(s, e * n + np.arange(n), n, True) for s, e in pairs]
    for one, other in itertools.combinations(orders, 2):
        assert np.sum(one == other) <= 12


@pytest.mark.parametrize("n", [1009, 1024, 4099])
def test_positions_and_neighbours_are_uncorrelated(n: int) -> None:
    """Under a random permutation the correlation of p[i] with p[i + lag] (lag 0: with i) has
    deviation 1/sqrt(n) and a mean of at most 1/n; over 40 epochs the mean of it is 1/sqrt(40 n),
    and 5 of those is a chance below 1e-6."""
    orders = sequence_index(11, np.arange(40 * n), n, True).reshape(40, n).astype(float)
    for lag in (0, 1, 2, 8, 64):
        others = [np.roll(p, lag) if lag else np.arange(n) for p in orders]
        found = [np.corrcoef(p, q)[0, 1] for p, q in zip(orders, others, strict=True)]
        assert abs(np.mean(found)) < 5 / np.sqrt(40 * n) + 1 / n, lag


@pytest.mark.parametrize(("n", "permutations"), [(2, 2), (3, 6), (4, 24), (5, 120), (6, 720)])
def test_tiny_corpora_see_every_order_equally_often(n: int, permutations: int) -> None:
    """Pearson's chi-square over all permutations; mean df, deviation sqrt(2 df): 6 of those is a
    chance below 1e-4 for df = 1 and far less for more."""
    epochs = 200 * permutations
    orders = sequence_index(5, np.arange(epochs * n), n, True).reshape(epochs, n)
    _, counts = np.unique(orders, axis=0, return_counts=True)
    assert len(counts) == permutations
    df = permutations - 1
    assert np.sum((counts - 200) ** 2 / 200) < df + 6 * np.sqrt(2 * df)


def test_the_order_never_changes() -> None:
    """Runs are resumed by it: if this fails, the function was changed and must be changed back."""
    small = sequence_index(0, np.arange(10), 10, True).tolist()
    assert small == [1, 0, 6, 8, 5, 7, 9, 4, 2, 3]
    large = sequence_index(1234, np.arange(5) + 3 * 10**9, 123_456_789, True).tolist()
    assert large == [41379646, 70591410, 62696579, 16200328, 54701457]


def test_matches_plain_python_integers() -> None:
    """The same network in unbounded integers: no overflow, sign or promotion of numpy's decides the
    order."""
    seed = 2**63 + 5
    for n in (1, 5, 1000, 1025, 10**11):
        found = sequence_index(seed, np.arange(300) * 997, n, True).tolist()
        assert found == [_reference(seed, k * 997, n) for k in range(300)]


def _mix(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def _reference(seed: int, k: int, n: int) -> int:
    golden = 0x9E3779B97F4A7C15
    key = _mix((_mix((seed + golden) % 2**64) + k // n) % 2**64)
    bits = max(1, (n - 1).bit_length())
    high_size, low_size = 2 ** (bits // 2), 2 ** (bits - bits // 2)
    x = k % n
    while True:
        high, low = divmod(x, low_size)
        for i in range(32 if bits <= 10 else 12):
            round_key = (key + (i + 1) * golden) % 2**64
            if i % 2:
                high ^= (_mix(_mix((low + round_key) % 2**64) ^ key)) % high_size
            else:
                low ^= (_mix(_mix((high + round_key) % 2**64) ^ key)) % low_size
        x = high * low_size + low
        if x < n:
            return x
