"""The picture of the verdict, and the table of looks, on the page of a decided sweep."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from llmexp.compare.comparing import findings, with_words
from llmexp.compare.page import look_rows, page
from llmexp.compare.plot_verdict import verdict_plot
from llmexp.compare.records import Result
from llmexp.runs.ledger import Look
from tests.compare.made import trained

# The first one is clearly worse, the second is not told apart from the third.
LOSSES = np.array([[2.50, 2.52], [2.11, 2.12], [2.10, 2.13]])
MORE = np.array([[2.125], [2.115]])


def decided() -> Result:
    looks = [
        Look(["1", "2"], 0.03, 3, ["lr=2.0", "lr=3.0"], ["lr=1.0"], "2 get 3 seeds"),
        Look(["1", "2", "3"], 0.02, 3, ["lr=2.0", "lr=3.0"], [], "all 3 seeds are trained"),
    ]
    found = [trained(i, j + 1, float(x), looks) for (i, j), x in np.ndenumerate(LOSSES)]
    found += [trained(i + 1, 3, float(x), looks) for (i, _), x in np.ndenumerate(MORE)]
    return with_words(findings(found))


def test_the_picture_has_each_setting_its_seeds_and_its_interval():
    c = decided()
    assert [e.mark for e in c.settings] == ["lowest", "undecided", "worse"]
    plot = verdict_plot(c)
    assert plot is not None
    seeds, *marks = plot.figure.data
    best, undecided, worse = c.settings
    by_row = {
        name: [x for x, y in zip(seeds.x, seeds.y, strict=True) if y == name] for name in seeds.y
    }
    assert {name: len(x) for name, x in by_row.items()} == {"lr=2.0": 3, "lr=3.0": 3, "lr=1.0": 2}
    # A seed stands beside the same seed of the leading setting.
    ours = {r.seed: r.figures[c.metric.key] for r in best.runs}
    for e in (undecided, worse):
        apart = [r.figures[c.metric.key] - ours[r.seed] for r in e.runs]
        assert sorted(by_row[e.label]) == pytest.approx(sorted(apart))
    drawn = {trace.name: trace for trace in marks}
    assert set(drawn) == {"lowest", "undecided", "worse"}
    for e in (undecided, worse):
        trace = drawn[e.mark]
        assert list(trace.x) == pytest.approx([e.size])
        assert list(trace.error_x.array) == pytest.approx([e.half])
    assert drawn["undecided"].opacity < drawn["worse"].opacity  # pale, also in grey
    assert len({trace.marker.symbol for trace in marks}) == 3
    assert list(plot.figure.layout.yaxis.categoryarray) == [e.label for e in reversed(c.settings)]


def test_one_seed_each_has_no_verdict_to_draw():
    single = with_words(findings([trained(i, 1, 2.0 + i, []) for i in range(3)]))
    assert verdict_plot(single) is None
    assert look_rows(single) == []


def test_the_table_of_looks_shows_where_seeds_went():
    rows = [[cell.text for cell in row.cells] for row in look_rows(decided())]
    assert rows == [
        ["2", "6", "3.00%", "lr=1.0", "lr=2.0, lr=3.0", "2 get 3 seeds"],
        ["3", "8", "2.00%", "", "lr=2.0, lr=3.0", "all 3 seeds are trained"],
    ]
    whole = page(decided())
    assert re.search(r'<section id="looks">.*Where seeds went.*lr=2.0, lr=3.0', whole, re.DOTALL)
    assert '<section id="verdict">' in whole


def test_the_answer_says_what_was_spent_and_what_all_seeds_would_cost():
    c = decided()
    broken = replace(c.runs[-1], state="failed", columns={"step": np.zeros(0)}, steps={}, status={})
    less = with_words(findings([*c.runs[:-1], broken]))
    (spent,) = [note for note in less.notes if note.startswith("2 looks")]
    assert "8 runs, 448 tokens, 7m 00s; 3 seeds of all 3 settings are 9 runs, 576 tokens" in spent
    (spent,) = [note for note in c.notes if note.startswith("2 looks")]
    assert "8 runs, 512 tokens, 8m 00s; 3 seeds of all 3 settings are 9 runs, 576 tokens" in spent
    assert "(3 seeds); all 3 seeds are trained; " in c.headline
    assert c.headline.endswith(" more seeds each would tell. 1 of the 2 others is worse.")


def test_long_names_that_differ_in_their_middle_have_a_row_each():
    c = decided()
    for e in c.settings:
        e.label = f"optimizer=adamw {e.label} wd=0.1 clip=0.5"
    plot = verdict_plot(c)
    assert plot is not None
    assert list(plot.figure.layout.yaxis.categoryarray)[::-1] == [e.label for e in c.settings]
