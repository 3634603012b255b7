"""The page of laws: its figures are those of the answer, and it fits a desk and a phone."""

from __future__ import annotations

import base64
import json
import math

import numpy as np
import pytest

from llmexp.__main__ import run as command
from llmexp.laws.answer import Answer
from llmexp.laws.fitting import Surface
from llmexp.laws.gain import Gain, Need, gain
from llmexp.laws.law import Estimate
from llmexp.laws.page import page
from llmexp.laws.power import Power
from llmexp.laws.table import to_json
from tests.compare.test_page import (  # noqa: F401
    BROKEN,
    EVIL,
    SLOW_MS,
    Outline,
    array,
    browser,
    figures,
)
from tests.laws.planted import LAWS, csv_of, ladder

pytestmark = pytest.mark.usefixtures("few_draws")

H = LAWS["hoffmann"]


def made(*names: str, off: float = 1.0) -> Answer:
    laws = [
        Surface(ladder(H, 4, 6, 0.003, i, name=name, off=off), "given", 1e21)
        for i, name in enumerate(names)
    ]
    gains = [gain(laws[0], s) for s in laws[1:]] if off == 1.0 else []
    return Answer("surface", "given", laws, gains=gains)


def test_the_figures_are_those_of_the_answer():
    answer = made("adamw", "muon")
    drawn = figures(page(answer))
    assert set(drawn) == {"gain", "frontier", *(f"{kind}-{name}" for name in ("adamw", "muon")
                          for kind in ("isoflop", "contours", "residuals"))}  # fmt: skip
    s = answer.surfaces[0]
    traces = drawn["isoflop-adamw"]["data"]
    stars = [t for t in traces if t.get("marker", {}).get("symbol") == "star"]
    assert [t["x"][0] for t in stars] == [o.parameters.value for o in s.optima]
    assert [t["y"][0] for t in stars] == [o.loss.value for o in s.optima]
    # A curve of the law is that of its losses at the budget, to the float32 of a page.
    curve = next(t for t in traces if t["mode"] == "lines")
    n, loss = array(curve["x"]), array(curve["y"])
    fitted = [e.value for e in s.numbers.values()]
    c = math.exp(s.rungs[0].compute)
    expected = type(H)(*fitted).loss(n, c / 6 / n)
    assert np.abs(loss / expected - 1).max() < 1e-6
    line = np.frombuffer(base64.b64decode(drawn["gain"]["data"][1]["y"]["bdata"]))
    assert line.tolist() == [need.ratio.value for need in answer.gains[0].curve]


def test_an_edge_has_no_stars_and_a_power_law_has_a_curve():
    drawn = figures(page(made("edge", off=8.0)))
    assert not any(t.get("marker", {}).get("symbol") == "star" for f in drawn.values()
                   for t in f["data"])  # fmt: skip
    law = Power(ladder(H, 6, 5, 0.002, 0), "given", "flops", 1e21)
    drawn = figures(page(Answer("power", "given", [law])))
    assert set(drawn) == {"power-planted", "residuals-planted"}


def test_what_has_no_end_is_null_in_json_and_any_in_words():
    answer = made("a")
    need = Need(1e20, Estimate(1.5, 0.5, math.inf), np.bool_(False))
    answer.gains = [Gain("m", "a", need, None, None, [need, need])]
    found = json.loads(to_json(answer))
    ratio = {"value": 1.5, "low": 0.5, "high": None}
    assert found["gains"][0]["common"] == {"flops": 1e20, "ratio": ratio, "shown": False}
    assert found["headline"].startswith("m needs 1.5x [0.5, any] of the compute of a (no diff")
    page(answer)


def test_what_comes_from_names_is_text():
    outline = Outline(page(made(EVIL, "b")))
    assert not any(tag == "img" for tag, _ in outline.tags)
    assert EVIL in outline.text()


@pytest.mark.parametrize("scheme", ["dark", pytest.param("light", marks=pytest.mark.slow)])
def test_the_page_fits_a_desk_and_a_phone(browser, tmp_path, capsys, scheme):  # noqa: F811
    for name, seed in (("adamw", 1), ("muon", 2)):
        csv_of(tmp_path / f"{name}.csv", ladder(H, 4, 6, 0.003, seed).points)
    where = tmp_path / "laws.html"
    paths = [str(tmp_path / f"{name}.csv") for name in ("adamw", "muon")]
    assert command(["fit", *paths, "--predict", "1e22", "--html", str(where)]) == 0
    wrong: list[str] = []
    context = browser.new_context(viewport={"width": 1400, "height": 844}, color_scheme=scheme)
    context.set_default_timeout(SLOW_MS)
    tab = context.new_page()
    tab.on("console", lambda message: wrong.append(f"{message.type}: {message.text}"))
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    tab.on(
        "request", lambda r: r.url.startswith(("file:", "data:", "blob:")) or wrong.append(r.url)
    )
    tab.goto(where.as_uri())
    tab.wait_for_selector("html[data-ready]")
    for width in (1400, 390):
        tab.set_viewport_size({"width": width, "height": 844})
        tab.wait_for_function(
            "w => document.querySelector('.plot svg').clientWidth <= w", arg=width
        )
        assert tab.evaluate("document.documentElement.scrollWidth") == width
        assert tab.evaluate(BROKEN) == []
        drawn = tab.evaluate("[...document.querySelectorAll('.plot .main-svg')].length")
        assert drawn >= 8
    context.close()
    assert wrong == []


def test_a_page_that_cannot_be_written_is_refused_first(tmp_path, capsys):
    (tmp_path / "p.csv").write_text("N,D,loss\n1,1,1\n")
    for name, said in (("page.txt", "must end in .html"), ("no/page.html", "there is no folder")):
        assert command(["fit", str(tmp_path / "p.csv"), "--html", str(tmp_path / name)]) == 2
        assert said in capsys.readouterr().err
