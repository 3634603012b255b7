"""A number that stands in several places is the same number in the same digits: headline, notes,
table, Markdown, page, JSON, CSV, tracker, Python."""

import csv
import io
import math
import re
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as sampled
from hypothesis import strategies as st

from llmexp.cli.compare import Answer
from llmexp.compare.comparing import findings, with_words
from llmexp.compare.page import mirrored, page, sections
from llmexp.compare.records import Result, difference
from llmexp.compare.table import data, lines, shown_columns, to_csv, to_markdown
from llmexp.system.text import amount
from tests.compare.made import trained

NUMBER = r"[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?(?:e[+-][0-9]+)?"


def made(losses: np.ndarray, sort: str | None = None) -> Result:
    """A comparison of settings over seeds, of runs of ten minutes each."""
    runs = [trained(i, j + 1, float(y)) for (i, j), y in np.ndenumerate(losses)]
    for r in runs:
        r.status["summary"]["peak_memory_gib"] = 2.0 + r.config["optimizer.lr"] / 4
    return with_words(findings(runs, sort=sort))


def cells(c: Result, key: str) -> dict[str, str]:
    return dict(zip([e.label for e in c.settings], shown_columns(c)[key].cells, strict=True))


@st.composite
def sweeps(draw):
    """Two to four settings with one to five seeds, of any size and spread; some are round."""
    count, seeds = draw(st.integers(2, 4)), draw(st.integers(1, 5))
    scale = 10.0 ** draw(st.integers(-3, 4))
    level = draw(st.sampled_from([0.0, 2.0, 2.5, 9.9996]))
    noise = 10.0 ** draw(st.integers(-6, 1)) if draw(st.booleans()) else 0.0
    step = draw(st.sampled_from([0.0, 0.5, 0.037, 123.456]))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    y = level + step * np.arange(count)[:, None] + noise * rng.normal(size=(count, seeds))
    return scale * np.abs(y)


@given(sweeps(), st.sampled_from([None, "peak_memory_gib"]))
@sampled(max_examples=30, deadline=None)
def test_every_number_that_stands_twice_is_the_same_in_the_same_digits(losses, sort):
    c = made(losses, sort)
    key, of_metric, apart = c.key, cells(c, c.key), cells(c, "difference")
    in_headline_and_notes(c, of_metric, apart)
    # no whole number stands beside others of the same figure that have decimals
    decimals = {"." in cell.partition(" ")[0] for cell in of_metric.values() if cell}
    large = any(abs(e.figures[key]) >= 1000 or e.intervals.get(key) for e in c.settings)
    assert len(decimals) == 1 or large, of_metric
    # Markdown and page have the cells of the table, the terminal some of them
    rows = [line.strip("| ").split(" | ") for line in to_markdown(c).splitlines()[4:]]
    for row, cell in zip(rows, of_metric.values(), strict=False):
        assert cell in row
    title = next(k.title for k in c.columns if k.key == key)
    body = next(part for part in sections(c) if part.id == "table")
    at = body.heads.index(title) - 1
    assert [row.cells[at].text for row in body.rows] == list(of_metric.values())
    assert any(of_metric[c.settings[0].label] in line for line in lines(c, 200))
    in_json_csv_and_tracker(c, of_metric, apart)


def in_headline_and_notes(c, of_metric, apart):
    """The leading figure as its cell has it, and each difference as its own."""
    known = {text.partition(" ± ")[0] for text in of_metric.values()}
    ends = {c.digits(y) for e in c.settings for y in e.seeds.values()}
    for found in re.findall(rf"{re.escape(c.metric.title)},? ({NUMBER})", c.headline):
        assert found in known | ends, (found, known, c.headline)
    text = "\n".join([c.headline, *c.notes])
    sizes = {cell.lstrip("+-") for cell in apart.values() if cell}
    for found in re.findall(rf"({NUMBER}(?: ± {NUMBER})?) (?:below|above) ", text):
        assert found in sizes, (found, sizes, text)


def in_json_csv_and_tracker(c, of_metric, apart):
    """They have the numbers themselves, which are those of the cells."""
    found = data(c)["runs"]
    table = list(csv.DictReader(io.StringIO(to_csv(c))))
    with mock.patch("llmexp.compare.page.page", return_value=""):  # which takes its time
        kept = mirrored(c).table
    for i, (e, row, line) in enumerate(zip(c.settings, found, table, strict=True)):
        for name in (c.key, "difference", "half", "mark", "basis"):
            assert row[name] == kept[name][i], name
            assert line[name] == ("" if row[name] is None else str(row[name])), name
        if row["difference"] is not None:
            sign = "-+"[row["difference"] >= 0]
            assert apart[e.label] == sign + amount(row["difference"], row["half"])
            assert apart[e.label] == difference(e)
        shown, value = float(of_metric[e.label].partition(" ")[0].replace(",", "")), row[c.key]
        low, high = row["intervals"].get(c.key, (value, value))
        digits = max(abs(value) * 0.6e-3, e.half or 0.0) + (high - low) / 20
        assert abs(shown - value) <= digits or math.isclose(shown, value)


@pytest.mark.parametrize("seeds", [1, 2, 3])
def test_python_has_the_figures_of_the_page_and_captions_count_the_seeds(seeds):
    rng = np.random.default_rng(seeds)
    c = made(2 + rng.normal(size=(3, seeds)) / 10 + np.arange(3)[:, None])
    figures, html = Answer(c).figures, page(c, inline=False)
    assert set(figures) == set(re.findall(r'data-plot="([^"]+)"', html))
    assert ("verdict" in figures) == (seeds > 1)
    words = ("One seed each", "Two seeds", "95 % intervals over the seeds")
    assert [word in html for word in words] == [n == seeds for n in (1, 2, 3)]


def test_a_column_of_round_figures_has_no_decimals_and_one_of_others_has_them_all():
    c = made(np.array([[2.0], [2.5]]))
    assert list(cells(c, c.key).values()) == ["2.0000", "2.5000"]
    assert c.headline.startswith("Undecided, one seed each: lr=1.0, val loss 2.0000")
    tokens = replace(c, metric=next(k for k in c.columns if k.key == "tokens_seen"))
    assert cells(tokens, "tokens_seen") == {"lr=1.0": "64", "lr=2.0": "64"}
