"""How often intervals hold the truth, and equal ladders are called unequal: `pytest -s -m slow`
prints what docs/laws.md shows."""

from __future__ import annotations

import pytest

from llmexp.laws import law as law_room
from llmexp.laws.fitting import Surface
from llmexp.laws.gain import gain
from tests.laws.planted import LAST, LAWS, coverage, ladder

DRAWS = 500
# Three standard errors of 500 draws at 95 % are 0.029. Small grids are known to be wider.
LEAST, MOST = 0.92, 0.985
CELLS = [
    ("hoffmann", (4, 5), 0.01), ("besiroglu", (4, 5), 0.005), ("muennighoff", (4, 5), 0.005),
    ("hoffmann", (3, 4), 0.002), ("hoffmann", (6, 8), 0.005), ("besiroglu", (3, 4), 0.005),
    ("muennighoff", (6, 8), 0.002), ("hoffmann", (8, 16), 0.01), ("besiroglu", (8, 16), 0.002),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("law", "shape", "noise"), CELLS)
def test_intervals_hold_the_truth_in_95_of_100(law, shape, noise):
    held, bias = coverage(LAWS[law], *shape, noise, DRAWS)
    figures = " ".join(f"{k} {100 * v:.1f}" for k, v in held.items())
    print(f"\n{law} {shape[0]}x{shape[1]} noise {noise:.1%}: {figures}", end="")
    print(f"; bias {' '.join(f'{k} {v:+.2f}' for k, v in bias.items())}")
    assert min(held.values()) >= LEAST, held
    assert max(held.values()) <= (MOST if shape != (3, 4) else 1.0), held
    assert max(map(abs, bias.values())) < 0.35, bias  # of a standard error


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "noise"), [((3, 4), 0.005), ((4, 5), 0.005), ((6, 8), 0.01)])
def test_equal_ladders_are_called_unequal_in_5_of_100(shape, noise, monkeypatch):
    """With 400 draws, not 1,000, whose outermost fortieths are rougher: by 0.3 points of 5."""
    monkeypatch.setattr(law_room, "DRAWS", 400)
    called = further = moved = 0
    for seed in range(DRAWS):
        pair = [
            Surface(ladder(LAWS["hoffmann"], *shape, noise, 2 * seed + i), "given", 10 * LAST, i)
            for i in (0, 1)
        ]
        found = gain(*pair, points=1)
        assert found.further is not None
        called, further = called + found.common.shown, further + found.further.shown
        moved += bool(found.trend)
    shares = " ".join(f"{100 * n / DRAWS:.1f}" for n in (called, further, moved))
    print(
        f"\n{shape[0]}x{shape[1]} noise {noise:.1%}: unequal, a decade beyond, changing: {shares}"
    )
    assert max(called, further, moved) <= 0.08 * DRAWS  # 5 % and three standard errors
