"""What a comparison says of runs whose differences are known."""

from __future__ import annotations

import io
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmexp.compare.comparing import compare, findings, with_words
from llmexp.compare.plot_training import other_quantities
from llmexp.compare.records import Result
from llmexp.compare.table import columns_in_full, show, to_json
from llmexp.settings.values import ConfigError
from tests.compare.made import trained
from tests.compare.synthetic import make_run, make_sweep, parent_in, write_steps

OPTIM = "llmexp.update.optim"


def lines_of(comparison: Result, width: int = 80) -> list[str]:
    out = io.StringIO()
    show(comparison, out, width)
    return out.getvalue().splitlines()


def marks(c: Result) -> dict[str, str]:
    return {e.label: e.mark for e in c.settings}


def seeds(path: Path, offsets: dict[int, float], **more) -> None:
    """Runs of one setting, one a seed, that end at 2.6 + 3 exp(-5) + its offset."""
    for seed, offset in offsets.items():
        make_run(path / f"{path.name}-seed_{seed}", seed=seed, offset=offset, **more)


def test_runs_are_the_same_to_the_last_bit_only_if_all_steps_are(tmp_path):
    for cut in (1, 2):
        make_run(tmp_path / str(cut), micro=8 // cut, accumulation=cut)
    assert compare([tmp_path]).headline.endswith("ways: val loss 2.6202, the same to the last bit.")
    file = tmp_path / "2/steps.bin"
    losses = np.fromfile(file)[::4]
    losses[17] = math.nextafter(losses[17], 9)
    write_steps(file.parent, losses.tolist(), [1024] * len(losses))
    headline = compare([tmp_path]).headline
    assert headline.endswith(
        "2.6202 in each, but other losses differ, so rounding does move these runs."
    )


@pytest.mark.parametrize(
    ("norms", "headline"),
    [
        ((4.0, 4.0), "clip=1.0 and clip=2.0 have the same mine/norm, 4."),
        (
            (4.0, 4.0, 5.0),
            "clip=1.0 and clip=2.0 have the lowest mine/norm, 4; next is clip=3.0, 5.",
        ),
        ((4.0, 5.0, 5.0), "clip=1.0 has the lowest mine/norm, 4; next is clip=2.0, 5."),
    ],
)
def test_equal_figures_are_called_equal(tmp_path, norms, headline):
    for limit, norm in enumerate(norms, 1):
        run = tmp_path / str(limit)
        make_run(run, max_norm=float(limit), facts={"better": {"mine/norm": "lower"}})
        path = run / "metrics.jsonl"
        rows = [json.loads(line) | {"mine/norm": norm} for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(r, separators=(",", ":")) + "\n" for r in rows))
    assert compare([tmp_path], sort="mine/norm").headline == headline


def test_any_key_of_the_rows_orders_and_is_a_column(tmp_path):
    """A hook's figure in every fourth row: the last value up to the position at which losses are
    read."""
    for name, steps, slope in (("a", 400, 1.0), ("b", 202, 3.0)):
        facts = {"better": {"mine/norm": "lower", "mine/odd": "no"}}
        make_run(tmp_path / name, steps=steps, max_norm=slope, facts=facts, val_every=50)
        config = tmp_path / name / "config.yaml"
        config.write_text(config.read_text() + "hooks: [mymodel.watch]\n")
        path = tmp_path / name / "metrics.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row in rows[3::4]:
            row |= {"mine/norm": slope * row["step"], "weight_norm": slope, "mine/odd": 1.0}
        path.write_text("".join(json.dumps(r, separators=(",", ":")) + "\n" for r in rows))
    c = compare([tmp_path], sort="mine/norm")
    # the last row up to step 202 that has it is the one of step 200
    assert [e.figures["mine/norm"] for e in c.settings] == [200.0, 600.0]
    assert "has the lowest mine/norm, 200; next is" in c.headline
    assert c.metric.key == c.columns[0].key == "mine/norm"
    assert json.loads(to_json(c))["runs"][1]["mine/norm"] == 600.0
    assert columns_in_full(compare([tmp_path]))["mine/norm"]  # a column by itself
    for key in ("mine/odd", "weight_norm"):  # of which nobody says which way is better
        headline = compare([tmp_path], sort=key).headline
        assert headline == f"No ranking: neither a higher nor a lower figure of {key} is better."
    plot = other_quantities(compare([tmp_path]))
    assert plot is not None
    assert "mine/norm" in repr(plot)
    with pytest.raises(ConfigError, match="Did you mean mine/norm"):
        compare([tmp_path], sort="mine/nrm")


def test_over_time_the_place_of_seeds_is_their_mean(tmp_path):
    """Seeds of several speeds stand at other tokens after a time; the share that is done is of all
    of them."""
    for limit, times in ((1.0, (0.5, 1.0)), (2.0, (1.0, 1.0))):
        for seed, step_time in enumerate(times):
            make_run(
                tmp_path / f"{limit}-{seed}", max_norm=limit, seed=seed, step_time=step_time,
                val_every=10, schedule___target_="llmexp.update.schedule.cosine",
            )  # fmt: skip
    c = compare([tmp_path], align="time")
    assert c.align_at == 200.0
    # at 200 s: steps 400 and 200 of 400, and 200 twice
    assert "Done where losses are read: 75 % of clip=1.0, 50 % of clip=2.0." in c.notes


def test_failed_seeds_are_named_by_setting_and_seed(tmp_path):
    for limit in (1.0, 2.0):
        for seed in (1, 2, 3, 4):
            state = "failed" if limit == 1 and seed > 2 else "finished"
            make_run(tmp_path / f"{limit}-{seed}", max_norm=limit, seed=seed, state=state)
    assert "Left out: 2 runs failed (clip=1.0 seed=3,4)." in compare([tmp_path]).notes
    c = compare([tmp_path / "1.0-*"])  # where nothing but the seed varies
    assert "Left out: 2 runs failed (seed=3,4)." in c.notes


def test_a_setting_beside_cuts_of_one_batch_is_held_against_their_spread(tmp_path):
    points = {
        f"a_{a},c_{limit}": dict(
            micro=8 // a, accumulation=a, max_norm=limit, offset=extra + 0.001 * a
        )
        for a in (1, 2, 4)
        for limit, extra in ((0.5, 0.0), (1.0, 0.03))
    }
    c = compare(
        [make_sweep(tmp_path / "s", points, ["batch.gradient_accumulation_steps", "clip.max_norm"])]
    )
    assert set(c.factors) == {"batch.gradient_accumulation_steps", "clip.max_norm"}
    assert "batch.micro_batch_size" in c.differing
    assert [m for label, m in marks(c).items() if "clip=0.5" in label] == ["lowest", "same", "same"]
    assert {m for label, m in marks(c).items() if "clip=1.0" in label} == {"undecided"}
    assert "0.03 below accum=1 clip=1.0 (rounding alone makes 0.003); 3 seeds each" in c.headline
    assert "Rounding alone makes differences of up to 0.003 here (cuts of one batch)." in c.notes
    assert len(lines_of(c)) <= 12


def of(limit: float, offsets: dict[int, float] | None = None, **more) -> list[dict]:
    """Runs of one limit, one a seed, with their offsets."""
    offsets = {1: 0.0} if offsets is None else offsets
    return [dict(max_norm=limit, seed=s, offset=o, **more) for s, o in offsets.items()]


CUTS = [dict(micro=8 // a, accumulation=a, offset=0.0007 * a) for a in (1, 2, 4, 8)]
SHARES = "Done where losses are read: 100 % of accum=1, 50 % of accum=2, 25 % of accum=4."
ACCUM, LIMIT = "batch.gradient_accumulation_steps", "clip.max_norm"
NAMES = ("lowest", *["same"] * 3)
# By name: runs, the keys that their sweep varies (none: no sweep), options of compare, the start of
# the headline, marks in the order of the table, and what else is said.
CASES = {
    "cuts of one batch are a floor and never a difference": (
        CUTS, [ACCUM], {},
        "One computation, run 4 ways: val loss 2.6209 to 2.6258. The spread of 0.0049",
        {f"accum={a}": m for a, m in zip((1, 2, 4, 8), NAMES, strict=True)},
    ),
    "with dropout each cut draws other masks": (
        [dict(cut, model__dropout=0.1) for cut in CUTS], [ACCUM], {}, "",
        {"accum=1": "lowest"} | {f"accum={a}": "undecided" for a in (2, 4, 8)},
    ),
    "repeats of a seed are no further seeds": (
        [*of(1.0), *of(1.0, {1: 0.001})], [], {}, "One computation, run 2 ways",
        {"name=0": "lowest", "name=1": "same"},
    ),
    "a twin measures what rounding makes": (
        [*of(0.5, train__twin=0), *of(1.0, {1: 0.004}, train__twin=0),
         *of(0.5, {1: 0.006}, train__twin=1)],
        [LIMIT], {}, "Undecided",
        {"clip=0.5": "lowest", "clip=0.5 twin=1": "same", "clip=1.0": "undecided"},
        "0.004 below clip=1.0 (rounding alone makes 0.006)", "up to 0.006 here (twins)",
    ),
    "two seeds that are not shared are too few": (
        [*of(1.0, {1: 0.0, 2: 0.001}), *of(2.0, {3: 0.1, 4: 0.101})], [], {}, "Undecided",
        {"clip=1.0": "lowest", "clip=2.0": "undecided"},
    ),
    "a setting of one seed does not hide what seeds show of others": (
        [*of(0.5, {1: -0.2}), *of(1.0, {1: 0.0, 2: 0.001, 3: 0.002}),
         *of(2.0, {1: 0.1, 2: 0.1011, 3: 0.1022})],
        [], {}, "clip=1.0 leads those with seeds: val loss 2.6212, 0.10010 ± ",
        {"clip=0.5": "undecided", "clip=1.0": "lowest", "clip=2.0": "worse"},
        "1 of the 2 others is worse. Too few seeds to judge clip=0.5.",
    ),
    "of those that are alike none is among the others": (
        [*(run for i in (1, 2, 3) for run in of(float(i), {s: 1e-5 * s * i for s in (1, 2, 3)})),
         *of(4.0, {s: 0.1 + 1e-5 * s for s in (1, 2, 3)})],
        [], {}, "clip=1.0, clip=2.0 and clip=3.0 are best, alike to within",
        {"clip=1.0": "best", "clip=2.0": "same", "clip=3.0": "same", "clip=4.0": "worse"},
        ". The other is worse.",
    ),
    # Seeds lie 1 apart; the first has the lower mean only for the lucky seeds that the other lacks.
    "what is better over the common seeds leads whatever the means": (
        [*of(1.0, {s: s - 5 + 0.05 for s in range(1, 8)}),
         *of(2.0, {s: s - 5 + 0.0001 * s for s in range(5, 8)})],
        [], {}, "clip=2.0 is best: ", {"clip=1.0": "worse", "clip=2.0": "best"},
        "0.04940 ± ", "not over the same seeds",
    ),
    "seeds do not make unequal budgets comparable": (
        [*of(1.0, {1: 0.0, 2: 0.001, 3: 0.002}), *of(2.0, {1: 0.1, 2: 0.102, 3: 0.103}),
         *of(1.0, {1: -1.0, 2: -1.001, 3: -1.002}, accumulation=2)],
        [], {}, "No ranking",
        {"accum=2 clip=1.0": "lowest", "accum=1 clip=1.0": "lowest of budget",
         "accum=1 clip=2.0": "worse"},
    ),
    "a trial that ends before the others are evaluated is too short": (
        [*(run for i in (1, 2, 3) for run in of(float(i), {1: 0.01 * i}, val_every=400)),
         *of(9.0, {1: -5.0}, steps=80, val_every=80)],
        [], {}, "Undecided",
        {"clip=1.0": "lowest", "clip=2.0": "undecided", "clip=3.0": "undecided",
         "3": "too short"},
        "409,600 tokens",
    ),
    "a point that has just begun does not hold up the others": (
        [*of(1.0), *of(2.0, steps=300, state="preempted", train__max_steps=400),
         *of(3.0, steps=200, state="preempted", train__max_steps=400),
         *of(4.0, steps=2, state="preempted", train__max_steps=400)],
        [LIMIT], {}, "",
        {"clip=1.0": "lowest", "clip=2.0": "other budget", "clip=3.0": "other budget",
         "3-3": "too short"},
        "204,800 tokens",
    ),
    "equal budgets at unequal times are not told to train equally long": (
        [*of(1.0), *of(2.0, step_time=1.0)], [], {"align": "time"}, "No ranking at equal time",
        {"clip=1.0": "lowest", "clip=2.0": "other budget"},
    ),
    "a rerun joins the seeds in place of the one that failed": (
        [*of(1.0, state="failed", steps=50), *of(1.0, {2: 0.02, 3: 0.03, 1: 0.01})], [], {},
        "steps=400: val loss 2.640 ± 0.025 over 3 seeds", {"steps=400": "", "steps=50": "failed"},
    ),
    "two tasks of equal weight are not ranked": (
        [*of(1.0), *of(1.0, data__seed=5)], [], {},
        "No ranking: the runs have 2 different validation texts",
        {"seed=0": "lowest", "seed=5": "other task"},
    ),
    "a list is a value like any other": (
        [run for b in (1, 2) for limit in (1.0, 2.0)
         for run in of(limit, {s: limit + 0.01 * s * b for s in (1, 2)}, data__weights=[1, b])],
        ["data.weights", LIMIT], {}, "",
        {"weights=[1, 1] clip=1.0": "best", "weights=[1, 2] clip=1.0": "worse",
         "weights=[1, 1] clip=2.0": "worse", "weights=[1, 2] clip=2.0": "worse"},
    ),
    "a swept group reads as on the command line": (
        [dict(optimizer___target_=OPTIM + ".adamw", optimizer__betas=[0.9, 0.95]),
         dict(optimizer___target_=OPTIM + ".muon", optimizer__momentum=0.95)],
        ["optimizer"], {}, "",
        {"optimizer=adamw": "lowest", "optimizer=muon": "undecided"},
    ),
    "an experiment may choose the rate beside the optimizer": (
        [dict(optimizer___target_=OPTIM + ".adamw", optimizer__lr=0.001, optimizer__beta=0.9),
         dict(optimizer___target_=OPTIM + ".muon", optimizer__lr=0.02, optimizer__nesterov=1)],
        ["experiment"], {}, "",
        {"optimizer=adamw lr=0.001": "lowest", "optimizer=muon lr=0.02": "undecided"},
    ),
    "a value at which all runs fail names its column": (
        [dict(optimizer__lr=lr, optimizer__weight_decay=wd, offset=wd, state=state)
         for lr, state in ((0.001, "finished"), (1e9, "failed")) for wd in (0.0, 0.1)],
        ["optimizer.lr", "optimizer.weight_decay"], {},
        "Undecided, one seed each: lr=0.001 wd=0.0 has the lowest",
        {"lr=0.001 wd=0.0": "lowest", "lr=0.001 wd=0.1": "undecided",
         "lr=1e+09 wd=0.0": "failed", "lr=1e+09 wd=0.1": "failed"},
    ),
    "a value at which all seeds fail, beside runs of an earlier budget": (
        [*of(1.0, {1: 0.0}, steps=200, optimizer__lr=0.001),
         *(run for lr, state in ((0.001, "finished"), (1e9, "failed"))
           for run in of(1.0, {1: 0.0, 2: 0.1}, optimizer__lr=lr, state=state))],
        ["optimizer.lr", "train.seed"], {}, "No ranking, the budgets differ.",
        {"steps=400 lr=0.001": "lowest", "steps=200 lr=0.001": "other budget",
         "steps=400 lr=1e+09": "failed"},
    ),
    "a group whose options all but one fail": (
        [dict(optimizer___target_=f"{OPTIM}.{kind}", max_norm=limit, offset=limit, **more)
         for kind, more in (("adamw", {"optimizer__betas": [0.9, 0.95]}),
                            ("muon", {"optimizer__momentum": 0.95, "state": "failed"}))
         for limit in (1.0, 2.0)],
        ["optimizer", LIMIT], {}, "",
        {"clip=1.0 optimizer=adamw": "lowest", "clip=2.0 optimizer=adamw": "undecided",
         "clip=1.0 optimizer=muon": "failed", "clip=2.0 optimizer=muon": "failed"},
    ),
    "the twin of what won a halving does not hide its setting": (
        [*of(1.0, train__twin=0), *of(1.0, {1: 0.004}, train__twin=1),
         *of(1.0, {2: 0.1}, train__twin=0, steps=200, state="preempted", train__max_steps=400,
             point={"rung": 0.5}),
         *of(2.0, {1: 0.2, 2: 0.3}, steps=100, state="preempted", train__max_steps=400,
             point={"rung": 0.25})],
        [LIMIT, "train.seed"], {},
        "clip=1.0 won the successive halving: val loss 2.6202; 1 other was left out after 25 % of "
        "the steps. Rounding alone makes 0.004.",
        {"clip=1.0": "lowest", "clip=1.0 twin=1": "same", "clip=2.0": "out at 25%"},
    ),
    "limits that clip nothing compute the same": (
        [*of(1.0, wobble=0.0), *of(2.0, wobble=0.0)], [], {},
        "clip=1.0 and clip=2.0 computed the same, to the last bit: val loss 2.6202.",
        {"clip=1.0": "lowest", "clip=2.0": "same"},
    ),
    "settings that compute the same stand beside another one": (
        [*of(1.0, wobble=0.0), *of(2.0, wobble=0.0), *of(3.0, {1: 0.1})], [], {},
        "Undecided, one seed each: clip=1.0 and clip=2.0 computed the same, val loss 2.6202, 0.1 "
        "below clip=3.0; 3 seeds each would begin to tell.",
        {"clip=1.0": "lowest", "clip=2.0": "same", "clip=3.0": "undecided"},
    ),
    "a run of an earlier version is a seed beside those of today": (
        [*of(1.0), *of(1.0, {2: 0.02, 3: 0.04}, train__tail="keep", train__ema=None)], [], {},
        "seeds 1-3: val loss 2.640 ± 0.050 over 3 seeds", {"seeds 1-3": ""},
    ),
    "what an earlier version did not know sets no run apart": (
        [*of(1.0), *of(2.0, {1: 0.1}, train__tail="keep")], [], {}, "Undecided",
        {"clip=1.0": "lowest", "clip=2.0": "undecided"},
    ),
    "neither more nor fewer steps are better": (
        [*of(1.0), *of(2.0)], [], {"sort": "steps"},
        "No ranking: neither a higher nor a lower figure of steps is better.",
        {"clip=1.0": "", "clip=2.0": ""},
    ),
    "the highest rate is first": (
        [*of(1.0, status={"summary": {"mean tokens_per_sec": 10.0}}),
         *of(2.0, status={"summary": {"mean tokens_per_sec": 30.0}})],
        [], {"sort": "tokens_per_sec"}, "clip=2.0 has the highest tokens/s, 30;",
        {"clip=2.0": "highest", "clip=1.0": ""},
    ),
    "runs that were never all evaluated at one position are not ranked": (
        [*of(1.0), *of(2.0, {1: 0.1}, steps=250), *of(3.0, val_every=300)], [], {},
        "No ranking, the budgets differ. Lowest val loss: steps=400 clip=1.0 at its own end "
        "(2.6202). At equal tokens not all have an evaluation.",
        {"steps=400 clip=1.0": "lowest", "steps=400 clip=3.0": "other budget",
         "steps=250 clip=2.0": "other budget"},
        "train.eval_every_tokens=204800 evaluates runs of all batches at like tokens.",
    ),
    "runs without an evaluation are named": (
        [*of(1.0), *of(2.0, {1: 0.1}, steps=250), *of(3.0, val_every=500)], [], {}, "",
        {"steps=400 clip=1.0": "lowest", "steps=400 clip=3.0": "not evaluated",
         "steps=250 clip=2.0": "other budget"},
        "1 of 3 runs has no evaluation up to there: steps=400 clip=3.0.",
    ),
    "losses of several tokenizers are not ranked, bits per byte are": (
        [*of(1.0), *of(1.0, {1: 0.2}, tokenizer="gpt2")], [], {},
        "Undecided, one seed each: tokenizer=bytes has the lowest val bits/byte",
        {"tokenizer=bytes": "lowest", "tokenizer=gpt2": "undecided"}, "The tokenizers differ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_is_reported_of(tmp_path, case):
    runs, swept, options, headline, expected, *said = CASES[case]
    if swept:
        make_sweep(tmp_path / "s", {str(i): run for i, run in enumerate(runs)}, swept)
    for i, run in enumerate(() if swept else runs):
        make_run(tmp_path / str(i), own=i, **run)
    c = compare([tmp_path], **options)
    assert c.headline.startswith(headline)
    assert list(marks(c).items()) == list(expected.items())
    for text in said:
        assert any(text in sentence for sentence in c.sentences), c.sentences


@settings(max_examples=15, deadline=None)
@given(
    offsets=st.lists(st.sampled_from([0.0, 1e-5, 0.0003, 0.01, 0.5]), min_size=2, max_size=5),
    wobble=st.sampled_from([0.0, 0.002]),
)
def test_one_seed_decides_nothing(tmp_path_factory, offsets, wobble):
    """But that runs whose rows are all equal computed the same."""
    others = sorted(offsets)[1:]
    same = [not wobble and offset == min(offsets) for offset in others]
    where = tmp_path_factory.mktemp("runs")
    for i, offset in enumerate(offsets):
        make_run(
            where / str(i), own=i, max_norm=float(i + 1), offset=offset, wobble=wobble, steps=100
        )
    for align in ("tokens", "steps", "time"):
        c = compare([where], align=align)
        words = ["same" if alike else "undecided" for alike in same]
        assert [e.mark for e in c.settings] == ["lowest", *words]
        assert c.headline.startswith("Undecided, one seed each") != all(same)
        assert ("computed the same" in c.headline) == any(same)
        assert not re.search(r"\b(is best|real|clearly|better)\b", " ".join(c.sentences))


def test_seeds_are_folded_and_their_spread_decides(tmp_path):
    spread = {1: -0.01, 2: 0.0, 3: 0.012}
    seeds(tmp_path / "near", spread)
    seeds(tmp_path / "same", {s: -2 * o + 0.002 for s, o in spread.items()}, max_norm=2.0)
    seeds(tmp_path / "far", {s: o + 0.1 + 0.001 * s for s, o in spread.items()}, max_norm=3.0)
    c = compare([tmp_path])
    assert sorted((e.name, len(e.runs)) for e in c.settings) == [
        ("far x3", 3),
        ("near x3", 3),
        ("same x3", 3),
    ]
    assert "train.seed" not in c.differing
    near = next(e for e in c.settings if e.name == "near x3")
    ends = [2.6 + 3 * math.exp(-5) + own for own in spread.values()]
    half = 4.302653 * np.std(ends, ddof=1) / math.sqrt(3)
    assert near.figures["val/loss"] == pytest.approx(np.mean(ends), rel=1e-12)
    assert near.intervals["val/loss"] == pytest.approx(
        (np.mean(ends) - half, np.mean(ends) + half), rel=1e-6
    )
    assert sorted(marks(c).values()) == ["lowest", "undecided", "worse"]
    assert marks(c)["clip=3.0"] == "worse"
    assert c.headline.startswith("Undecided: ")
    assert "(3 seeds)" in c.headline
    assert c.headline.endswith("1 of the 2 others is worse.")


@pytest.mark.parametrize(
    ("gap", "scatter", "mark", "start"),
    [
        (0.05, 0.0010, "worse", "clip=1.0 is best: val loss 2.6202, 0.0500 ± 0.0"),
        (
            0.0012,
            0.0001,
            "same",
            "clip=1.0 and clip=2.0 are alike to within 0.0013: val loss 2.6202.",
        ),
        (0.0, 0.0001, "same", "clip=1.0 and clip=2.0 are alike"),
        (0.003, 0.0040, "undecided", "Undecided: clip=1.0 has the lowest val loss, 2.6202, "),
    ],
)
def test_real_negligible_same_and_undecided(tmp_path, gap, scatter, mark, start):
    """Paired differences of mean `gap` and standard deviation `scatter`."""
    shape = np.array([-1.0, 0.0, 1.0, 0.5, -0.5])
    shape /= shape.std(ddof=1)
    seeds(tmp_path / "a", dict.fromkeys(range(1, 6), 0.0))
    seeds(
        tmp_path / "b", {s: gap + scatter * float(x) for s, x in enumerate(shape, 1)}, max_norm=2.0
    )
    c = compare([tmp_path])
    other = next(e for e in c.settings if "2.0" in e.label)
    if gap:
        assert other.mark == mark
        # t(0.975, 4)
        assert other.half == pytest.approx(2.776445 * scatter / math.sqrt(5), rel=1e-4)
        assert c.headline.startswith(start)
    else:
        assert sorted(marks(c).values()) == ["lowest", "same"]
    if mark == "undecided":
        # (t(0.975, n-1) + t(0.8, n-1)) 0.004 / sqrt(n) <= 0.003 from n = 16 on, (2.131 + 0.866) *
        # 0.001: 11 more.
        assert "; 11 more seeds each would tell" in c.headline
    assert compare([tmp_path], negligible=0.0).headline.startswith("clip=1.0 is best") == (
        gap >= 0.0012 and gap != 0.003
    )


def test_a_twin_of_a_lucky_seed_decides_nothing_and_measures(tmp_path):
    for seed in (1, 2, 3):
        make_run(tmp_path / f"a{seed}", seed=seed, offset=0.05 * seed, train__twin=0)
        make_run(
            tmp_path / f"b{seed}",
            seed=seed,
            offset=0.05 * seed + 0.1 + 1e-4 * seed,
            max_norm=2.0,
            train__twin=0,
        )
    make_run(tmp_path / "twin", seed=1, offset=0.05 - 0.001, train__twin=1)
    c = compare([tmp_path])
    assert c.headline.startswith("clip=1.0 is best")
    assert marks(c) == {"clip=1.0": "best", "clip=1.0 twin=1": "same", "clip=2.0": "worse"}
    assert "Rounding alone makes differences of up to 0.001 here (twins)." in c.notes
    alone = compare([tmp_path / "a*", tmp_path / "twin"])
    assert "over 3 seeds" in alone.headline
    assert alone.headline.endswith("; rounding makes 0.001 of it.")
    other = compare([tmp_path / "a2", tmp_path / "twin"])
    assert "each with another seed" in other.headline


@pytest.mark.parametrize("count", [1, 3])
def test_budgets_differ_also_where_nothing_was_evaluated_on_the_way(tmp_path, count):
    points = {
        f"a_{a},s_{seed}": dict(
            accumulation=a, seed=seed, offset=-0.1 * a + 1e-4 * seed * a, val_every=400
        )
        for a in (1, 2, 4)
        for seed in range(count)
    }
    c = compare([make_sweep(tmp_path / "s", points, ["batch.gradient_accumulation_steps"])])
    assert c.headline.startswith(
        "No ranking, the budgets differ. Lowest val loss: accum=4 at its own end ("
    )
    assert c.headline.endswith("At equal tokens not all have an evaluation.")
    assert marks(c) == {
        "accum=4": "lowest", "accum=2": "other budget", "accum=1": "other budget",
    }  # fmt: skip
    every = "train.eval_every_tokens=409600 evaluates runs of all batches at like tokens."
    assert c.notes[0] == every
    assert "To settle it" in c.notes[1]


def test_losses_evaluated_at_other_tokens_are_not_ranked(tmp_path):
    """Constant rates, so schedules are no reason; one run is evaluated at its end, the other 50
    steps before that."""
    for name, steps, limit, val_every in (("a", 250, 1.0, 125), ("b", 400, 2.0, 100)):
        for seed in (1, 2, 3):
            make_run(
                tmp_path / f"{name}{seed}", steps=steps, max_norm=limit, seed=seed,
                val_every=val_every, schedule___target_="llmexp.update.schedule.constant",
            )  # fmt: skip
    for sort in (None, "final val/loss", "best val/loss"):
        assert compare([tmp_path], sort=sort).headline.startswith(
            "No ranking, the budgets differ"
        ), sort


def test_seeds_alone_end_in_mean_deviation_interval_and_range(tmp_path):
    seeds(tmp_path / "a", {1: 0.0, 2: 0.01, 3: 0.02})
    c = compare([tmp_path])
    half = 4.302653 * 0.01 / math.sqrt(3)
    assert c.headline == (
        f"seeds 1-3: val loss 2.630 ± {half:.2g} over 3 seeds (standard deviation 0.01, range "
        "2.6202 to 2.6402)."
    )
    for run in (tmp_path / "a").glob("*seed_3/*"):
        run.unlink()
    assert compare([tmp_path]).headline == (
        "seeds 1 and 2: val loss 2.6202 and 2.6302. Two seeds are too few for an interval."
    )


def plan(sweep: Path, *points: str) -> None:
    """Write the overrides of the points into the ledger; those without a folder are queued."""
    ledger = json.loads((sweep / "sweep.json").read_text())
    known = len(ledger["points"])
    queued = [
        {"number": n, "folder": f"{n}-x", "label": "x", "identity": None}
        for n in range(known, len(points))
    ]
    entries = [*ledger["points"], *queued]
    ledger["points"] = [{**e, "overrides": p.split()} for e, p in zip(entries, points, strict=True)]
    (sweep / "sweep.json").write_text(json.dumps(ledger))


def test_seeds_that_the_sweep_still_plans_are_trained_by_resuming_it(tmp_path):
    sweep = make_sweep(tmp_path / "s", {f"seed_{s}": dict(seed=s) for s in (1, 2)}, ["train.seed"])
    plan(sweep, "a=1 train.seed=1", "a=1 train.seed=2", "a=1 train.seed=3", "a=2 train.seed=1")
    c = compare([sweep])
    assert c.headline.endswith("Two seeds are too few for an interval.")
    assert c.notes == (f"2 runs of the sweep are left to train: llmexp resume {sweep}",)


def test_of_a_stopped_sweep_losses_are_shown_and_the_runs_that_are_left_are_counted(tmp_path):
    points = {str(i): dict(max_norm=float(i), offset=0.01 * i) for i in (1, 2, 3, 4)}
    points["3"] |= dict(steps=250, state="preempted", point={"state": "preempted"})
    points["4"] |= dict(steps=130, state="preempted", point={"state": "preempted"})
    sweep = make_sweep(tmp_path / "s", points, ["clip.max_norm"])
    plan(sweep, *(f"clip.max_norm={i}" for i in (1, 2, 3, 4, 5, 6)))
    c = compare([sweep])
    assert f"4 runs of the sweep are left to train: llmexp resume {sweep}" in c.notes
    shown = "\n".join(lines_of(c))
    # the last evaluations of those that were stopped, at steps 200 and 100
    for offset, step in ((0.03, 200), (0.04, 100)):
        assert f"{2.6 + 3 * math.exp(-step / 80) + offset:.5g}" in shown


@pytest.mark.parametrize("draws", [60, pytest.param(2000, marks=pytest.mark.slow)])
def test_false_alarms_over_whole_sweeps_are_at_most_one_in_twenty(draws):
    """Sweeps of 2 to 6 settings in which nothing but the seeds makes a difference, and the
    last setting scatters as the others or five times as far."""
    rng = np.random.default_rng(11)
    alarms = 0
    for draw in range(draws):
        count = 2 + draw % 5
        scatter = np.ones((count, 1))
        scatter[-1] = 1 + 4 * (draw // 5 % 2)
        paired = draw // 10 % 2 == 0  # else each setting has seeds of its own
        seeds = np.arange(3)[None] + 3 * np.arange(count)[:, None] * (not paired)
        noise = rng.standard_normal(3 * count)[seeds] + scatter * rng.standard_normal((count, 3))
        places = np.ndindex(count, 3)
        records = [trained(i, int(seeds[i, k]), 3 + 0.01 * noise[i, k]) for i, k in places]
        alarms += any(e.mark == "worse" for e in with_words(findings(records)).settings)
    assert 0 < alarms <= 0.05 * draws + 3 * math.sqrt(draws * 0.05 * 0.95)  # nor is it blind


def test_unequal_budgets_are_never_ranked_and_both_readings_are_given(tmp_path):
    points = {}
    for a in (1, 2, 4):
        for limit, extra in ((0.5, 0.0), (1.0, 0.01)):
            points[f"a_{a},c_{limit}"] = dict(
                accumulation=a, max_norm=limit, offset=extra - 0.1 * a, steps=400
            )
    sweep = make_sweep(
        tmp_path / "s", points, ["batch.gradient_accumulation_steps", "clip.max_norm"]
    )
    for align in ("tokens", "steps", "time"):
        c = compare([sweep], align=align)
        assert c.headline.startswith("No ranking, the budgets differ."), align
        found = [(e.values["batch.gradient_accumulation_steps"], e.mark) for e in c.settings]
        assert (
            len({a for a, _ in found[:2]}) == len({a for a, _ in found[2:4]}) == 1
        )  # one budget after another
        assert [mark for _, mark in found] == [
            "lowest",
            "undecided",
            *["lowest of budget", "undecided"] * 2,
        ]
        ends = [words for words in ("at equal", "at its own end") if words in c.headline]
        assert (
            ends == ["at equal", "at its own end"][align != "tokens" :]
        )  # one reading where both are the same
        assert [e.size for e in c.settings[1::2]] == pytest.approx([0.01] * 3)
        assert any("Done where" in note for note in c.notes) == (
            align == "tokens"
        )  # else all are at their ends
    c = compare([sweep])
    equal = {e.label: e.figures["val/loss"] for e in c.settings}
    end = {e.label: e.figures["final val/loss"] for e in c.settings}
    # at a quarter of its steps
    assert equal["accum=4 clip=0.5"] == pytest.approx(2.6 + 3 * math.exp(-100 / 80) - 0.4)
    first, last = min(equal, key=equal.get), min(end, key=end.get)
    assert (first, last) == ("accum=1 clip=0.5", "accum=4 clip=0.5")
    assert (
        f"{first} at equal tokens ({equal[first]:.5g}), {last} at its own end ({end[last]:.5g})"
        in c.headline
    )
    assert c.notes[0] == SHARES
    assert c.notes[1] == "To settle it: the same with train.max_tokens=409600 for every point."
    shown = lines_of(c)
    assert len(shown) <= 12
    for label in equal:
        (row,) = [
            line
            for line in shown
            if line.split()[:2] == [part.split("=")[1] for part in label.split()]
        ]
        assert f"{equal[label]:.4f}" in row
        assert f"{end[label]:.4f}" in row


def test_a_constant_rate_has_no_schedule_to_wait_for(tmp_path):
    """At equal tokens a longer run with a constant rate is where a shorter one is; one whose rate
    decays is not."""
    for target, ranked in (("constant", True), ("cosine", False)):
        where = tmp_path / target
        for name, steps, limit in (("a", 200, 1.0), ("b", 400, 2.0)):
            schedule = f"llmexp.update.schedule.{target}"
            make_run(where / name, steps=steps, max_norm=limit, schedule___target_=schedule)
        assert compare([where]).headline.startswith("Undecided" if ranked else "No ranking")
        rows = (
            (where / "b" / "metrics.jsonl").read_text().splitlines()[300:]
        )  # no row where the shorter one ends
        (where / "b" / "metrics.jsonl").write_text("\n".join(rows) + "\n")
        assert compare([where]).headline.startswith("No ranking, the budgets differ.")


def test_named_sets_of_other_text_are_not_ranked_by_them(tmp_path):
    for number, code in enumerate(["one text", "another text"]):
        texts = {"prose": {"prose": "p"}, "code": {"code": code}}
        facts = {"val_texts": texts, "data_fingerprint": {"val_files": texts["prose"]}}
        run = make_run(
            tmp_path / str(number), offset=0.1 * number, max_norm=1.0 + number, facts=facts
        )
        rows = (run / "metrics.jsonl").read_text()
        both = re.sub(r'"val/loss":([\d.]+)', r'"val/loss":\1,"val/code/loss":\1', rows)
        (run / "metrics.jsonl").write_text(both)
    by_code = compare([tmp_path], sort="val/code/loss")
    assert by_code.headline.startswith("No ranking: the runs have 2 different validation texts")
    assert compare([tmp_path]).headline.startswith("Undecided")


def test_unfinished_short_and_foreign_runs_are_left_out_and_named(tmp_path):
    for i in range(4):
        make_run(tmp_path / f"r{i}", max_norm=float(i + 1), offset=0.01 * i)
    alone = compare([tmp_path])
    make_run(tmp_path / "trial", steps=2, max_norm=9.0, offset=-5.0, val_every=1)
    make_run(
        tmp_path / "begun",
        steps=250,
        max_norm=10.0,
        state="preempted",
        offset=-5.0,
        train__max_steps=400,
    )
    make_run(tmp_path / "broken", steps=120, max_norm=11.0, state="failed", offset=-5.0)
    text = "llmexp.data.sources.text"
    make_run(tmp_path / "other", max_norm=12.0, offset=-5.0, data___target_=text)
    c = compare([tmp_path])
    assert c.headline == alone.headline
    assert [e.label for e in c.settings[:4]] == [e.label for e in alone.settings]
    assert {e.name: e.mark for e in c.settings[4:]} == {
        "trial": "too short", "begun": "preempted", "broken": "failed", "other": "other task",
    }  # fmt: skip
    (left,) = [note for note in c.notes if note.startswith("Left out: ")]
    assert all(
        f"1 run {word} (" in left
        for word in ("too short", "preempted", "failed", "of another task")
    )


def test_an_unfinished_run_is_compared_as_far_as_it_is_while_no_two_have_finished(tmp_path):
    for name, steps, limit, state in (
        ("long", 400, 1.0, "finished"),
        ("short", 250, 2.0, "preempted"),
    ):
        make_run(
            tmp_path / name, steps=steps, max_norm=limit, state=state, train__max_steps=400,
            facts={"max_tokens": 400 * 1024},
        )  # fmt: skip
    c = compare([tmp_path])
    assert c.align_at == 200 * 8 * 128
    found = {e.name: e for e in c.settings}
    # Evaluated at 100, 200, ...
    assert found["long"].figures["val/loss"] == pytest.approx(2.6 + 3 * math.exp(-200 / 80))
    assert found["long"].figures["final val/loss"] == pytest.approx(2.6 + 3 * math.exp(-400 / 80))
    assert c.headline.startswith("Undecided, one seed each")
    last = "204,800 tokens, the last position at which every run was evaluated."
    assert any(last in text for text in c.why)
    assert compare([tmp_path], align="steps").align_at == 200
    assert compare([tmp_path], align="steps", sort="train/loss").align_at == 250
    # of half a second each
    assert compare([tmp_path], align="time").align_at == pytest.approx(125.0)


@pytest.mark.parametrize("copies", [1, 4])
def test_more_cells_with_the_same_seeds_do_not_make_an_effect_clearer(tmp_path, copies):
    """Two seeds and their copies under other names: the interval is that of the two seeds alone."""
    points = {
        f"e_{end},c_{limit},s_{seed}": dict(
            max_norm=float(limit), seed=seed, offset=end * 0.012 * seed, data__end=end
        )
        for end in (0, 1)
        for limit in range(1, 2 + copies)
        for seed in (1, 2)
    }
    c = compare([make_sweep(tmp_path / "s", points, ["data.end", "clip.max_norm"])])
    (said,) = [s for s in c.why if s.startswith("end: undecided")]
    # Differences 0.012 and 0.024: mean 0.018, half width t(1 - 0.025 / 2, 1) * 0.006 for two keys.
    half = math.tan(math.pi * (0.5 - 0.025 / 2)) * 0.006
    assert f"0.02 ± {half:.2g}, averaged over clip (2 seeds)" in said


def test_an_effect_that_turns_round_in_a_cell_says_which_counts(tmp_path):
    points = {}
    for limit in (1.0, 2.0):
        for end in (0, 1, 2):
            for seed in (1, 2, 3, 4):
                effect = -0.02 if end == 2 else 0.05
                jitter = 0.0001 * seed * (1 + end)
                points[f"{limit},{end},{seed}"] = dict(
                    max_norm=limit,
                    seed=seed,
                    data__end=end,
                    offset=(limit - 1) * (effect + jitter) + 0.01 * seed,
                )
    c = compare([make_sweep(tmp_path / "s", points, ["data.end", "clip.max_norm"])])
    (said,) = [s for s in c.notes if s.startswith("clip: 1.0 is better than 2.0 at")]
    assert "at end=0 and end=1 only, and worse at end=2; 0.02717 ± " in said


def test_an_effect_is_over_the_seeds_that_both_sides_have(tmp_path):
    """Seeds lie 1 apart, the limits 0.03; the larger limit lacks seeds, other ones in each cell."""
    points = {
        f"e_{end},c_{limit},s_{seed}": dict(
            max_norm=limit,
            data__end=end,
            seed=seed,
            offset=seed + (0.03 + 0.0001 * seed) * (limit - 1),
        )
        for end in (1, 2)
        for limit in (1.0, 2.0)
        for seed in (1, 2, 3, 4)
        if limit == 1.0 or seed <= 4 - end
    }
    c = compare([make_sweep(tmp_path / "s", points, ["data.end", "clip.max_norm"])])
    (said,) = [s for s in c.sentences if s.startswith("clip: ")]
    assert "0.03019 ± " in said
    (lacking,) = [s for s in c.notes if "same seeds" in s]
    assert "clip=2.0 lacks 4" in lacking
    assert not any("same seeds" in s for s in compare([tmp_path / "s" / "*c_1.0*"]).notes)
    points["left out"] = dict(accumulation=2, state="failed")
    more = compare([make_sweep(tmp_path / "t", points, ["data.end", LIMIT, ACCUM])])
    assert ACCUM in more.factors
    assert [s for s in more.sentences if s.startswith("clip: ")] == [said]


def test_the_answer_of_successive_halving(tmp_path):
    points = {
        f"c_{i}": dict(
            max_norm=float(i), offset=0.05 * i, steps=steps,
            state="preempted" if rung else "finished", train__max_steps=400, point={"rung": rung},
        )
        for i, steps, rung in ((1, 400, None), (2, 200, 0.5), (3, 200, 0.5), (4, 100, 0.25))
    }  # fmt: skip
    sweep = make_sweep(tmp_path / "s", points, ["clip.max_norm"])
    c = compare([sweep])
    assert c.headline == (
        f"clip=1.0 won the successive halving: val loss {2.65 + 3 * math.exp(-5):.5g}; 3 others "
        "were left out after 25 and 50 % of the steps."
    )
    assert [e.mark for e in c.settings] == ["", "out at 50%", "out at 50%", "out at 25%"]
    there = 2.65 + 3 * math.exp(-2.5)
    assert any(
        f"At step 200, where the last were left out, clip=1.0 had a val loss of {there:.5g}" in s
        and f"clip=2.0, {there + 0.05:.5g}" in s
        for s in c.why
    )


def test_one_name_is_one_figure_in_table_answer_and_json(tmp_path):
    make_run(tmp_path / "a", max_norm=1.0)
    make_run(tmp_path / "b", max_norm=2.0, offset=0.1, steps=200)
    c = compare([tmp_path])
    titles = [column.title for column in c.columns]
    assert len(set(titles)) == len(titles)
    assert titles[0] == "val loss at 204,800 tokens"
    equal = compare([tmp_path / "a", make_run(tmp_path / "c", max_norm=3.0)])
    assert [column.title for column in equal.columns].count("val loss") == 1
    assert not any("final" in column.title for column in equal.columns)


def test_what_only_names_or_records_is_left_out_unless_nothing_else_differs(tmp_path):
    make_run(tmp_path / "a", train__log_every=1)
    make_run(tmp_path / "b", train__log_every=5)
    assert "train.log_every" in compare([tmp_path]).differing
    make_run(tmp_path / "c", max_norm=3.0)
    assert compare([tmp_path]).differing == ("clip.max_norm",)


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        (("0-seed_1+lr_0.1", "1-seed_2+lr_0.1"), "0-lr_0.1 x2"),
        (("0-lr_0.1+seed_1+max_norm_1", "1-lr_0.1+seed_2+max_norm_1"), "0-lr_0.1+max_norm_1 x2"),
        (("0-lr_0.1+seed_1", "1-lr_0.1+seed_2"), "0-lr_0.1 x2"),
        (("0-seed_1", "1-seed_2"), "0 x2"),
    ],
)
def test_the_name_of_folded_seeds(tmp_path, names, folded):
    for seed, name in enumerate(names, 1):
        make_run(tmp_path / name, seed=seed, steps=20)
    assert [e.name for e in compare([tmp_path]).settings] == [folded]


def test_a_fold_says_how_many_of_its_seeds_have_finished(tmp_path):
    make_run(tmp_path / "0-seed_1", seed=1)
    waits = make_run(tmp_path / "1-seed_2", seed=2, state="queued")
    (waits / "metrics.jsonl").write_text("")
    error = {"error": "ValueError('a\\nb')"}
    make_run(tmp_path / "2", max_norm=2.0, state="failed", status=error)
    found = {e.name: e for e in compare([tmp_path]).settings}
    assert found["0 x2"].note == "the figures are of 1 seed; 1 of 2 seeds finished, 1 queued"
    assert found["2"].note == "ValueError('a b')"


def test_seeds_of_one_trunk_speak_for_that_trunk_only(tmp_path):
    said = "The seeds go on from one trunk, so what they show holds for this trunk only."
    for name, trunks in (("one", ("t", "t", "t")), ("several", ("t1", "t2", "t3"))):
        for limit in (1.0, 2.0):
            for seed, trunk in enumerate(trunks):
                parent = parent_in(trunk)
                make_run(
                    tmp_path / name / f"{limit}-{seed}", max_norm=limit, seed=seed, own=seed,
                    offset=limit, facts={"parent": parent},
                )  # fmt: skip
        c = compare([tmp_path / name])
        assert (said in c.notes) == (name == "one"), c.notes
        assert (said in to_json(c)) == (name == "one")


def test_one_set_of_seeds_has_no_number_behind_its_name(tmp_path):
    for limit in (1.0, 2.0):
        for seed in (1, 2, 3):
            make_run(tmp_path / f"c{limit}-{seed}", max_norm=limit, seed=seed, offset=limit / 10)
    make_run(tmp_path / "again", max_norm=1.0, seed=1, offset=0.1)
    names = {s.label for s in compare([tmp_path]).settings}
    assert names == {"c1.0-1", "clip=1.0", "clip=2.0"}
