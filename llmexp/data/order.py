"""Give the order of sequences as a pure function of (seed, position), in O(1) memory.

It is a keyed permutation of [0, n): an unbalanced Feistel network on the smallest power of two that
holds n, and cycle walking (Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains") for the
values that fall outside [0, n).
"""

from __future__ import annotations

import numpy as np

# (up to so many bits, half-rounds). 8 do on large domains (Luby and Rackoff 1988), we take 12;
# up to 10 bits, where a half has few, orders become equally likely only after some 30 (measured).
ROUNDS = ((10, 32), (64, 12))
_MASK = (1 << 64) - 1
_POWERS = 1 << np.arange(63)


def _mix(x: np.ndarray) -> np.ndarray:
    """Return a bijection of uint64 that spreads every bit.

    It is splitmix64's finaliser (Steele, Lea and Flood 2014).
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _feistel(x: np.ndarray, key: np.ndarray, bits: np.ndarray, rounds: int) -> np.ndarray:
    """Return a bijection of [0, 2**bits) per key, elementwise; all are uint64 [m]."""
    one = np.uint64(1)
    high_bits = bits >> one
    low_bits = bits - high_bits
    low_mask, high_mask = (one << low_bits) - one, (one << high_bits) - one
    high, low = x >> low_bits, x & low_mask
    for i in range(rounds):
        round_key = key + np.uint64(((i + 1) * 0x9E3779B97F4A7C15) & _MASK)
        if i % 2 == 0:
            low = low ^ (_mix(_mix(high + round_key) ^ key) & low_mask)
        else:
            high = high ^ (_mix(_mix(low + round_key) ^ key) & high_mask)
    return (high << low_bits) | low


def sequence_index(
    seed: int | np.ndarray, k: np.ndarray, n: int | np.ndarray, shuffle: bool
) -> np.ndarray:
    """Return which of the n sequences comes at positions `k` of the endless stream of sequences.

    `k`: int64 [m], >= 0. Each position may have a stream of its own (seed uint64 [m], n int64 [m]).
    Every epoch e = k // n visits each sequence once; with `shuffle` in an order of its own, else in
    file order. Returns int64 [m]. The result may never change between versions: runs are resumed by
    it.
    """
    if np.min(n, initial=1) < 1:
        raise ValueError(f"a stream of {n} sequences has no order; at least one sequence is needed")
    k = np.asarray(k, dtype=np.int64)
    epoch, position = np.divmod(k, n)
    if not shuffle:
        return position
    start = seed if isinstance(seed, np.ndarray) else np.array([int(seed) & _MASK], np.uint64)
    key = _mix(_mix(start + np.uint64(0x9E3779B97F4A7C15)) + epoch.astype(np.uint64))
    bits = np.maximum(1, np.searchsorted(_POWERS, n)).astype(np.uint64)
    sizes, bits, _ = np.broadcast_arrays(n, bits, k)
    x, fewest = position.astype(np.uint64), 0
    for most, rounds in ROUNDS:
        walking = np.flatnonzero((fewest < bits) & (bits <= most))
        while walking.size:  # ends: the walk stays on a cycle that holds its start, which is inside
            x[walking] = _feistel(x[walking], key[walking], bits[walking], rounds)
            walking = walking[x[walking] >= sizes[walking]]
        fewest = most
    return x.astype(np.int64)
