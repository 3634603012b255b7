"""Rules of clipping that follow the run: the same however a window is cut, and after a resume."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.conftest import TINY, Result, llmexp, train
from tests.tools import weights
from tests.train.test_invariance import SETTINGS

RULES = {
    "zscore": ["clip=zscore", "clip.z=0.5", "clip.decay=0.8", "clip.warmup_steps=2"],
    "quantile": ["clip=quantile", "clip.quantile=0.4", "clip.window=3", "clip.warmup_steps=2"],
    "adaptive": ["clip=adaptive", "clip.ratio=0.02"],
}
GIVEN = [s for s in SETTINGS if not s.startswith(("clip.", "train.max_epochs", "train.tail"))]
GIVEN += ["train.max_steps=9", "precision=fp64", "checkpoint.every=4"]
LAYOUTS = {
    "16x1": ["batch.micro_batch_size=16"],
    "1x16": ["batch.micro_batch_size=1"],
    "fsdp_tp": [
        "batch.micro_batch_size=4", "parallelism=fsdp_tp", "parallelism.nproc_per_node=4",
        "parallelism.tensor_parallel_size=2",
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tokens) -> dict[tuple[str, str], Result]:
    folder = tmp_path_factory.mktemp("rules")
    return {
        (rule, name): train(
            folder, f"{rule}-{name}", *GIVEN, f"data.train_files=[{tokens}]", *knobs, *layout
        )
        for rule, knobs in RULES.items()
        for name, layout in LAYOUTS.items()
    }


@pytest.mark.parametrize("rule", RULES)
def test_every_cut_clips_alike(runs, rule):
    whole = runs[rule, "16x1"]
    for name in LAYOUTS:
        rows = runs[rule, name].rows()
        for key in ("train/loss", "grad_norm", "grad_norm_post_clip"):
            want = [row[key] for row in whole.rows()]
            np.testing.assert_allclose([row[key] for row in rows], want, rtol=1e-9, err_msg=name)
        shares = [row["clipped_share"] for row in rows]
        assert shares == [row["clipped_share"] for row in whole.rows()]
        final, start = weights(runs[rule, name], 9), weights(runs[rule, name], 0)
        wanted = weights(whole, 9)
        error, moved = (
            sum(float((w[key] - wanted[key]).square().sum()) for key in wanted)
            for w in (final, start)
        )
        assert (error / moved) ** 0.5 < 1e-9
    assert sum(row["clipped_share"] for row in whole.rows()) > 0


def test_the_limit_is_what_the_rule_makes_of_the_norms(runs):
    rows = runs["quantile", "16x1"].rows()
    norms, after = ([row[key] for row in rows] for key in ("grad_norm", "grad_norm_post_clip"))
    for i, (norm, clipped) in enumerate(zip(norms, after, strict=True)):
        limit = np.quantile(norms[max(0, i - 3) : i], 0.4) if i >= 2 else np.inf
        assert clipped == pytest.approx(norm * min(1, limit / (norm + 1e-6)), rel=1e-12)
    rows = runs["zscore", "16x1"].rows()
    mean = var = None
    for i, row in enumerate(rows):
        norm, limit = row["grad_norm"], np.inf
        if i == 2:
            mean, var = (
                np.mean(after := [r["grad_norm_post_clip"] for r in rows[:2]]),
                np.var(after),
            )
        if mean is not None:
            std = np.sqrt(var) + 1e-6
            z = (norm - mean) / std
            limit = mean + 0.5 * std / (z / 0.5) if z > 0.5 else np.inf
        clipped = row["grad_norm_post_clip"]
        assert clipped == pytest.approx(norm * min(1, limit / (norm + 1e-6)), rel=1e-9)
        if mean is not None:
            mean = 0.8 * mean + 0.2 * clipped
            var = 0.8 * var + 0.2 * (clipped - mean) ** 2


@pytest.mark.parametrize("rule", RULES)
def test_a_resumed_run_ends_the_same(runs, rule, tmp_path, tokens):
    given = [*TINY, "hydra.run.dir=cut", *GIVEN, f"data.train_files=[{tokens}]", *RULES[rule]]
    cut = llmexp("train", *given, *LAYOUTS["16x1"], "train.stop_step=5", cwd=tmp_path)
    assert cut.code == 75, cut.err
    again = llmexp("resume", "cut", "train.stop_step=null", cwd=tmp_path)
    assert again.code == 0, again.err
    final, whole = weights(cut, 9), weights(runs[rule, "16x1"], 9)
    assert all(bool((final[key] == whole[key]).all()) for key in whole)


def test_knobs_of_another_rule_are_refused(tmp_path: Path):
    for words, says in (
        (["clip=norm", "clip.z=3"], "clip.z"),
        (["clip=zscore", "clip.decay=1"], "clip.decay"),
        (["clip=quantile", "clip.quantile=0"], "clip.quantile"),
        (["clip=adaptive", "clip.max_norm=1"], "clip.max_norm"),
    ):
        result = llmexp("train", *words, cwd=tmp_path)
        assert (result.code, says in result.err) == (2, True), result.err


def test_a_rule_that_never_gives_a_limit_is_named_before_the_start(tmp_path: Path):
    for steps, said in (("25", True), ("26", False)):
        plan = ["plan", "clip=zscore", "model=gpt_tiny", f"train.max_steps={steps}"]
        found = llmexp(*plan, cwd=tmp_path)
        assert found.code == 0, found.err
        text = "clip.warmup_steps=25: the run ends after 25 updates, so clip=zscore never gives"
        assert (text in " ".join((found.out + found.err).split())) == said
