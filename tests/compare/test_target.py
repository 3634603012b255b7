"""Where runs first reach a target, and which setting does first."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest

from llmexp.__main__ import run as llmexp
from llmexp.compare.comparing import compare
from llmexp.compare.inference import fit_model, judged
from llmexp.compare.plot_settings import over_keys
from llmexp.settings.values import ConfigError
from tests.compare.synthetic import make_run, make_sweep, parent_in
from tests.conftest import TINY
from tests.conftest import llmexp as command
from tests.tools import amend, printed

TOKENS = 8 * 128  # a step


def crossing(offset: float, target: float, every: int) -> tuple[float, float, float]:
    """The step at which a made run reaches the target, and the evaluations beside it."""

    def loss(s: float) -> float:
        return 2.6 + 3 * math.exp(-s / 80) + offset

    by = next(s for s in range(every, 401, every) if loss(s) <= target)
    after = by - every
    if not after:
        return by, 0, by
    return after + every * (loss(after) - target) / (loss(after) - loss(by)), after, by


def planted(folder, offsets, seeds=(1, 2, 3), spread=0.02, every=20, **more):
    """Settings (learning rates) with these offsets of their losses; each seed adds its own."""
    noise = np.random.default_rng(0).standard_normal((len(offsets), len(seeds))) * spread
    shared = np.random.default_rng(1).standard_normal(len(seeds)) * spread
    found = {}
    for i, (rate, offset) in enumerate(offsets.items()):
        for j, seed in enumerate(seeds):
            own = offset + noise[i, j] + shared[j]
            make_run(folder / f"{rate}-{seed}", offset=own, seed=seed, val_every=every,
                     optimizer__lr=rate, **more)  # fmt: skip
            found[rate, seed] = own
    return found


def test_the_place_is_that_of_a_line_between_two_evaluations(tmp_path):
    offsets = planted(tmp_path, {0.1: 0.0, 0.2: 0.3})
    for align, unit in (("tokens", TOKENS), ("steps", 1), ("time", 0.5)):
        c = compare([tmp_path], target="val/loss=3.2", align=align)
        assert c.metric.key == f"target/{align}"
        for entry in c.settings:
            for run in entry.runs:
                lr, seed = run.config["optimizer.lr"], run.config["train.seed"]
                at, after, by = (unit * x for x in crossing(offsets[lr, seed], 3.2, 20))
                assert run.figures[f"target/{align}"] == pytest.approx(at)
                assert run.figures["target/after"] == pytest.approx(after)
                assert run.figures["target/by"] == pytest.approx(by)
                assert after < at <= by
            mean = np.mean([r.figures[f"target/{align}"] for r in entry.runs])
            assert entry.figures[f"target/{align}"] == pytest.approx(mean)
        assert [e.mark for e in c.settings] == ["best", "worse"]
        assert c.headline.startswith("lr=0.1 reaches val/loss=3.2 first, after ")
        assert "before lr=0.2 (3 seeds). The other is slower." in c.headline


def test_the_figure_over_a_key_counts_the_settings_that_it_leaves_out(tmp_path):
    """Those that never reach the target, or not with each seed."""
    noise = planted(tmp_path, {0.1: 0.0, 0.2: 0.1, 0.3: 0.5, 0.4: 9.0}, spread=0.2, every=10)
    ends = [offset for (rate, _), offset in noise.items() if rate == 0.3]
    some = 2.6 + 3 * math.exp(-400 / 80) + (min(ends) + max(ends)) / 2
    for target, left_out in ((4.0, "1 setting"), (some, "2 settings")):
        (plot,) = over_keys(compare([tmp_path], target=f"val/loss={target:.4f}"))
        assert f"Left out: {left_out} whose runs do not all reach val/loss=" in plot.caption
        assert sum(len(trace.x) for trace in plot.figure.data) == 4 - int(left_out[0])
    (plot,) = over_keys(compare([tmp_path]))
    assert "Left out" not in plot.caption


def test_a_target_below_the_first_evaluation_is_known_from_the_start_only(tmp_path):
    make_run(tmp_path / "a", val_every=100)
    (entry,) = compare([tmp_path], target="val/loss=5").settings
    assert entry.figures["target/after"] == 0
    assert entry.figures["target/tokens"] == entry.figures["target/by"] == 100 * TOKENS
    assert entry.figures["target/steps"] == 100


@pytest.mark.parametrize("align", ["tokens", "steps", "time"])
def test_settings_that_never_get_there_or_get_there_together_are_not_told_apart(tmp_path, align):
    planted(tmp_path, {0.1: 0.0, 0.2: 0.3, 0.3: 0.9})
    nobody = compare([tmp_path], target="val/loss=1", align=align)
    assert re.fullmatch(
        r"No run reaches val/loss=1; the lowest was 2\.\d+, of lr=0.1 seed=1\.", nobody.headline
    )
    assert not nobody.notes
    assert {e.mark for e in nobody.settings} == {""}
    at_once = compare([tmp_path], target="val/loss=9", align=align)  # at the first evaluation
    assert at_once.headline.startswith("lr=0.1, lr=0.2 and lr=0.3 reach val/loss=9 together, after")
    assert [e.mark for e in at_once.settings][1:] == ["same", "same"]


def test_runs_that_never_do_count_as_such(tmp_path):
    planted(tmp_path, {0.1: 0.0, 0.2: 0.05, 0.3: 0.8})
    c = compare([tmp_path], target="val/loss=3.2")
    assert [e.label for e in c.settings] == ["lr=0.1", "lr=0.2", "lr=0.3"]
    never = c.settings[-1]
    assert never.figures["target/reached"] == 0
    assert "target/tokens" not in never.figures
    assert (never.mark, never.size) == ("worse", None)
    assert any(n.startswith("3 of 9 runs never reached it (lr=0.3") for n in c.notes)
    # One of three seeds: no mean is made of the other two.
    make_run(tmp_path / "0.1-4", offset=0.9, seed=4, val_every=20, optimizer__lr=0.1)
    c = compare([tmp_path], target="val/loss=3.2")
    partly = next(e for e in c.settings if e.label == "lr=0.1")
    assert partly.figures["target/reached"] == pytest.approx(0.75)
    assert "target/reached" not in partly.intervals  # Student's would go beyond 1
    assert "target/tokens" not in partly.figures
    assert "lr=0.1 in 3 of 4 runs" in c.headline or partly.mark == "worse"
    none = compare([tmp_path], target="val/loss=0.1")
    assert none.headline.startswith("No run reaches val/loss=0.1; the lowest was ")


def test_what_is_reached_behind_the_end_of_a_run_that_never_does_has_no_order(tmp_path):
    """The cap is the end of the run that never gets there: nothing behind it is told apart."""
    for count in (1, 3):
        where = tmp_path / str(count)
        seeds = tuple(range(1, count + 1))
        planted(where, {0.1: 0.0, 0.2: 0.05}, seeds)
        planted(where, {0.3: 0.8}, seeds, steps=60, train__max_steps=400)
        c = compare([where], target="val/loss=3.2")
        assert c.headline.startswith(
            "Undecided: lr=0.1 and lr=0.2 reach val/loss=3.2 behind 61,440 tokens, where the first "
            "run that never does ends: lr=0.1 after "
        )
        assert {e.mark for e in c.settings} == {"lowest", "undecided"}
        assert {e.size for e in c.settings} == {None}


def test_a_target_given_as_a_number_alone_is_refused(tmp_path):
    make_run(tmp_path / "a")
    with pytest.raises(ConfigError, match=r"--target 3\.28: a figure of the rows"):
        compare([tmp_path], target=3.28)


def test_what_looks_and_a_search_chose_by_another_figure_is_not_told_of_a_target(tmp_path):
    points = {}
    for i, lr in enumerate((0.1, 0.2, 0.3)):
        for seed in (1, 2):
            point = {"overrides": [f"optimizer.lr={lr}", f"train.seed={seed}"]}
            points[f"{lr}-{seed}"] = dict(
                optimizer__lr=lr, seed=seed, offset=0.01 * i, val_every=20, point=point
            )
    sweep = make_sweep(tmp_path / "s", points, ["optimizer.lr", "train.seed"])
    look = {"seeds": ["1", "2"], "level": 0.05, "most": 2, "going": [], "worse": []}
    looks = [look | {"why": "all seeds are trained"}]
    for change in ({"looks": looks}, {"looks": [], "grid": False}):
        amend(sweep / "sweep.json", **change)
        by_loss, by_target = compare([sweep]), compare([sweep], target="val/loss=3.2")
        for words in ("all seeds are trained", "Of the order of", "cannot be told from"):
            assert words not in " ".join(by_target.sentences)
        assert by_loss.sentences[1:2] != by_target.sentences[1:2]


def test_a_fork_has_reached_what_its_parents_have(tmp_path):
    tokens = 200 * 8 * 128
    parent = parent_in("trunk", step=200, sequences=1600, tokens=tokens, tokens_seen=tokens)
    path = make_run(tmp_path / "fork", val_every=20, facts={"parent": parent})
    rows = (path / "metrics.jsonl").read_text().splitlines()
    (path / "lineage.jsonl").write_text("\n".join(rows[:200]) + "\n")
    (path / "metrics.jsonl").write_text("\n".join(rows[200:]) + "\n")
    make_run(tmp_path / "whole", val_every=20)
    fork, whole = (compare([tmp_path / name], target="val/loss=3.2").settings[0].figures
                   for name in ("fork", "whole"))  # fmt: skip
    for key in ("target/tokens", "target/steps", "target/time", "target/after"):
        assert fork[key] == pytest.approx(whole[key])


@pytest.mark.parametrize("given", ["val/loss", "val/loss=", "val/loss=nan", "lr=0.1", "x=1", "=3"])
def test_what_is_no_target_is_refused(tmp_path, given, capsys):
    make_run(tmp_path / "a")
    assert llmexp(["compare", str(tmp_path), "--target", given]) == 2
    assert "for example --target val/loss=3.28" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="--target orders the table by itself"):
        compare([tmp_path], target="val/loss=3", sort="steps")


def test_the_command_prints_what_the_schema_says(tmp_path, capsys):
    import llmexp as program

    planted(tmp_path, {0.1: 0.0, 0.2: 0.3})
    assert llmexp(["compare", str(tmp_path), "--target", "val/loss=3.2", "--json"]) == 0
    found = printed("compare", capsys.readouterr().out)
    assert found["target"] == {"key": "val/loss", "value": 3.2}
    assert found == program.compare(tmp_path, target="val/loss=3.2").data
    assert program.compare(tmp_path).data["target"] is None
    assert llmexp(["compare", str(tmp_path), "--target", "val/loss=3.2"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "tokens to" in out
    assert "evaluations, up to 20,480 tokens apart" in out
    page = tmp_path / "page.html"
    words = ["--target", "val/loss=3.2", "--out", str(page)]
    assert llmexp(["compare", str(tmp_path), *words]) == 0
    assert "tokens to target" in page.read_text()


def test_a_trained_sweep_reaches_a_target_where_its_rows_say(tmp_path):
    quick = [*TINY, "data=synthetic", "data.n_tokens=5000", "train.max_steps=6",
             "train.eval_every=2", "train.eval_tokens=600"]  # fmt: skip
    grid = ["optimizer.lr=1e-2,1e-5", "hydra.sweep.dir=s"]
    done = command("train", "-m", *quick, *grid, cwd=tmp_path)
    assert done.code == 0, done.err
    rows = [json.loads(line) for p in sorted((tmp_path / "s").glob("0-*/metrics.jsonl"))
            for line in p.read_text().splitlines()]  # fmt: skip
    seen = [(r["tokens_seen"], r["val/loss"]) for r in rows if "val/loss" in r]
    (a, first), (b, second) = seen[-2:]
    assert second < first
    target = (first + second) / 2
    printed_ = command("compare", "s", "--target", f"val/loss={target}", "--json", cwd=tmp_path)
    found = json.loads(printed_.out)
    best, other = found["runs"]
    assert best["target/tokens"] == pytest.approx((a + b) / 2)
    assert (best["target/after"], best["target/by"]) == (a, b)
    assert (other["target/reached"], other["target/tokens"]) == (0.0, None)
    assert found["headline"].startswith("Undecided, one seed each: lr=0.01 reaches val/loss=")


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


@pytest.mark.parametrize("share", [0.3, 0.7])
def test_counting_the_end_for_those_that_never_do_raises_no_alarms(share):
    assert alarms(6, 3, share, 150, 0.35) <= 0.06 + 3 * math.sqrt(0.06 * 0.94 / 150)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.1, 0.4, 0.7])
@pytest.mark.parametrize("spread", [0.0, 0.35])
@pytest.mark.parametrize(("k", "n"), [(2, 3), (3, 3), (6, 3), (12, 3), (6, 5), (12, 5)])
def test_false_alarms_with_runs_that_never_reach_it(k, n, share, spread):
    found = alarms(k, n, share, 500, spread)
    print(f"{k} x {n}, {share:.0%} never, {spread=}: false alarms {found:.1%}")
    assert found <= 0.06 + 2.5 * math.sqrt(0.06 * 0.94 / 500)


@pytest.mark.parametrize(("places", "headline"), [
    ([[20], [20]], "Undecided, one seed each: lr=1.0 and lr=2.0 reach val/loss=1 together, after "
     "20,480 tokens; 3 seeds each would begin to tell."),
    ([[20], [20], [40]], "Undecided, one seed each: lr=1.0 and lr=2.0 reach val/loss=1 first, "
     "together, after 20,480 tokens, 20,480 before lr=3.0; 3 seeds each would begin to tell."),
    ([[20] * 3, [20] * 3, [40] * 3], "lr=1.0 and lr=2.0 reach val/loss=1 first, together, after "
     "20,480 tokens, 20,480 ± 0 before lr=3.0 (3 seeds). The other is slower."),
    ([[20, 40, 60], [60, 40, 20]],
     "Undecided: lr=1.0 reaches val/loss=1 after 41,000 tokens, 0 ± 100,000 from lr=2.0 (3 "
     "seeds); "),
])  # fmt: skip
def test_settings_that_get_there_at_the_same_place_are_not_said_to_be_first(
    tmp_path, places, headline
):
    for i, of in enumerate(places, 1):
        for seed, at in enumerate(of, 1):
            run = make_run(tmp_path / f"{i}-{seed}", seed=seed, own=i, optimizer__lr=float(i))
            rows = [json.loads(x) for x in (run / "metrics.jsonl").read_text().splitlines()]
            rows = [r | {"val/loss": 2.0 - (r["step"] >= at)} for r in rows if r["step"] % 20 == 0]
            (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    assert compare([tmp_path], target="val/loss=1").headline.startswith(headline)
