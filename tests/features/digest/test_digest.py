from collections.abc import Iterator
from typing import Any

from llmexp.data.window import Window
from llmexp.features.digest.train import Digest
from tests.data.test_sampler import _real_rows, _windows

NO_MESH: Any = None


def windows(*cut: int, **changed: Any) -> Iterator[Window]:
    return _windows(*cut, **({"mark": Digest(NO_MESH).mark} | changed))


def test_a_digest_sees_tokens_and_places() -> None:
    a = next(windows(shuffle=False)).mark
    assert a != next(windows(seed=4)).mark
    assert a != next(windows(shuffle=False, start_step=1)).mark
    assert next(windows(mark=None)).mark == 0
    # The same two rows in the other order: 2 sequences, windows 0 of an even and an odd
    # permutation.
    seeds = {}
    for seed in range(20):
        window = next(windows(2, 2, 1, seed=seed, max_steps=1))
        seeds[str(_real_rows(window))] = window.mark
    assert len(seeds) == len(set(seeds.values())) == 2
