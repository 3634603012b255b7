"""Figures layer by layer: of a user's model whose blocks differ, and where a norm is missing."""

import json
import math

import pytest
import torch

from llmexp.features.layers.figures import attention_figures
from llmexp.features.layers.reading import read_layers
from llmexp.folders.rows import read_rows
from llmexp.models.logits import divisor_of
from tests.conftest import llmexp
from tests.test_mup import gpt2, mup


def test_a_figure_is_of_the_blocks_that_have_it(tmp_path):
    result = llmexp(
        "train", "~model", "+model={_target_: own.mixed.Mixed, vocab_size: null}", "data=synthetic",
        "data.n_tokens=3000", "batch.sequence_length=12", "batch.real_batch_size=4",
        "batch.micro_batch_size=2", "train.max_steps=2", "train.sample_tokens=0", "tracker=none",
        "train.eval_every=null", "metrics.picture=false", "metrics.layers_every=1",
        "precision=fp32", "hydra.run.dir=run", "--allow=own", cwd=tmp_path,
    )  # fmt: skip
    assert result.code == 0, result.err
    rows = read_rows(tmp_path / "run" / "layers.jsonl")
    assert len(rows) == 2
    for row in rows:
        assert list(row["residual_rms"]) == ["blocks.0", "blocks.1", "blocks.2"]
        assert row["attention_rms"] == {"blocks.1": 3.0}
        assert list(row["mlp_rms"]) == ["blocks.0", "blocks.2"]
        assert row["dead_units"] == {"blocks.0": 0.5, "blocks.2": 0.5}
        assert "attention_entropy" not in row


def test_shares_are_absent_where_a_norm_is_not_finite(tmp_path):
    """An overflow of fp16 leaves the norm of the module out in which it happens."""
    weights, both, one = {"a": 1.0, "b": 1.0}, {"a": 3.0, "b": 4.0}, {"b": 4.0}
    rows = [{"step": 1, "weight_norm": weights, "grad_norm": both}]
    rows += [{"step": 2, "weight_norm": weights, "grad_norm": one}]
    (tmp_path / "layers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [r.get("grad_share") for r in read_layers(tmp_path)] == [0.36, 0.64, None, None]


def test_figures_of_attention_are_of_the_logits_as_they_are_under_mup():
    attention = mup(gpt2).blocks[0].attention
    q, k = torch.randn(2, 1, 2, 5, 32, dtype=torch.float64)
    causal = torch.ones(5, 5, dtype=torch.bool).tril()
    logits = (q @ k.transpose(-1, -2) * 8 / 32).masked_fill(~causal, -math.inf)
    largest, _ = attention_figures(q, k, None, divisor_of(attention))
    assert float(largest) == pytest.approx(float(logits.max()), rel=1e-12)
