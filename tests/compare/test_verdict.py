"""The picture of the verdict, and the table of looks, on the page of a decided sweep."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from llmexp.cli.compare import Answer
from llmexp.compare.comparing import findings, with_words
from llmexp.compare.page import page
from llmexp.folders.ledger import Look
from tests.compare.made import trained
from tests.compare.pages import Outline
from tests.compare.synthetic import told

# The first one is clearly worse, the second is not told apart from the third.
LOSSES = np.array([[2.50, 2.52], [2.11, 2.12], [2.10, 2.13]])
LOOKS = [
    Look(["1", "2"], 0.03, 3, ["lr=2.0", "lr=3.0"], ["lr=1.0"], "2 get 3 seeds"),
    Look(["1", "2", "3"], 0.02, 3, ["lr=2.0", "lr=3.0"], [], "all 3 seeds are trained"),
]


def decided(**last: Any) -> Answer:
    """The answer of a sweep that decided by itself; `last` is changed of its last run."""
    found = [trained(i, j + 1, float(x), LOOKS) for (i, j), x in np.ndenumerate(LOSSES)]
    found += [trained(1, 3, 2.125, LOOKS), replace(trained(2, 3, 2.115, LOOKS), **last)]
    return Answer(with_words(findings(found)))


def test_the_picture_has_each_setting_its_seeds_and_its_interval():
    answer = decided()
    figure = answer.figures["verdict"]
    seeds, settings = figure.data
    best, undecided, worse = answer.comparison.settings
    assert [e.mark for e in (best, undecided, worse)] == ["lowest", "undecided", "worse"]
    places = list(zip(seeds.x, seeds.y, strict=True))
    by_row = {name: [x for x, y in places if y == name] for name in seeds.y}
    assert {name: len(x) for name, x in by_row.items()} == {"lr=2.0": 3, "lr=3.0": 3, "lr=1.0": 2}
    # A seed stands beside the same seed of the leading setting.
    ours = {r.seed: r.figures["val/loss"] for r in best.runs}
    for e in (undecided, worse):
        apart = [r.figures["val/loss"] - ours[r.seed] for r in e.runs]
        assert sorted(by_row[e.label]) == pytest.approx(sorted(apart))
        at = settings.y.index(e.label)
        assert settings.x[at] == pytest.approx(e.size)
        assert settings.error_x.array[at] == pytest.approx(e.half)
    assert settings.marker.color[1] == "#8a93a38c"  # the undecided one is pale, also in grey
    assert len(set(settings.marker.symbol)) == 3
    assert list(figure.layout.yaxis.categoryarray) == ["lr=1.0", "lr=2.0", "lr=3.0"]


def test_long_names_that_differ_in_their_middle_have_a_row_each():
    answer = decided()
    for e in answer.comparison.settings:
        e.label = f"optimizer=adamw {e.label} wd=0.1 clip=0.5"
    rows = answer.figures["verdict"].layout.yaxis.categoryarray
    assert list(rows)[::-1] == [e.label for e in answer.comparison.settings]


def test_the_answer_and_the_page_say_what_was_spent_and_where_seeds_went(words, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    words("compare/decided", told(decided()), "answer")
    broken = {"state": "failed", "columns": {"step": np.zeros(0)}, "steps": {}, "status": {}}
    words("compare/decided", told(decided(**broken)), "answer, one run failed")
    text = Outline(page(decided().comparison)).text()
    words("compare/decided", text.partition("Where seeds went")[2].partition("Losses")[0], "looks")
    single = Answer(with_words(findings([trained(i, 1, 2.0 + i, []) for i in range(3)])))
    assert "verdict" not in single.figures
    assert "Where seeds went" not in page(single.comparison)
