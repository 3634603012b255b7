"""The sweep of `llmexp train --help`, trained: its answer is short and agrees with the rows that it
cites."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmexp.settings.labels import short_label
from tests.conftest import TINY, llmexp

SWEEP = ["batch.gradient_accumulation_steps=1,2,4", "clip.max_norm=0.5,1.0"]
QUICK = [
    *TINY,
    "train.max_steps=12",
    "train.log_every=1",
    "train.eval_every=3",
    "train.eval_tokens=480",
    "precision=fp32",
]


def losses_of(run: Path) -> dict[int, float]:
    """The val losses of a run by the tokens that it had seen, straight from its rows."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["tokens_seen"]: row["val/loss"] for row in rows if "val/loss" in row}


def points_of(sweep: Path) -> dict[str, dict[int, float]]:
    found = {}
    for point in json.loads((sweep / "sweep.json").read_text())["points"]:
        values = dict(
            o.split("=")
            for o in point["overrides"]
            if o.split("=")[0] in (s.split("=")[0] for s in SWEEP)
        )
        found[short_label(values)] = losses_of(sweep / point["folder"])
    return found


def answer_of(output: str) -> list[str]:
    """The lines from the headline to the page, without these."""
    lines = output.splitlines()
    end = next(i for i, line in enumerate(lines) if line.startswith("page "))
    start = max(i for i, line in enumerate(lines[:end]) if not line) + 1
    return lines[start:end]


@pytest.mark.slow
def test_the_sweep_of_the_help_gives_both_readings_in_twelve_lines(tmp_path):
    assert " ".join(SWEEP) in llmexp("train", "--help", cwd=tmp_path).out
    where = tmp_path / "sweep"
    done = llmexp(
        "train", "-m", *SWEEP, *QUICK, f"hydra.sweep.dir={where}", cwd=tmp_path, COLUMNS="80"
    )
    assert done.code == 0, done.err
    assert "warning: these points train on unequal numbers of tokens" in done.err
    found = answer_of(done.out)
    assert len(found) <= 12
    assert max(map(len, found)) <= 80
    points = points_of(where)
    equal = min(max(losses) for losses in points.values())
    at_equal = {name: losses[equal] for name, losses in points.items()}
    at_end = {name: losses[max(losses)] for name, losses in points.items()}
    first, last = min(at_equal, key=at_equal.get), min(at_end, key=at_end.get)
    text = " ".join(" ".join(found).split())
    assert text.startswith(
        f"No ranking, the budgets differ. Lowest val loss: {first} at equal tokens "
        f"({at_equal[first]:.5g}), {last} at its own end ({at_end[last]:.5g})."
    )
    for name in points:
        cells = [part.partition("=")[2] for part in name.split()]
        (row,) = [line.split() for line in found if line.split()[:2] == cells]
        assert f"{at_equal[name]:.4f}" in row
        assert f"{at_end[name]:.4f}" in row
    assert "train.max_tokens=1152" in text  # 12 steps of 8 sequences of 12
    assert not any(word in text for word in ("best", "real", "better", "worse"))
    again = llmexp("compare", str(where), cwd=tmp_path, COLUMNS="80").out
    assert [line.rstrip() for line in again.splitlines()] == found
    figures = {
        r["label"]: r
        for r in json.loads(llmexp("compare", str(where), "--json", cwd=tmp_path).out)["runs"]
    }
    assert {name: r["val/loss"] for name, r in figures.items()} == pytest.approx(
        at_equal, rel=1e-12
    )
    assert {name: r["final val/loss"] for name, r in figures.items()} == pytest.approx(
        at_end, rel=1e-12
    )
