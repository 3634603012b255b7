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
from llmexp.compare.verdicts import _standing

from llmexp.compare.comparing import compare
from llmexp.compare.judging import EVALUATION, STEPS
from llmexp.compare.records import Column, Comparison, Entry, Record
from llmexp.compare.statistics import Difference
from llmexp.compare.table import show
from llmexp.config import ConfigError
from tests.compare.synthetic import make_run, make_sweep


def table_of(comparison: Comparison) -> str:
    out = io.StringIO()
    show(comparison, out, 300)
    return out.getvalue()


def grid(clip_effect: dict[float, float], accumulation_effect: dict[int, float] | None = None) -> dict:
    points = {}
    for a in (1, 2, 4):
        for c, offset in clip_effect.items():
            more = (accumulation_effect or {}).get(a, 0.0)
            points[f"a_{a},c_{c}"] = dict(micro=8 // a, accumulation=a, max_norm=c, offset=offset + more)
    return points


def test_a_grid_at_one_real_batch_says_what_is_best_and_what_makes_no_difference(tmp_path):
    swept = ["batch.gradient_accumulation_steps", "clip.max_norm"]
    make_sweep(tmp_path / "s", grid({0.5: 0.0, 1.0: 0.03}), swept)
    c = compare([tmp_path / "s"])
    assert c.batch == "iso-batch"
    assert set(c.factors) == set(swept)
    assert "batch.micro_batch_size" in c.differing
    assert not any(key.startswith(("tracker", "name")) for key in c.differing)
    assert all(e.values["clip.max_norm"] == 0.5 for e in c.entries[:3])
    text = " ".join(c.sentences)
    assert c.sentences[0].count("clip.max_norm=0.5") == 2  # of the best and of the next
    assert "indistinguishable" in c.sentences[1]
    assert "clip.max_norm: 0.5 is better than 1.0 by 0.03 ±" in text
    assert "gradient_accumulation_steps makes no difference that can be told (iso-batch, as it should)" in text


def test_a_lead_is_real_with_its_size_and_a_tie_is_called_one(tmp_path):
    make_run(tmp_path / "a", own=1)
    make_run(tmp_path / "b", own=2, offset=0.01, max_norm=2.0)
    make_run(tmp_path / "c", own=3, max_norm=3.0, offset=5e-5)  # less than a difference that counts
    real = compare([tmp_path / "a", tmp_path / "b"])
    assert [e.name for e in real.entries] == ["a", "b"]
    assert real.sentences[1].startswith("The difference is real: step by step on the same batches")
    mean = float(real.sentences[1].split("lower by ")[1].split()[0])
    # 200 paired steps, two wobbles of 0.002 with AR(1) r = 0.5: standard error 0.002 sqrt(2) sqrt(3/200) = 3.5e-4,
    # shown with two digits.
    assert mean == pytest.approx(0.01, abs=4 * 3.5e-4 + 5e-4)
    tie = compare([tmp_path / "a", tmp_path / "c"])
    assert tie.sentences[1].startswith("Within noise, indistinguishable")


def test_other_batches_are_not_paired_and_judged_by_the_noise_of_the_evaluation(tmp_path):
    make_run(tmp_path / "a", micro=8)
    level = 3 * (math.exp(-400 / 80) - math.exp(-200 / 80))  # so that after half the steps the val loss is the same
    make_run(tmp_path / "b", micro=16, steps=200, offset=level + 0.002)
    make_run(tmp_path / "c", micro=16, steps=200, offset=level + 0.5, max_norm=2.0)
    c = compare([tmp_path / "a", tmp_path / "b"])
    assert c.batch == "scaling"
    assert c.align_at == 400 * 8 * 128
    assert c.factors == ("batch.real_batch_size",)  # of itself; the micro-batch and the steps follow
    assert "Within noise, indistinguishable: the difference in val/loss" in c.sentences[1]
    assert "noise of the evaluation" in c.sentences[1]
    c = compare([tmp_path / "a", tmp_path / "c"])
    assert c.sentences[1].startswith("The difference is real")


def test_seeds_are_folded_and_their_spread_decides(tmp_path):
    spread = {1: -0.01, 2: 0.0, 3: 0.012}
    for seed, own in spread.items():
        make_run(tmp_path / f"near-seed_{seed}", seed=seed, offset=own)
        make_run(tmp_path / f"same-seed_{seed}", seed=seed, offset=-2 * own + 0.002, max_norm=2.0)
        make_run(tmp_path / f"far-seed_{seed}", seed=seed, offset=own + 0.1, max_norm=3.0)
    c = compare([tmp_path])
    assert sorted((e.name, len(e.runs)) for e in c.entries) == [("far x3", 3), ("near x3", 3), ("same x3", 3)]
    assert "train.seed" not in c.differing
    near = next(e for e in c.entries if e.name == "near x3")
    ends = [2.6 + 3 * math.exp(-5) + own for own in spread.values()]
    half = 4.302653 * np.std(ends, ddof=1) / math.sqrt(3)
    assert near.figures["val/loss"] == pytest.approx(np.mean(ends), rel=1e-12)
    assert near.intervals["val/loss"] == pytest.approx((np.mean(ends) - half, np.mean(ends) + half), rel=1e-6)
    assert c.sentences[1].startswith("Within noise, indistinguishable")
    assert "paired by 3 seeds" in c.sentences[1]
    assert "Clearly behind it: clip.max_norm=3.0" in c.sentences[2]
    assert "±0 " not in table_of(c)


def test_repeats_of_a_seed_are_no_further_seeds(tmp_path):
    make_run(tmp_path / "a", own=1)
    make_run(tmp_path / "b", own=2)
    assert [len(e.runs) for e in compare([tmp_path]).entries] == [1, 1]


def test_losses_are_read_where_all_unfailed_runs_have_come(tmp_path):
    make_run(tmp_path / "long", steps=400)
    make_run(tmp_path / "short", steps=250, max_norm=2.0, state="preempted")
    make_run(tmp_path / "broken", steps=120, max_norm=3.0, state="failed", offset=-1.0)
    c = compare([tmp_path])
    assert c.align_at == 250 * 8 * 128
    found = {e.name: e for e in c.entries}
    assert found["long"].figures["val/loss"] == pytest.approx(
        2.6 + 3 * math.exp(-200 / 80)
    )  # evaluated at 100, 200, ..
    assert found["long"].figures["final val/loss"] == pytest.approx(2.6 + 3 * math.exp(-400 / 80))
    assert "val/loss" not in found["broken"].figures
    assert c.entries[-1].name == "broken"  # though its loss is the lowest
    text = " ".join(c.sentences)
    assert "256,000 tokens" in text
    assert "short ends there" in text
    assert "1 of 3 runs is failed" in text
    by_steps = compare([tmp_path], align="steps")
    assert by_steps.align_at == 250
    assert compare([tmp_path], align="time").align_at == pytest.approx(125.0)  # of half a second each


def test_a_run_that_has_just_begun_leaves_only_train_losses_to_compare(tmp_path):
    make_run(tmp_path / "a", steps=400)
    make_run(tmp_path / "b", steps=300, max_norm=2.0, offset=0.1)
    make_run(tmp_path / "c", steps=30, max_norm=3.0, offset=0.2, state="preempted")
    c = compare([tmp_path])
    assert c.metric == "train/loss"  # never val losses of different ages
    assert [e.name for e in c.entries] == ["a", "b", "c"]
    a = c.entries[0].runs[0].columns["train/loss"]
    assert c.entries[0].figures["train/loss"] == pytest.approx(float(np.mean(a[20:30])), rel=1e-12)


def test_losses_of_different_tokenizers_are_not_ranked_bits_per_byte_are(tmp_path):
    make_run(tmp_path / "a")
    make_run(tmp_path / "b", tokenizer="gpt2", offset=0.2)
    c = compare([tmp_path])
    assert c.metric == "val/bits_per_byte"
    assert "tokenizers differ" in " ".join(c.sentences)
    assert all("losses per token compare with no other" in e.note for e in c.entries)


def test_sorting_by_a_rate_puts_the_highest_first(tmp_path):
    for name, rate in (("slow", 10.0), ("fast", 30.0)):
        path = make_run(tmp_path / name, max_norm=rate)
        status = json.loads((path / "status.json").read_text())
        status["summary"]["mean tokens_per_sec"] = rate
        (path / "status.json").write_text(json.dumps(status))
    c = compare([tmp_path], sort="tokens_per_sec")
    assert [e.name for e in c.entries] == ["fast", "slow"]
    assert "highest tokens/s" in c.sentences[0]


@pytest.mark.parametrize(("key", "value", "hint"), [("sort", "val/los", "val/loss"), ("align", "days", "tokens")])
def test_unknown_words_are_refused(tmp_path, key, value, hint):
    make_run(tmp_path / "a")
    with pytest.raises(ConfigError, match=hint):
        compare([tmp_path], **{key: value})


def test_what_only_names_or_records_is_left_out_unless_nothing_else_differs(tmp_path):
    make_run(tmp_path / "a", train__log_every=1)
    make_run(tmp_path / "b", train__log_every=5)
    assert "train.log_every" in compare([tmp_path]).differing
    make_run(tmp_path / "c", max_norm=3.0)
    assert compare([tmp_path]).differing == ("clip.max_norm",)


def test_copies_of_one_seed_are_no_evidence(tmp_path):
    """No step is clipped, so three limits give the same run three times; only the data's order makes a difference."""
    points = {
        f"shuffle_{shuffle},c_{limit}": dict(
            max_norm=limit, offset=0.0 if shuffle else 0.015, wobble=0.0, data__shuffle=shuffle
        )
        for shuffle in (True, False)
        for limit in (1000.0, 2000.0, 3000.0)
    }
    c = compare([make_sweep(tmp_path / "s", points, ["data.shuffle", "clip.max_norm"])])
    effects = {s.split()[0].strip(":"): s for s in c.sentences if s.startswith(("data.shuffle ", "data.shuffle:"))}
    said = effects["data.shuffle"]
    assert "is better than" not in said
    # Scatter of 0.05 about the trend over 1024 tokens a step, an evaluation of 256 * 128 tokens: two runs at
    # 1.96 * 0.05 * sqrt(1024 / 32768) * sqrt(2) = 0.0245, estimated from 200 values to about 10 %.
    assert float(said.split(" ± ")[1].split()[0]) == pytest.approx(0.0245, rel=0.3)
    assert "one seed" in said
    assert "clip.max_norm makes no difference: train/loss is the same, of one seed each." in c.sentences


@pytest.mark.parametrize("copies", [1, 4])
def test_more_cells_with_the_same_seeds_do_not_make_an_effect_clearer(tmp_path, copies):
    """Two seeds and their copies under other names: the interval is that of the two seeds alone."""
    points = {
        f"a_{a},c_{limit},s_{seed}": dict(
            max_norm=float(limit), micro=8 // a, accumulation=a, seed=seed, offset=(a - 1) * 0.01 * seed
        )
        for a in (1, 2)
        for limit in range(1, 2 + copies)
        for seed in (1, 2)
    }
    c = compare([make_sweep(tmp_path / "s", points, ["batch.gradient_accumulation_steps", "clip.max_norm"])])
    (said,) = [s for s in c.sentences if s.startswith("batch.gradient_accumulation_steps makes")]
    # Differences 0.01 and 0.02: mean 0.015, half width t(0.975, 1) * 0.005 = 12.706 * 0.005.
    assert "makes no difference that can be told" in said
    assert "0.015 ± 0.064 in val/loss" in said
    assert "one seed" not in said


@settings(max_examples=300)
@given(
    kinds=st.lists(
        st.tuples(
            st.sampled_from([STEPS, EVALUATION, "paired by 3 seeds", None]),
            st.floats(1e-3, 0.2),
            st.floats(0, 0.2),
        ),
        min_size=2,
        max_size=7,
    )
)  # fmt: skip
def test_what_is_clearly_behind_ranks_behind_all_that_is_open(kinds):
    def entry(name: str, loss: float) -> Entry:
        record = Record(Path(name), name, None, "finished", {}, {}, {}, {"step": np.ones(1)})
        return Entry(name, (record,), {}, {"val/loss": loss}, {}, "finished")

    kinds = sorted(kinds, key=lambda k: k[1])
    best, *others = [entry(f"run{i}", 2 + (kinds[i - 1][1] if i else 0)) for i in range(len(kinds) + 1)]
    judged = [None if how is None else (Difference(gap, half, how), "val/loss") for how, gap, half in kinds]
    c = Comparison((best, *others), (), (), "val/loss", "tokens", None, "same", (), ())
    text = " ".join(_standing(c, Column("val/loss", "val loss", "lower", 5), best, others, judged, 1.0))
    real = [j is not None and j[0].real for j in judged]
    named = {part.split(":")[0]: re.findall(r"run(\d)", part) for part in re.split(r"(?<=\D)\. ", text)}
    clear = [int(i) for i in named.get("Clearly behind it", [])]
    assert all(real[i - 1] for i in clear)
    rest = [i + 1 for i, r in enumerate(real) if not r]
    assert not clear or not rest or min(clear) > max(rest)
    if all(real):
        assert "clearly ahead of all" in text
    if not any(real):
        assert "Clearly" not in text


def test_runs_on_other_batches_are_named_apart_from_those_within_noise(tmp_path):
    """Small gaps that the same batches show, and a larger one on other batches that one seed does not."""
    level = 3 * (math.exp(-400 / 80) - math.exp(-200 / 80))
    make_run(tmp_path / "a", own=1)
    make_run(tmp_path / "b", own=2, max_norm=2.0, offset=0.003)
    make_run(tmp_path / "c", micro=16, steps=200, offset=level + 0.01)
    make_run(tmp_path / "d", max_norm=3.0, offset=0.2)
    c = compare([tmp_path])
    assert [e.name for e in c.entries] == ["a", "b", "c", "d"]
    text = c.sentences[-1] if "behind" in c.sentences[-1] else next(s for s in c.sentences if "Clearly behind" in s)
    assert re.search(
        r"on other batches, it cannot be told whether it is ahead of batch.real_batch_size=16 with",
        text,
    )
    assert re.search(r"Behind it by little, yet by more than the noise of that pair: [^:]*max_norm=2.0 \(0.00", text)
    assert "max_norm=3.0" in text.split("Clearly behind it: ")[1]


@pytest.mark.parametrize(("steps", "offset"), [(15, 5e-5), (15, 0.0), (400, 5e-5), (400, 0.0)])
def test_a_lead_below_rounding_is_none_however_little_else_is_known(tmp_path, steps, offset):
    """15 steps are too few to be judged step by step."""
    make_run(tmp_path / "a", steps=steps, wobble=0.0, val_every=5)
    make_run(tmp_path / "b", steps=steps, wobble=0.0, val_every=5, max_norm=2.0, offset=offset)
    c = compare([tmp_path])
    assert c.sentences[1].startswith("Indistinguishable: ")
    assert "three seeds" not in " ".join(c.sentences)
    assert not re.search(r"\b0 ± 0\b", " ".join(c.sentences))
    assert ("below 0.0001" in c.sentences[1]) == bool(offset)


def test_the_answer_of_successive_halving(tmp_path):
    points = {
        f"c_{i}": dict(
            max_norm=float(i),
            offset=0.05 * i,
            steps=steps,
            state="finished" if steps == 400 else "preempted",
            train__max_steps=400,
        )
        for i, steps in ((1, 400), (2, 200), (3, 200), (4, 100))
    }
    sweep = make_sweep(tmp_path / "s", points, ["clip.max_norm"])
    ledger = json.loads((sweep / "sweep.json").read_text())
    for point, rung in zip(ledger["points"], (None, 0.5, 0.5, 0.25), strict=True):
        point["rung"] = rung
    (sweep / "sweep.json").write_text(json.dumps(ledger))
    c = compare([sweep])
    assert (
        c.sentences[0]
        == f"clip.max_norm=1.0 won the successive halving: its val loss is {2.65 + 3 * math.exp(-5):.5g}."
    )
    text = " ".join(c.sentences)
    assert (
        "left out 3 of 4 settings: 1 after 25 % of its steps (clip.max_norm=4.0), 2 after 50 % of their steps" in text
    )
    there = 2.65 + 3 * math.exp(-2.5)
    assert f"At step 200, where the last were left out, clip.max_norm=1.0 had a val loss of {there:.5g}" in text
    assert f"clip.max_norm=2.0, {there + 0.05:.5g}" in text
    assert "The difference is real: step by step on the same batches its train loss is lower by 0.05" in text
    assert "preempted" not in text  # they were left out, and that is said


def test_a_setting_ranks_behind_only_where_none_of_its_runs_counts(tmp_path):
    for seed in (1, 2, 3):
        make_run(tmp_path / f"a{seed}", seed=seed, state="failed" if seed == 3 else "finished")
        make_run(tmp_path / f"b{seed}", seed=seed, max_norm=2.0, offset=0.1)
    assert "1 of 6 runs is failed: a3." in compare([tmp_path]).sentences
    make_run(tmp_path / "c", max_norm=3.0, state="failed")
    make_run(tmp_path / "d", max_norm=4.0, state="running")
    said = compare([tmp_path]).sentences
    assert "2 of 8 runs are failed: a3, c." in said  # not of a3
    assert "1 of 8 runs is cut, and ranked behind the others: d." in said


def test_one_value_is_written_one_way(tmp_path):
    make_run(tmp_path / "a", max_norm=1.0)
    make_run(tmp_path / "b", max_norm=2.0, offset=0.1)
    c = compare([tmp_path])
    cells = {cell.strip() for line in table_of(c).splitlines() for cell in re.split(r" {2,}", line)}
    assert {"1.0", "2.0"} <= cells
    assert "clip.max_norm=1.0" in c.sentences[0]


def test_an_effect_that_nothing_tells_is_said_to_be_open(tmp_path):
    """15 steps and no fact of the evaluation: neither steps nor its noise are known."""
    points = {
        f"a_{a},c_{limit}": dict(max_norm=limit, micro=8, accumulation=a, offset=0.1 * a, steps=15, val_every=5)
        for a in (1, 2)
        for limit in (1.0, 2.0)
    }
    sweep = make_sweep(tmp_path / "s", points, ["batch.gradient_accumulation_steps", "clip.max_norm"])
    text = " ".join(compare([sweep]).sentences)
    for key in ("batch.gradient_accumulation_steps", "clip.max_norm"):
        assert f"{key}: whether it makes a difference cannot be told from one seed each." in text
    assert "is better than" not in text


def test_steps_that_go_against_the_order_are_not_called_noise(tmp_path):
    """The val loss has c last, its train loss is the lowest."""
    make_run(tmp_path / "a", own=1)
    make_run(tmp_path / "b", own=2, max_norm=2.0, offset=0.05)
    odd = make_run(tmp_path / "c", own=3, max_norm=3.0, offset=-0.05)
    rows = [json.loads(line) for line in (odd / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        if "val/loss" in row:
            row["val/loss"] += 0.2
    (odd / "metrics.jsonl").write_text("".join(json.dumps(r, separators=(",", ":")) + "\n" for r in rows))
    c = compare([tmp_path])
    assert [e.name for e in c.entries] == ["a", "b", "c"]
    (said,) = [s for s in c.sentences if "Not settled" in s]
    assert "against the order: clip.max_norm=3.0 (0.05" in said
    assert "Within noise" not in said


def test_an_effect_is_over_the_seeds_that_both_sides_have(tmp_path):
    """Seeds lie 1 apart, the limits 0.03; the larger limit lacks seeds, other ones in each cell."""
    points = {
        f"a_{a},c_{limit},s_{seed}": dict(
            max_norm=limit, micro=8 // a, accumulation=a, seed=seed, offset=seed + 0.03 * (limit - 1)
        )
        for a in (1, 2)
        for limit in (1.0, 2.0)
        for seed in (1, 2, 3)
        if limit == 1.0 or seed <= 3 - a
    }
    c = compare([make_sweep(tmp_path / "s", points, ["batch.gradient_accumulation_steps", "clip.max_norm"])])
    (said,) = [s for s in c.sentences if s.startswith("clip.max_norm")]
    assert ", 0.03 ± " in said
    (seeds,) = [s for s in c.sentences if "same seeds" in s]
    assert "clip.max_norm=2.0 lacks 3" in seeds
    assert "clip.max_norm=2.0 lacks 2, 3" in seeds
    whole = compare([tmp_path / "s" / "*c_1.0*"])
    assert not any("same seeds" in s for s in whole.sentences)


def test_runs_without_an_evaluation_at_the_common_position_are_named(tmp_path):
    make_run(tmp_path / "a")
    make_run(tmp_path / "b", max_norm=2.0, steps=250, offset=0.1)
    make_run(tmp_path / "late", max_norm=3.0, val_every=300)
    text = " ".join(compare([tmp_path]).sentences)
    assert "1 of 3 runs has no evaluation up to there: late." in text
    make_run(tmp_path / "begun", max_norm=4.0, steps=30, state="preempted")
    c = compare([tmp_path])
    assert c.metric == "train/loss"
    assert "4 of 4 runs have no evaluation up to there: " in " ".join(c.sentences)


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
    assert [e.name for e in compare([tmp_path]).entries] == [folded]


def test_a_fold_says_how_many_of_its_seeds_have_finished(tmp_path):
    make_run(tmp_path / "0-seed_1", seed=1)
    waits = make_run(tmp_path / "1-seed_2", seed=2, state="queued")
    (waits / "metrics.jsonl").write_text("")
    make_run(tmp_path / "2", max_norm=2.0, state="failed")
    status = json.loads((tmp_path / "2" / "status.json").read_text())
    (tmp_path / "2" / "status.json").write_text(json.dumps(status | {"error": "ValueError('a\\nb')"}))
    found = {e.name: e for e in compare([tmp_path]).entries}
    assert found["0 x2"].note == "the figures are of 1 seed; 1 of 2 seeds finished, 1 queued"
    assert found["2"].note == "ValueError('a b')"
