"""`optimizer.lr_rule`: rates that follow the real batch, written back so that nothing scales them
twice."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from llmexp.compare.folding import factors
from llmexp.compare.records import Record, Setting
from llmexp.run.batch import solve_rates
from llmexp.settings.values import ConfigError
from tests.conftest import TINY, llmexp, train

SHORT = ["data=synthetic", "data.n_tokens=4000", "schedule=constant", "schedule.warmup_ratio=0",
"train.log_every=1",
         "train.eval_every=null", "checkpoint.every=null"]  # fmt: skip

sizes = st.integers(1, 100_000)


@given(st.sampled_from(["linear", "sqrt"]), sizes, sizes, st.floats(1e-8, 10))
def test_a_solved_section_is_solved_again_into_itself(rule, reference, real, lr):
    given_section = {"_target_": "x", "lr": lr, "adjust_lr": "original", "adamw_lr": None,
    "lr_rule": rule,
                     "reference_batch": reference}  # fmt: skip
    solved, told = solve_rates(given_section, real)
    ratio = real / reference
    assert solved["lr"] == pytest.approx(
        lr * (ratio if rule == "linear" else math.sqrt(ratio)), rel=1e-14
    )
    assert {k: v for k, v in solved.items() if k not in ("lr", "reference_batch")} == {
        k: v for k, v in given_section.items() if k not in ("lr", "reference_batch")
    }
    assert solve_rates(solved, real)[0] == solved
    assert told is not None


@pytest.mark.parametrize(
    ("section", "says"),
    [
        (
            {"lr": 1, "lr_rule": "sqrt"},
            "optimizer.reference_batch=null: optimizer.lr_rule=sqrt needs the batch",
        ),
        (
            {"rate": 1, "lr_rule": "linear", "reference_batch": 8},
            "optimizer.lr_rule=linear: there is no rate `lr`",
        ),
    ],
)
def test_what_a_rule_cannot_use_is_refused(section, says):
    with pytest.raises(ConfigError, match=says):
        solve_rates(section, 8)


@pytest.mark.parametrize(
    ("optimizer", "rule", "rate"),
    [("adamw", "sqrt", 0.02), ("sgd", "linear", 0.04), ("muon", "linear", 0.04)],
)
def test_the_rate_of_a_run_is_that_of_its_batch(tmp_path, optimizer, rule, rate):
    scaled = [
        f"optimizer={optimizer}",
        "optimizer.lr=0.01",
        f"optimizer.lr_rule={rule}",
        "optimizer.reference_batch=2",
    ]
    whole = train(
        tmp_path, "whole", *SHORT, *scaled, "batch.real_batch_size=8", "train.max_steps=4"
    )
    assert [row["lr"] for row in whole.rows()] == [rate] * 4
    assert f"= {rate} (lr_rule {rule})" in " ".join(whole.out.split())
    assert whole.json("run.json")["rates"].endswith(f"= {rate} (lr_rule {rule})")
    written = yaml.safe_load((whole.folder / "config.yaml").read_text())["optimizer"]
    assert (written["lr"], written["lr_rule"], written["reference_batch"]) == (rate, rule, 8)
    plain = [f"optimizer={optimizer}", f"optimizer.lr={rate}", "batch.real_batch_size=8"]
    same = train(tmp_path, "plain", *SHORT, *plain, "train.max_steps=4")
    assert [r["train/loss"] for r in same.rows()] == [r["train/loss"] for r in whole.rows()]
    if optimizer == "adamw":  # the others are solved by the same lines
        stopped = [
            *SHORT,
            *scaled,
            "batch.real_batch_size=8",
            "train.max_steps=4",
            "train.stop_step=2",
        ]
        cut = llmexp("train", *TINY, *stopped, "hydra.run.dir=cut", cwd=tmp_path)
        assert cut.code == 75
        assert llmexp("resume", str(cut.folder), "batch.micro_batch_size=2", cwd=tmp_path).code == 0
        assert [row["lr"] for row in cut.rows()] == [rate] * 4


@pytest.mark.parametrize(
    ("rules", "swept"), [(["linear"], []), (["none", "linear"], ["optimizer.lr_rule"])]
)
def test_a_rate_that_follows_the_batch_is_no_setting_of_its_own(rules, swept):
    swept = ["batch.real_batch_size", *swept]
    entries = []
    for rule, batch in itertools.product(rules, (8, 16)):
        scaled, _ = solve_rates(
            {"lr": 0.1, "lr_rule": rule, "reference_batch": 8 if rule != "none" else None}, batch
        )
        config = {
            "batch.real_batch_size": batch,
            **{f"optimizer.{k}": v for k, v in scaled.items()},
        }
        record = Record(
            Path("run"), "run", None, "finished", config, {}, {}, {}, swept=tuple(swept)
        )
        entries.append(Setting("run", (record,), config, {}, {}, "finished"))
    differing = sorted(
        {k for e in entries for k in e.values if len({f.values[k] for f in entries}) > 1}
    )
    assert "optimizer.lr" in differing
    assert sorted(factors(entries, differing)) == sorted(swept)
