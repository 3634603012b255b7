"""The picture of a run: whole for whatever rows there are, and in the folder of a run that ends."""

import math
import struct
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmexp.metrics.plot import _columns, _validation, plot_losses, running_mean
from tests.train.test_train import SYNTHETIC


def test_a_run_that_ends_draws_its_curves(runs):
    result = runs(*SYNTHETIC, "metrics.picture=true")
    assert png_size((result.folder / "loss.png").read_bytes())
    assert [line for line in result.out.splitlines() if line.startswith("picture ")]


def png_size(data: bytes) -> tuple[int, int]:
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert data[-8:-4] == b"IEND"  # whole
    return struct.unpack(">II", data[16:24])  # type: ignore[return-value]


def make_rows(count: int, **extra: Any) -> list[dict[str, Any]]:
    return [
        {"step": i, "tokens_seen": i * 1000, "train/loss": 9 / i + 3} | extra
        for i in range(1, count + 1)
    ]


DRAWN = {
    "few": (make_rows(3), 630),
    "all keys": (make_rows(200, lr=3e-4, grad_norm=1.5), 840),
    "zero norm": (make_rows(60, grad_norm=0.0), 840),
    "zero lr": (make_rows(2, lr=0.0), 840),
    "val only": ([{"step": 5, "tokens_seen": 5000, "val/loss": 3.0}], 630),
    "nan": ([*make_rows(4), {"tokens_seen": 9, "val/loss": None, "train/loss": math.nan}], 630),
    "one row": (make_rows(1), 630),
    "nothing finite": (make_rows(2, grad_norm=math.inf, lr=None), 630),
    "named sets": (make_rows(2, **{"val/loss": 3.0, "val/a/loss": 3.0, "val/b/loss": 4.0}), 630),
}


@pytest.mark.parametrize("name", DRAWN)
def test_a_whole_png_at_150_dpi(name: str) -> None:
    """8 inches wide, 4.2 high or 5.6 with the lower panel, at 150 dpi."""
    rows, height = DRAWN[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        png = plot_losses(rows, "a $title_with^odd signs\\frac · 实验 " + "x" * 200)
    assert png_size(png) == (1200, height)


def test_a_fork_shows_the_losses_of_its_parents() -> None:
    rows = make_rows(20)
    own, whole = plot_losses(rows[8:], "fork"), plot_losses(rows[8:], "fork", rows[:8])
    assert own == plot_losses(rows[8:], "fork")  # the same rows are the same picture
    assert whole != own
    assert png_size(whole) == png_size(own)
    nothing = [], [{"step": 1}], [{"tokens_seen": 1, "train/loss": math.nan, "lr": 1.0}]
    assert [plot_losses(rows, "none") for rows in nothing] == [b""] * 3


def test_rows_are_drawn_in_the_order_of_tokens_and_what_is_not_finite_is_left_out() -> None:
    rows = make_rows(20, lr=1.5, grad_norm=2.0)
    bad = [{"tokens_seen": 5000, "lr": None, "grad_norm": math.inf}, {"lr": 7.0}, {"step": 9}]
    assert plot_losses([*bad, *rows[1::2], *rows[::2]], "x") == plot_losses(rows, "x")


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=60), st.sampled_from([1, 3, 5, 15]))
def test_the_running_mean_is_of_a_symmetric_window(values: list[float], window: int) -> None:
    smooth = running_mean(np.array(values), window // 2)
    for i, got in enumerate(smooth):
        reach = min(i, len(values) - 1 - i, window // 2)
        expected = math.fsum(values[i - reach : i + reach + 1]) / (2 * reach + 1)
        # 60 values up to 100: partial sums below 6000, each of at most 61 roundings off by 6000 *
        # 2^-53.
        assert abs(got - expected) <= 2 * 61 * 6000 * 2.0**-53


def test_named_sets_have_curves_of_their_own() -> None:
    rows = make_rows(3, **{"val/loss": 3.0, "val/a/loss": 3.0, "val/a/bits_per_byte": 1.0})
    assert list(_validation(_columns(rows))) == ["validation"]
    with_average = [row | {"val/ema/loss": 2.0} for row in rows]
    assert list(_validation(_columns(with_average))) == ["validation", "val ema loss"]
    rows[2] |= {"val/b/loss": 4.0}
    found = {name: y.tolist() for name, (_, y) in _validation(_columns(rows)).items()}
    assert found == {"val a loss": [3.0, 3.0, 3.0], "val b loss": [4.0]}
