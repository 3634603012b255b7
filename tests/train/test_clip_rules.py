"""Rules of clipping that follow the run: the same however a window is cut, and after a resume."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from llmexp.__main__ import run as command
from tests.conftest import Result, train
from tests.tools import cut_after, weights
from tests.train.resumed import goes_on
from tests.train.test_invariance import SETTINGS

# a rate at which norms do not fall all the way, or none would stand out
ZSCORE = ["clip=zscore", "clip.z=0.5", "clip.warmup_steps=2", "optimizer.lr=1e-4"]
RULES = {
    "zscore": [*ZSCORE, "clip.decay=0.8"],
    "quantile": ["clip=quantile", "clip.quantile=0.4", "clip.window=3", "clip.warmup_steps=2"],
}
OTHERS = {  # but for quantile those that test_clip_reference.py cuts in every way
    "quantile": [*RULES["quantile"], "optimizer.lr=1e-4"],
    "adaptive": ["clip=adaptive", "clip.ratio=0.02"],
    "value": ["clip=value", "clip.max_value=0.05"],
    "per_group": ["clip=per_group", "clip.limits=[{match: '*.attention.*', max_norm: 0.3}]"],
    "update": ["clip=update", "clip.threshold=0.7"],
    "heads": [*ZSCORE, "clip.qk_limit=0.01"],
}
GIVEN = [s for s in SETTINGS if not s.startswith(("clip.", "train.max_epochs", "train.tail"))]
GIVEN += ["train.max_steps=9"]
HALF = ["precision=fp16", "precision.init_scale=1e5", "precision.growth_interval=3"]
HALF += ["checkpoint.every=1"]
DOUBLE = ["precision=fp64", "checkpoint.every=4"]
LAYOUTS = {
    "16x1": ["batch.micro_batch_size=16"],
    "1x16": ["batch.micro_batch_size=1"],
    "fsdp": ["batch.micro_batch_size=4", "parallelism=fsdp", "parallelism.nproc_per_node=2"],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tokens) -> Callable[[str, str], Result]:
    folder = tmp_path_factory.mktemp("rules")

    @functools.cache
    def run(rule: str, name: str) -> Result:
        given = [*GIVEN, f"data.train_files=[{tokens}]", *RULES[rule], *LAYOUTS[name], *DOUBLE]
        return train(folder, f"{rule}-{name}", *given)

    return run


# Both follow the norm of all, which every layout finds alike.
@pytest.mark.parametrize(("rule", "name"), [("zscore", "fsdp"), ("quantile", "1x16")])
def test_every_cut_clips_alike(runs, rule, name):
    whole, cut = runs(rule, "16x1"), runs(rule, name)
    rows = cut.rows()
    for key in ("train/loss", "grad_norm", "grad_norm_post_clip"):
        want = [row[key] for row in whole.rows()]
        np.testing.assert_allclose([row[key] for row in rows], want, rtol=1e-9)
    assert [row["clip_fraction"] for row in rows] == [row["clip_fraction"] for row in whole.rows()]
    final, start, wanted = weights(cut, 9), weights(cut, 0), weights(whole, 9)
    error, moved = (
        sum(float((w[key] - wanted[key]).square().sum()) for key in wanted) for w in (final, start)
    )
    assert (error / moved) ** 0.5 < 1e-9
    assert sum(row["clip_fraction"] for row in whole.rows()) > 0


def test_the_limit_is_what_the_rule_makes_of_the_norms(runs):
    rows = runs("quantile", "16x1").rows()
    norms, after = ([row[key] for row in rows] for key in ("grad_norm", "grad_norm_post_clip"))
    for i, (norm, clipped) in enumerate(zip(norms, after, strict=True)):
        limit = np.quantile(norms[max(0, i - 3) : i], 0.4) if i >= 2 else np.inf
        assert clipped == pytest.approx(norm * min(1, limit / (norm + 1e-6)), rel=1e-12)
    rows = runs("zscore", "16x1").rows()
    mean = var = None
    for i, row in enumerate(rows):
        norm, limit = row["grad_norm"], np.inf
        if i == 2:
            before = [r["grad_norm_post_clip"] for r in rows[:2]]
            mean, var = np.mean(before), np.var(before)
        if mean is not None:
            std = np.sqrt(var) + 1e-6
            z = (norm - mean) / std
            limit = mean + 0.5 * std / (z / 0.5) if z > 0.5 else np.inf
        clipped = row["grad_norm_post_clip"]
        assert clipped == pytest.approx(norm * min(1, limit / (norm + 1e-6)), rel=1e-9)
        if mean is not None:
            mean = 0.8 * mean + 0.2 * clipped
            var = 0.8 * var + 0.2 * (clipped - mean) ** 2


@pytest.fixture(scope="module")
def halved(tmp_path_factory, tokens) -> Callable[[str], Result]:
    """Runs in fp16, whose scale grows until a window overflows: its update is skipped."""
    folder = tmp_path_factory.mktemp("halved")

    @functools.cache
    def run(rule: str) -> Result:
        given = [*GIVEN, f"data.train_files=[{tokens}]", *OTHERS[rule], *LAYOUTS["16x1"], *HALF]
        return train(folder, rule, *given)

    return run


@pytest.mark.parametrize("rule", OTHERS)
def test_a_skipped_update_is_none_and_a_killed_run_ends_the_same(halved, rule, tmp_path):
    """Bit for bit, with what it has counted: a rule knows applied updates alone."""
    whole = halved(rule)
    skipped = [row["step"] for row in whole.rows() if row["skipped"]]
    assert skipped
    assert skipped[0] > 2  # the rule has seen something
    for step in skipped:
        for kind in ("model", "optimizer"):
            old, new = (weights(whole, at, kind) for at in (step - 1, step))
            assert all(torch.equal(new[name], old[name]) for name in old)
        assert counted(whole, step) == counted(whole, step - 1)
    resumed = goes_on(Result(0, "", "", cut_after(whole, tmp_path, skipped[0])), whole)
    assert resumed.json("status.json")["clip"] == whole.json("status.json")["clip"]


def counted(run: Result, step: int) -> Any:
    """What a checkpoint holds of rules and norms, but for the counts at the last row."""

    def plain(state: Any) -> Any:
        inner = state.items() if isinstance(state, dict) else ()
        return {k: plain(v) for k, v in inner if k != "taken"} or state

    state = torch.load(run.checkpoint(step) / "state.pt", weights_only=True)
    return {key: plain(state[key]) for key in ("limit", "clip") if key in state}


def applied(run: Result) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows of updates that were made, and what the end says of clipping."""
    return [r for r in run.rows() if not r["skipped"]], run.json("status.json")["clip"]


@pytest.mark.parametrize(
    ("rule", "units"), [("adaptive", "units"), ("update", "tensors"), ("heads", "heads")]
)
def test_the_end_counts_units_as_the_rows_do(halved, rule, units):
    rows, clip = applied(halved(rule))
    found = clip["measures"][units]
    assert found["share"] == pytest.approx(np.mean([r[f"clipped_{units}"] for r in rows]))
    (own,) = [row for row in found["table"] if row["limit"] == found["limit"]]
    assert own["share"] == found["share"]
    if units != "heads":
        assert own["coefficient"] == pytest.approx(np.mean([r["clip_coefficient"] for r in rows]))
    tried = [row["share"] for row in found["table"]]
    assert tried == sorted(tried, reverse=True)
    assert any(0 < share < 1 for share in tried)
    text = f"{100 * found['share']:.3g} % of {units} clipped at"
    assert text in " ".join(halved(rule).out.split())


def test_the_end_counts_entries_groups_and_norms_as_the_rows_do(halved):
    rows, clip = applied(halved("value"))
    table = clip["measures"]["grad_entry_max"]
    assert table["share"] == np.mean([row["grad_entry_max"] > 0.05 for row in rows]) > 0
    assert table["share"] == clip["share"]
    (own,) = [row for row in table["table"] if row["limit"] == 0.05]
    assert own == {"limit": 0.05, "share": table["share"]}
    rows, clip = applied(halved("per_group"))
    norms = [row["grad_norm/*.attention.*"] for row in rows]
    table = clip["measures"]["grad_norm/*.attention.*"]
    assert table["share"] == np.mean([norm > 0.3 for norm in norms]) > 0
    for row, norm in zip(rows, norms, strict=True):
        square = row["grad_norm"] ** 2 - norm**2 + min(norm, 0.3) ** 2
        assert row["grad_norm_post_clip"] == pytest.approx(square**0.5, rel=1e-5)  # 1e-6 in it
    rows, clip = applied(halved("heads"))
    assert clip["own"]["share"] == np.mean([row["clip_fraction"] for row in rows])
    means = np.mean([row["clip_coefficient"] for row in rows])
    assert clip["own"]["coefficient"] == pytest.approx(means)
    assert "moving" in halved("heads").out
    limited = [row for row in rows if row["grad_norm_post_clip"] < row["grad_norm"]]
    assert limited
    for row in limited:
        wanted = row["grad_norm"] * min(1, row["clip_limit"] / (row["grad_norm"] + 1e-6))
        assert row["grad_norm_post_clip"] == pytest.approx(wanted, rel=1e-6)


def test_a_rule_that_never_gives_a_limit_is_named_before_the_start(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for steps, said in (("25", True), ("26", False)):
        assert command(["plan", "clip=zscore", "model=gpt_tiny", f"train.max_steps={steps}"]) == 0
        text = "clip.warmup_steps=25: the run ends after 25 updates, so clip=zscore never gives"
        assert (text in " ".join("".join(capsys.readouterr()).split())) == said
