"""`llmexp verify geometry`: it passes where the arithmetic is right, and every planted wrong one
makes it fail."""

import dataclasses
import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from llmexp.config.convert import build
from llmexp.config.sections import Config, plain
from llmexp.config.values import ConfigError
from llmexp.folders import rundir
from llmexp.optim.precision import settings_kept
from llmexp.system.child import STOP
from llmexp.train import loop, worker
from llmexp.train import step as step_module
from llmexp.train.assembly.assemble import assemble
from llmexp.verify import geometry
from llmexp.verify.checks import Check
from llmexp.verify.geometry import masked_id, moved_off, off_by, real_batch, within_limit
from llmexp.verify.reference import (
    Roundoff,
    errors,
    passes_differ,
    train_plainly,
    windows_in_order,
)
from llmexp.verify.runs import shrunk, trial
from tests import reference, tools
from tests.conftest import TINY, Result, llmexp
from tests.tools import PACKAGE_OF

DATA = ["data=synthetic", "data.n_tokens=4000", "data.val_ratio=0"]
FAST = ["batch.real_batch_size=8", "optimizer.lr=0.02"]
QUANTITIES = ("steps, target counts", "loss", "gradient norm", "parameters")

# A user's hook that breaks the arithmetic at the start of a run: with several micro-batches the
# loss becomes the mean of their means; of two ranks the second one's rows are lost.
BROKEN = """
import dataclasses

from llmexp.train import loop

right = loop.train_step


def plant(event, context):
    loop.train_step = wrong


def wrong(s, window, *callbacks):
    batches, module = window.micro_batches, s.module

    def mean(tokens_bt, targets_bt):
        valid = max(1, int((targets_bt >= 0).sum()))
        return module(tokens_bt, targets_bt) * (window.target_count / len(batches) / valid)

    if s.mesh.dp_size == 1 and len(batches) > 1:
        s = dataclasses.replace(s, module=mean)
    if s.mesh.dp_rank == 1:
        lost = [(tokens_bt, targets_bt * 0 - 100) for tokens_bt, targets_bt in batches]
        window = dataclasses.replace(window, micro_batches=lost)
    return right(s, window, *callbacks)
"""


def proof(cwd: Path, *overrides: str, **env: str) -> Result:
    return llmexp(
        "verify", "geometry", *TINY, *DATA, *FAST, "hydra.run.dir=proof", *overrides, cwd=cwd, **env
    )


def verdicts(checks: list[dict], run: str) -> list[bool]:
    """Of one run, the quantities in their order."""
    found = [
        next(c for c in checks if c["what"].startswith(f"{run}") and f": {q}" in c["what"])
        for q in QUANTITIES
    ]
    return [c["passed"] for c in found]


def rows_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / rundir.METRICS).read_text().splitlines()]


def test_it_passes_where_it_should(tmp_path):
    """A tail of three of eight sequences: the second of two ranks has none, and targets are masked
    in each step. fp32 is allowed more than one rounding, far less than the 1 % of a wrong divisor.
    """
    passing = proof(tmp_path, "precision=fp32", COLUMNS="60")
    assert passing.code == 0, passing.out + passing.err
    record = passing.json("verify.json")
    assert (record["passed"], record["error"], record["verify"]) == (True, None, "geometry")
    runs = ("one batch (8 x 1)", "accumulation (1 x 8)", "two ranks (2 x 2 x 2 ranks, ddp)")
    for run in (f"{kind}, {run}" for kind in ("fp64", "fp32") for run in runs):
        assert verdicts(record["checks"], run) == [True] * 4
    assert len(record["checks"]) == 2 * 3 * 4
    limits = {
        c["what"].partition(": ")[2]: c["limit"] for c in record["checks"] if "fp32" in c["what"]
    }
    for name in ("loss, relative error", "gradient norm, before and after clipping"):
        assert 2**-25 < limits[name] < 1e-4
    assert all(len(line) <= 60 or str(passing.folder) in line for line in passing.out.splitlines())

    folders = [*passing.folder.glob("fp*-*")]
    assert len(folders) == 6
    for folder in folders:
        plan, rows = json.loads((folder / rundir.RUN).read_text()), rows_of(folder)
        assert plan["world_size"] == 1 + ("two_ranks" in folder.name)
        assert (plan["real_batch_size"], plan["tail_sequences"]) == (8, 3)
        assert plan["precision"] == folder.name.partition("-")[0]
        for row, sequences in zip(rows, (8, 8, 8, 3), strict=True):
            assert 0 < row["target_tokens"] < 12 * sequences


def test_mean_of_means_and_lost_rows_fail(tmp_path):
    """Over the command line, planted in the workers: one run is right, and the wrong ones are told
    from it."""
    (tmp_path / "broken.py").write_text(BROKEN)
    ranks = ["parallelism=fsdp", "parallelism.nproc_per_node=2", "batch.micro_batch_size=4"]
    result = proof(tmp_path, "precision=fp64", *ranks, "hooks=[broken.plant]", "--allow", "broken")
    assert result.code == 1, result.out + result.err
    checks = result.json("verify.json")["checks"]
    assert verdicts(checks, "fp64, one batch") == [True] * 4
    for run in ("accumulation (1 x 8)", "own cut (4 x 1 x 2 ranks, fsdp)", "two ranks"):
        assert verdicts(checks, f"fp64, {run}") == [True, False, False, False]
    assert len(checks) == 16
    shared = json.loads((result.folder / "fp64-own_cut" / rundir.RUN).read_text())
    found = [shared[key] for key in ("parallelism", "shard_size", "micro_batch_size")]
    assert found == ["fsdp", 2, 4]


def composed(*overrides: str, data: list[str] = DATA) -> Config:
    return tools.composed(*TINY, *data, *FAST, *overrides)


@pytest.fixture
def in_process(monkeypatch):
    """The runs on one rank, made by the worker's own code in this process, so that a fault can be
    planted in it."""

    def train(path: Path, config: Config) -> None:
        path.mkdir(parents=True)
        request = {"config": plain(config), "folder": str(path), "fixed": True}
        monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(request)))
        with settings_kept():
            assert worker.main("-") == 0

    for name, value in vars(STOP).items():  # what the worker sets is put back
        monkeypatch.setattr(STOP, name, value)
    every = geometry.cuts_of
    monkeypatch.setattr(geometry, "train_folder", train)
    monkeypatch.setattr(
        geometry, "cuts_of", lambda *given: (dict([*every(*given)[0].items()][:2]), [])
    )


def failed(checks: list[Check]) -> set[str]:
    """run: first word of the quantity"""
    return {
        f"{c.what.partition(' (')[0]}: {c.what.partition('): ')[2].split()[0].strip(',')}"
        for c in checks
        if not c.passed
    }


def everywhere(*quantities: str) -> set[str]:
    return {f"fp64, {run}: {q}" for run in ("one batch", "accumulation") for q in quantities}


def twice_the_loss(s, window, *callbacks):
    right = s.module
    twice = dataclasses.replace(s, module=lambda *given: 2 * right(*given))
    return step_module.train_step(twice, window, *callbacks)


def masked_targets_count(s, window, *callbacks):
    whole = sum(targets_bt.numel() for _, targets_bt in window.micro_batches)
    return step_module.train_step(s, dataclasses.replace(window, target_count=whole), *callbacks)


def late_rate(s, window, settle, *callbacks):
    return step_module.train_step(s, window, lambda: settle() + 1, *callbacks)


SLOW = pytest.mark.slow


def proved(folder: Path, *overrides: str, steps: int | None = 2) -> list[Check]:
    config = composed("train.device=cpu", "precision=fp64", *overrides)
    return geometry.verify(config, folder, steps=steps, shrink=False)


@pytest.mark.parametrize(("planted", "also"), [(twice_the_loss, set()), (late_rate, {"steps"})])
def test_a_planted_fault_fails(tmp_path, monkeypatch, in_process, planted, also):
    monkeypatch.setattr(loop, "train_step", planted)
    checks = proved(tmp_path)
    assert failed(checks) == everywhere("loss", "gradient", "parameters", *also)
    assert len(checks) == 8


RISING = "optimizer.lr=0.05 schedule.warmup_steps=0"  # norms of the first steps
GROUPS = "[{match:'*.mlp.*',max_norm:0.05},{match:'*',max_norm:0.3}]"
COMMON = ["optimizer=sgd clip=value clip.max_value=0.01", "optimizer=muon clip.max_norm=0.5",
          f"clip=zscore clip.z=0.1 clip.warmup_steps=1 {RISING}"]  # fmt: skip
OTHERS = [
    # schedule_free ends at other weights
    *(f"optimizer={name} clip=none" for name in ("sgd", "muon", "adafactor", "schedule_free")),
    "clip=none", "optimizer=lion clip.max_norm=0.5", "clip=norm clip.max_norm=0.5",
    f"clip=quantile clip.quantile=0.3 clip.warmup_steps=1 {RISING}",
    f"clip=per_group clip.limits={GROUPS}", "clip=update clip.threshold=0.3",
    "clip=adaptive clip.ratio=0.003",
]  # fmt: skip


@pytest.mark.parametrize("overrides", [*COMMON, *(pytest.param(o, marks=SLOW) for o in OTHERS)])
def test_it_passes_with_other_optimizers_and_rules_of_clipping(tmp_path, in_process, overrides):
    """Each rule acts in some window."""
    for name, package in PACKAGE_OF.items():
        if f"optimizer={name}" in overrides:
            pytest.importorskip(package)
    checks = proved(tmp_path, "optimizer.lr=0.01", *overrides.split(), steps=4)
    assert failed(checks) == set()
    rows = [row for path in tmp_path.glob("*-*") for row in rows_of(path)]
    assert any(row.get("clip_fraction") for row in rows) == ("clip=none" not in overrides)


@pytest.mark.parametrize(
    "precision", ["fp16", pytest.param("bf16", marks=SLOW), pytest.param("fp32", marks=SLOW)]
)
def test_a_wrong_divisor_is_seen_in_low_precision_too(tmp_path, monkeypatch, in_process, precision):
    """The right arithmetic passes, and what counts masked targets fails in the loss and in the
    norm."""
    assert failed(proved(tmp_path / "right", f"precision={precision}")) == set()
    monkeypatch.setattr(loop, "train_step", masked_targets_count)
    wrong = failed(proved(tmp_path / "wrong", f"precision={precision}"))
    fp64 = everywhere("loss", "gradient")
    assert {name.replace("fp64", precision) for name in fp64} <= wrong


def test_a_ramp_passes_and_a_rate_that_leaves_it_out_is_seen(tmp_path, monkeypatch, in_process):
    """The stages share the steps of the proof, with twice the sequences, which two ranks need."""
    ramp = ["batch.ramp={0: 2, 100: 4, 200: 8}", "batch.real_batch_size=null"]
    ramp += ["optimizer.rule=sqrt", "+optimizer.reference={lr: 0.02, B: 48}"]
    assert failed(proved(tmp_path / "right", *ramp, steps=None)) == set()
    plans = [json.loads(p.read_text()) for p in (tmp_path / "right").glob("*/run.json")]
    assert {p["micro_batch_size"] for p in plans} == {1, 4}
    for plan in plans:
        stages = [(stage["first_step"], stage["real_batch_size"]) for stage in plan["stages"]]
        assert stages == [(0, 4), (2, 8), (3, 16)]
        assert (plan["max_steps"], plan["tail_sequences"]) == (4, 7)

    def without_rates(s, *given):
        return step_module.train_step(dataclasses.replace(s, stage_rate=lambda step: 1.0), *given)

    monkeypatch.setattr(loop, "train_step", without_rates)
    found = failed(proved(tmp_path / "wrong", *ramp, steps=None))
    assert everywhere("steps", "parameters") <= found


def test_the_reference_is_what_another_one_computes(tokens):
    """The tests' own GPT-2, cross-entropy, clipping, AdamW and cosine share no code with it."""
    settings = [
        "data=tokens", f"data.train_files=[{tokens}]", "data.shuffle=false", "data.val_ratio=0",
        "train.max_steps=5", "schedule.warmup_steps=2", "precision=fp64", "train.device=cpu",
        "clip.max_norm=1.5", "batch.real_batch_size=16",
    ]  # fmt: skip
    parts = assemble(composed(*settings, data=[]))
    model = parts.new_model()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    want = reference.train(
        weights, np.load(tokens), real_batch=16, length=12, total_sequences=65, lr=0.02, warmup=2,
        end_ratio=0.1, max_norm=1.5, ignore_id=10, n_layers=2, n_heads=2,
    )  # fmt: skip
    found = train_plainly(parts, model, windows_in_order(parts, [16] * 4 + [1]), 10)
    rows = found.rows
    assert rows["target_tokens"] == want.counts
    np.testing.assert_allclose(rows["train/loss"], want.losses, rtol=1e-13)
    np.testing.assert_allclose(rows["grad_norm"], want.norms, rtol=1e-12)
    # but for the 1e-6
    np.testing.assert_allclose(rows["grad_norm_post_clip"], np.minimum(want.norms, 1.5), rtol=1e-5)
    np.testing.assert_allclose(rows["lr"], want.rates, rtol=1e-14)
    for name, p in found.end.items():
        assert torch.allclose(p, want.weights[name], rtol=0, atol=1e-11), name


@given(st.sampled_from(["bf16", "fp16"]), st.integers(0, 100), st.integers(16, 64))
def test_drawn_rounding_is_as_large_as_real_rounding(kind, seed, width):
    """The error of a product of rounded matrices, rounded, against the exact one.

    Real errors are uniform within u / m for a significand m in [1, 2), whose rms is u / sqrt(3)
    times the rms of 1 / m, 0.71 to 0.72 for smooth data; the drawn ones leave that factor out.
    Their ratio is 1.4, and each rms is over at least 256 entries, good to about 15 %.
    """
    torch.manual_seed(seed)
    dtype = torch.bfloat16 if kind == "bf16" else torch.float16
    a, b = torch.randn(width, 64, dtype=torch.float64), torch.randn(64, width, dtype=torch.float64)
    exact = a @ b
    real = (a.to(dtype).double() @ b.to(dtype).double()).to(dtype).double() - exact
    with Roundoff(errors(kind, 1), seed):
        drawn = a @ b - exact
    assert 1.0 < float(drawn.square().mean().sqrt() / real.square().mean().sqrt()) < 2.0


def test_views_and_updates_in_place_are_not_disturbed():
    p = torch.ones(4, 4, dtype=torch.float64)
    with Roundoff(errors("bf16", 100), 0):
        p.view(16).t().detach().add_(1)
    assert torch.equal(p, torch.full((4, 4), 2.0, dtype=torch.float64))


@given(st.integers(1, 10_000))
def test_the_real_batch_can_be_shared_by_two_and_leaves_a_tail(own):
    real = real_batch(own)
    assert real % own == 0
    assert real % 2 == 0
    assert real >= 4
    assert real // 2 - 1 >= 1
    assert all(own * k < 4 or own * k % 2 for k in range(1, real // own))


@given(
    st.lists(st.integers(0, 5), min_size=12, max_size=12), st.one_of(st.none(), st.integers(0, 7))
)
def test_masked_targets_are_some_and_not_most(ids, own):
    rows = torch.tensor(ids).view(2, 6)
    chosen, checks = masked_id([rows], own)
    targets = rows[:, 1:].flatten().tolist()
    if own in targets:
        assert chosen == own
    elif chosen is None:
        assert len(checks) == 1
        assert all(2 * targets.count(i) > len(targets) for i in set(targets))
    else:
        assert 0 < 2 * targets.count(chosen) <= len(targets)
        assert all(
            targets.count(i) <= targets.count(chosen) or 2 * targets.count(i) > len(targets)
            for i in range(6)
        )


INF, NAN = float("inf"), float("nan")


def test_what_is_missing_or_not_finite_is_not_equal_and_proves_nothing():
    assert off_by([1.0, None], [1.0, None]) == off_by([0.0], [0.0]) == 0
    assert off_by([1.0], [2.0]) == 0.5
    for found, wanted in ((1.0, None), (None, 1.0), (NAN, 1.0), (INF, 1.0)):
        assert off_by([found], [wanted]) == INF
    model = nn.Linear(2, 1, bias=False)
    weight = model.weight.detach()
    for end, found, off in ((0, 0, 0), (1, 0, INF), (NAN, 1, INF)):
        assert moved_off(model, {"weight": weight + end}, {"weight": weight + found}) == off
    # a limit that anything keeps proves nothing
    for found, limit, passed in (
        (0.1, 0.2, True), (0.3, 0.2, False), (INF, 0.2, False), (NAN, 0.2, False),
        (0.1, 0.5, None), (0.1, INF, None), (INF, INF, None), (0.1, NAN, None),
    ):  # fmt: skip
        assert within_limit("run", found, limit, "derived").passed is passed


def test_an_id_to_ignore_from_the_environment(tmp_path, monkeypatch, in_process):
    monkeypatch.setenv("IGNORED", "7")
    monkeypatch.setenv("DROPPED", "0.3")
    of_env = ["data.ignore_id=${oc.env:IGNORED}", "model.dropout=${oc.env:DROPPED}"]
    assert failed(proved(tmp_path, *of_env)) == set()
    config = rundir.read_config(tmp_path / "fp64-one_batch")
    assert (config["data"]["ignore_id"], config["model"]["dropout"]) == (7, 0.0)


class Noisy(nn.Module):
    def __init__(self, vocab_size: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, 8)
        self.drop = nn.Dropout(0.5)

    def forward(self, tokens_bt):
        return self.drop(self.embed(tokens_bt)) @ self.embed.weight.T


class Counting(Noisy):
    """Each pass is another one, without a random number."""

    def __init__(self, vocab_size: int = 64) -> None:
        super().__init__(vocab_size)
        self.drop, self.passes = nn.Identity(), 0

    def forward(self, tokens_bt):
        self.passes += 1
        return super().forward(tokens_bt) * self.passes


def test_models_that_draw_random_numbers_and_limits_of_logits_are_refused(tmp_path):
    assert passes_differ(Noisy(), torch.arange(8)[None])
    parts = assemble(composed("precision=fp64", "train.device=cpu"))
    geometry.refuse_random(parts, torch.arange(8)[None])
    for model, why in ((Noisy, r"differ, .* in drop, .*"), (Counting, "differ, [^;]*")):
        own = dataclasses.replace(parts, build_model=model)
        with pytest.raises(ConfigError, match=rf"^model\._target_=[^;]* {why}$"):
            geometry.refuse_random(own, torch.arange(8)[None])
    with pytest.raises(ConfigError, match=r"^clip.qk_limit=5.0: "):
        proved(tmp_path, "clip.qk_limit=5")


def test_shrunk_keeps_what_is_proven():
    config = composed("model.n_layers=8", "batch.sequence_length=12", "batch.real_batch_size=96")
    small = shrunk(config)
    assert small.model == config.model | {"n_layers": 2}
    assert small.batch == dataclasses.replace(
        config.batch, micro_batch_size=2, gradient_accumulation_steps=2, real_batch_size=None
    )
    assert dataclasses.replace(small, model=config.model, batch=config.batch) == config
    assert build(plain(trial(small, 3))).train.max_steps == 3
