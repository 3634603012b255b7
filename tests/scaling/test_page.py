"""The page of laws: its figures are those of the answer, and it fits a desk and a phone."""

import math

import numpy as np
import pytest

from llmexp.__main__ import run as command
from llmexp.scaling.answer import Fits
from llmexp.scaling.gain import Gain, Need, gain
from llmexp.scaling.law import Estimate, Power, Surface
from llmexp.scaling.page import page
from llmexp.scaling.words import data
from tests.compare.pages import EVIL, Outline, array, browser, figures, fits, show
from tests.scaling.planted import LAWS, csv_of, ladder

__all__ = ["browser", "show"]  # fixtures
pytestmark = pytest.mark.usefixtures("few_draws")

H = LAWS["hoffmann"]


def made(*names: str, off: float = 1.0) -> Fits:
    laws = [
        Surface(ladder(H, 4, 6, 0.003, i, name=name, off=off), "given", 1e21)
        for i, name in enumerate(names)
    ]
    gains = [gain(laws[0], s) for s in laws[1:]] if off == 1.0 else []
    return Fits("surface", "given", laws, gains=gains)


def test_the_figures_are_those_of_the_answer():
    answer = made("adamw", "muon")
    drawn = figures(page(answer))
    assert set(drawn) == {"gain", "law-FLOPs", *(f"{kind}-{name}" for name in ("adamw", "muon")
                          for kind in ("isoflop", "contours", "residuals"))}  # fmt: skip
    s = answer.surfaces[0]
    traces = drawn["isoflop-adamw"]["data"]
    stars = [t for t in traces if t.get("marker", {}).get("symbol") == "star"]
    assert [t["x"][0] for t in stars] == [o.parameters.value for o in s.places]
    assert [t["y"][0] for t in stars] == [o.loss.value for o in s.places]
    # A curve of the law is that of its losses at the budget, to the float32 of a page.
    curve = next(t for t in traces if t["mode"] == "lines")
    n, loss = array(curve["x"]), array(curve["y"])
    c = math.exp(s.rungs[0].compute)
    expected = type(H)(*(e.value for e in s.numbers.values())).loss(n, c / 6 / n)
    assert np.abs(loss / expected - 1).max() < 1e-6
    line = array(drawn["gain"]["data"][1]["y"])
    assert line.tolist() == [need.ratio.value for need in answer.gains[0].curve]


def test_an_edge_has_no_stars_and_a_power_law_has_a_curve():
    traces = [t for f in figures(page(made("edge", off=8.0))).values() for t in f["data"]]
    assert not any(t.get("marker", {}).get("symbol") == "star" for t in traces)
    law = Power(ladder(H, 6, 5, 0.002, 0), "given", "flops", 1e21)
    drawn = figures(page(Fits("power", "given", [law])))
    assert set(drawn) == {"law-flops", "residuals-planted"}


def test_what_has_no_end_is_null_in_json_and_any_in_words():
    answer = made("a")
    need = Need(1e20, Estimate(1.5, 0.5, math.inf), np.bool_(False))
    answer.gains = [Gain("m", "a", need, None, None, [need, need])]
    found = data(answer)
    ratio = {"value": 1.5, "low": 0.5, "high": None}
    assert found["gains"][0]["common"] == {"flops": 1e20, "ratio": ratio, "shown": False}
    assert found["headline"].startswith("m needs 1.5x [0.5, any] of the compute of a (no diff")
    page(answer)


def test_what_comes_from_names_is_text():
    outline = Outline(page(made(EVIL, "b")))
    assert not any(tag == "img" for tag, _ in outline.tags)
    assert EVIL in outline.text()


@pytest.mark.parametrize("scheme", ["dark", pytest.param("light", marks=pytest.mark.slow)])
def test_the_page_fits_a_desk_and_a_phone(show, tmp_path, scheme):
    paths = [csv_of(tmp_path / f"{name}.csv", ladder(H, 4, 6, 0.003, seed).points)
             for seed, name in enumerate(("adamw", "muon"), 1)]  # fmt: skip
    where = tmp_path / "laws.html"
    given = [*map(str, paths), "--predict", "1e22", "--out", str(where)]
    assert command(["fit", *given]) == 0
    tab = show(where, 1400, scheme)
    fits(tab, cut=True)  # texts of contours may be
    assert tab.evaluate("document.querySelectorAll('.plot .main-svg').length") >= 8
