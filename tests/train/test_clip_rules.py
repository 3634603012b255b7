"""Rules of clipping in fp16, whose scale grows until a window overflows: a skipped update is none,
a killed run ends the same, and the end counts what the rows do. test_clip_reference.py has their
formulas."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from llmexp.__main__ import run as command
from tests.conftest import Result, train
from tests.tools import weights
from tests.train.resumed import goes_on_from
from tests.train.test_clip_reference import GIVEN, NINE

OTHERS = {
    "quantile": ["clip=quantile", "clip.quantile=0.4", "clip.window=3", *NINE[1:]],
    "adaptive": ["clip=adaptive", "clip.ratio=0.02"],
    "value": ["clip=value", "clip.max_value=0.05"],
    "per_group": ["clip=per_group", "clip.limits=[{match: '*.attention.*', max_norm: 0.3}]"],
    "update": ["clip=update", "clip.threshold=0.7"],
    "heads": ["clip=zscore", "clip.z=0.5", *NINE[1:], "clip.qk_limit=0.01"],
}
HALF = [
    *NINE[:1], "precision=fp16", "precision.init_scale=1e5", "precision.growth_interval=3",
    "checkpoint.every=1", "batch.micro_batch_size=16",
]  # fmt: skip


@pytest.fixture(scope="module")
def halved(tmp_path_factory, tokens) -> Callable[[str], Result]:
    folder = tmp_path_factory.mktemp("halved")

    @functools.cache
    def run(rule: str) -> Result:
        return train(folder, rule, *GIVEN, f"data.train_files=[{tokens}]", *HALF, *OTHERS[rule])

    return run


def counted(run: Result, step: int) -> Any:
    """What a checkpoint holds of rules and norms, but for the counts at the last row."""

    def plain(state: Any) -> Any:
        inner = state.items() if isinstance(state, dict) else ()
        return {k: plain(v) for k, v in inner if k != "taken"} or state

    state = torch.load(run.checkpoint(step) / "state.pt", weights_only=True)
    return {key: plain(state[key]) for key in ("limit", "clip") if key in state}


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
    resumed = goes_on_from(skipped[0], whole, tmp_path)
    assert resumed.json("status.json")["clip"] == whole.json("status.json")["clip"]


ATTENTION = "grad_norm/*.attention.*"


@pytest.mark.parametrize(
    ("rule", "measure", "clipped"),
    [
        ("adaptive", "units", lambda row: row["clipped_units"]),
        ("update", "tensors", lambda row: row["clipped_tensors"]),
        ("heads", "heads", lambda row: row["clipped_heads"]),
        ("value", "grad_entry_max", lambda row: row["grad_entry_max"] > 0.05),
        ("per_group", ATTENTION, lambda row: row[ATTENTION] > 0.3),
    ],
)
def test_the_end_counts_as_the_rows_of_applied_updates_do(halved, rule, measure, clipped):
    rows = [row for row in halved(rule).rows() if not row["skipped"]]
    clip = halved(rule).json("status.json")["clip"]
    found = clip["measures"][measure]
    assert found["share"] == pytest.approx(np.mean([clipped(row) for row in rows]))
    assert found["share"] > 0
    (own,) = [row for row in found["table"] if row["limit"] == found["limit"]]
    assert own["share"] == found["share"]
    shares = [row["share"] for row in found["table"]]
    assert shares == sorted(shares, reverse=True)
    assert any(0 < share < 1 for share in shares)
    if rule in ("adaptive", "update", "heads"):
        text = f"{100 * found['share']:.3g} % of {measure} clipped at"
        assert text in " ".join(halved(rule).out.split())
    mean = pytest.approx(np.mean([row.get("clip_coefficient", 1) for row in rows]))
    if rule in ("adaptive", "update"):
        assert own["coefficient"] == mean
    elif rule == "per_group":
        for row in rows:
            square = row["grad_norm"] ** 2 - row[ATTENTION] ** 2 + min(row[ATTENTION], 0.3) ** 2
            assert row["grad_norm_post_clip"] == pytest.approx(square**0.5, rel=1e-5)
    elif rule == "value":
        assert own == {"limit": 0.05, "share": clip["share"]}
    elif rule == "heads":  # beside the limit on the norm
        assert clip["own"]["share"] == np.mean([row["clip_fraction"] for row in rows])
        assert clip["own"]["coefficient"] == mean
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
