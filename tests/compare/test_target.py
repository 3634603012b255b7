"""Where runs first reach a target, and which setting does first; more cases are in cases.yaml."""

import math

import numpy as np
import pytest

import llmexp
from llmexp.compare.comparing import compare
from llmexp.compare.inference import fit_model, judged
from llmexp.compare.plots import over_keys
from llmexp.config.values import ConfigError
from tests.compare.synthetic import (
    make_case,
    make_run,
    parent_in,
    read_rows,
    val_loss,
    write_rows,
)
from tests.tools import amend

TOKENS = 8 * 128  # a step


def crossing(offset: float, target: float, every: int) -> tuple[float, float, float]:
    """The step at which a made run reaches the target, and the evaluations beside it."""
    by = next(s for s in range(every, 401, every) if val_loss(s, offset) <= target)
    before, at = val_loss(by - every, offset), val_loss(by, offset)
    return by - every + every * (before - target) / (before - at), by - every, by


@pytest.mark.parametrize(("align", "unit"), [("tokens", TOKENS), ("steps", 1), ("time", 0.5)])
def test_the_place_is_that_of_a_line_between_two_evaluations(tmp_path, align, unit):
    offsets = {0.1: [0.0, 0.022, -0.013], 0.2: [0.31, 0.317, 0.294]}
    rows = [{"optimizer.lr": rate, "seed": dict(enumerate(own)), "val_every": 20}
            for rate, own in offsets.items()]  # fmt: skip
    found = llmexp.compare(make_case(tmp_path / "s", rows), target="val/loss=3.2", align=align)
    assert found.data["metric"] == f"target/{align}"
    for setting in found.comparison.settings:
        places = [crossing(own, 3.2, 20) for own in offsets[setting.values["optimizer.lr"]]]
        keys = (f"target/{align}", "target/after", "target/by")
        for run, place in zip(setting.runs, places, strict=True):
            own = [run.figures[key] for key in keys]
            assert own == pytest.approx([unit * at for at in place])
            assert own[1] < own[0] <= own[2]
        means = [unit * mean for mean in np.mean(places, axis=0)]
        assert [setting.figures[key] for key in keys] == pytest.approx(means)


@pytest.mark.parametrize("align", ["tokens", "steps"])
def test_where_the_train_loss_reaches_a_target_does_not_depend_on_rows(tmp_path, align):
    """It is the train loss of the table, a mean over steps, of which each counts."""
    runs = [make_run(tmp_path / name) for name in ("each", "some", "last")]
    for run, every in zip(runs[1:], (7, 400), strict=True):
        write_rows(
            run, [row for row in read_rows(run) if row["step"] in (400, *range(0, 400, every))]
        )
    losses = [row["train/loss"] for row in read_rows(runs[0])]
    means = [np.mean(losses[max(0, n - max(10, math.ceil(n / 20))) : n]) for n in range(1, 401)]
    by = next(n for n, mean in enumerate(means, 1) if mean <= 3.2)
    place = by - 1 + (means[by - 2] - 3.2) / (means[by - 2] - means[by - 1])
    found = [llmexp.compare(run, target="train/loss=3.2", align=align) for run in runs]
    places = [answer.comparison.settings[0].figures[f"target/{align}"] for answer in found]
    assert len(set(places)) == 1
    assert places[0] == pytest.approx(place * (TOKENS if align == "tokens" else 1))


def test_the_figure_over_a_key_counts_the_settings_that_it_leaves_out(tmp_path):
    """Those that never reach the target, or not with each seed."""
    rows = [{"optimizer.lr": rate, "seed": {1: own, 2: own + 0.1, 3: own - 0.1}, "val_every": 10}
            for rate, own in ((0.1, 0.0), (0.2, 0.1), (0.3, 0.5), (0.4, 9.0))]  # fmt: skip
    folder = make_case(tmp_path / "s", rows)
    for target, left_out in ((4.0, "1 setting"), (val_loss(400, 0.5), "2 settings")):
        (plot,) = over_keys(compare([folder], target=f"val/loss={target:.4f}"))
        assert f"Left out: {left_out} whose runs do not all reach val/loss=" in plot.caption
        assert sum(len(trace.x) for trace in plot.figure.data) == 4 - int(left_out[0])
    (plot,) = over_keys(compare([folder]))
    assert "Left out" not in plot.caption
    with pytest.raises(ConfigError, match=r"3\.28: a figure of the rows"):
        compare([folder], target=3.28)


def test_what_looks_and_a_search_chose_by_another_figure_is_not_told_of_a_target(tmp_path):
    ends = {0.1: (0.0, 0.05), 0.2: (0.04, 0.0), 0.3: (0.03, 0.03)}
    rows = [
        {"optimizer.lr": lr, "seed": seed, "offset": offset, "val_every": 20,
         "point": {"overrides": [f"optimizer.lr={lr}", f"train.seed={seed}"]}}
        for lr, offsets in ends.items() for seed, offset in enumerate(offsets, 1)
    ]  # fmt: skip
    sweep = make_case(tmp_path / "s", rows, ["optimizer.lr", "train.seed"])
    look = {"seeds": ["1", "2"], "level": 0.05, "most": 2, "going": [], "worse": []}
    looks = [look | {"why": "all seeds are trained"}]
    for change in ({"looks": looks}, {"looks": [], "grid": False}):
        amend(sweep / "sweep.json", **change)
        by_loss, by_target = (
            " ".join(llmexp.compare(sweep, target=target).data["sentences"])
            for target in (None, "val/loss=3.2")
        )
        words = ("all seeds are trained", "Search: it chose", "that knobs explain")
        assert [word for word in words if word in by_target] == []
        assert [word for word in words if word in by_loss]


def test_a_fork_has_reached_what_its_parents_have(tmp_path):
    tokens = 200 * TOKENS
    parent = parent_in("trunk", step=200, sequences=1600, tokens=tokens, tokens_seen=tokens)
    path = make_run(tmp_path / "fork", val_every=20, facts={"parent": parent})
    rows = (path / "metrics.jsonl").read_text().splitlines()
    (path / "lineage.jsonl").write_text("\n".join(rows[:200]) + "\n")
    (path / "metrics.jsonl").write_text("\n".join(rows[200:]) + "\n")
    make_run(tmp_path / "whole", val_every=20)
    fork, whole = (llmexp.compare(tmp_path / name, target="val/loss=3.2").data["runs"][0]
                   for name in ("fork", "whole"))  # fmt: skip
    for key in ("target/tokens", "target/steps", "target/time", "target/after"):
        assert fork[key] == pytest.approx(whole[key])


def alarms(k: int, n: int, share: float, sweeps: int, spread: float) -> float:
    """The share of sweeps in which a setting is called slower, where all are alike.

    `share` of the runs never reach the target, which counts as the end of the first such run.
    """
    random, found = np.random.default_rng([k, n]), 0
    for _ in range(sweeps):
        own = np.exp(spread * random.standard_normal((k, 1)))
        x = random.standard_normal((k, n)) * own + random.standard_normal(n)
        x = np.minimum(x, np.quantile(x, 1 - share))
        model = fit_model([{str(j): float(row[j]) for j in range(n)} for row in x])
        found += model is not None and any(worse for _, worse in judged(model)[1].values())
    return found / sweeps


SIZES = [(2, 3), (3, 3), (6, 3), (12, 3), (6, 5), (12, 5)]


@pytest.mark.parametrize(
    ("k", "n", "share", "spread", "sweeps"),
    [
        *((6, 3, share, 0.35, 150) for share in (0.3, 0.7)),
        *(pytest.param(*size, share, spread, 500, marks=pytest.mark.slow)
          for size in SIZES for spread in (0.0, 0.35) for share in (0.1, 0.4, 0.7)),
    ],
)  # fmt: skip
def test_counting_the_end_for_those_that_never_do_raises_no_alarms(k, n, share, spread, sweeps):
    found = alarms(k, n, share, sweeps, spread)
    print(f"{k} x {n}, {share:.0%} never, {spread=}: false alarms {found:.1%}")
    assert found <= 0.06 + 2.5 * math.sqrt(0.06 * 0.94 / sweeps)
