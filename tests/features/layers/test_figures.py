"""Figures layer by layer: of a user's model whose blocks differ, where a norm is missing, and in a
tracker, a heat map each."""

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmexp.features.layers.figures import Layers, attention_figures
from llmexp.features.layers.reading import by_layer, read_layers
from llmexp.folders.rows import read_rows
from llmexp.mesh.groups import Mesh
from llmexp.models.logits import divisor_of
from llmexp.models.loss import SummedLoss
from tests.conftest import llmexp
from tests.test_mup import gpt2, mup
from tests.tracker import made
from tests.tracker.fake_wandb import FakeWandb

LAYERS = 3
PARTS = ("attention.q_proj", "mlp.up_proj", "mlp.down_proj")
MODULES = ["embedding", *(f"blocks.{i}.{part}" for i in range(LAYERS) for part in PARTS), "head"]


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


def test_figures_of_attention_are_of_the_logits_as_they_are_under_mup():
    attention = mup(gpt2).blocks[0].attention
    q, k = torch.randn(2, 1, 2, 5, 32, dtype=torch.float64)
    causal = torch.ones(5, 5, dtype=torch.bool).tril()
    logits = (q @ k.transpose(-1, -2) * 8 / 32).masked_fill(~causal, -math.inf)
    largest, _ = attention_figures(q, k, None, divisor_of(attention))
    assert float(largest) == pytest.approx(float(logits.max()), rel=1e-12)


def test_logits_of_attention_are_fp32_sums_of_16_bit_heads(monkeypatch):
    model, heads = gpt2(64), list[tuple[torch.Tensor, ...]]()
    attention = model.blocks[0].attention
    attention.q_proj.weight.data *= 100  # logits of some size
    split = attention.heads
    monkeypatch.setattr(attention, "heads", lambda *x: heads.append(split(*x)) or heads[-1])
    alone = Mesh(0, 1, 0, 1, "single", torch.device("cpu"), None, None, False)
    layers = Layers(alone, SummedLoss(model), "bf16")
    layers.look(torch.arange(12)[None])
    layers.before_update()
    found: Any = layers.after_update()["attention_logit_max"]
    q, k = (x.double() for x in heads[0][:2])
    assert heads[0][0].dtype == torch.bfloat16
    logits = (q @ k.mT / divisor_of(attention)).masked_fill(~torch.ones(12, 12).tril().bool(), -9e9)
    bound = 32 * 2**-24 * float((q.abs() @ k.abs().mT / divisor_of(attention)).max())
    assert float(found["blocks.0"]) == pytest.approx(float(logits.max()), abs=bound)


def made_line(step: int) -> dict[str, Any]:
    draw = random.Random(step).expovariate
    line: dict[str, Any] = {"step": step, "tokens_seen": 64 * step, "logit_max": draw(1)}
    for key in ("grad_norm", "weight_norm", "update_norm"):
        line[key] = {name: draw(1) for name in MODULES}
    line["residual_rms"] = {f"blocks.{i}": draw(1) for i in range(LAYERS)}
    return line


def test_a_layer_has_the_norm_of_all_its_tensors():
    line = made_line(1)
    norms = {
        key: np.array([[line[key][f"blocks.{i}.{p}"] for p in PARTS] for i in range(LAYERS)])
        for key in ("grad_norm", "weight_norm", "update_norm")
    }
    wanted = {key: np.linalg.norm(values, axis=1) for key, values in norms.items()}
    wanted["update_ratio"] = wanted["update_norm"] / wanted["weight_norm"]
    all_gradients = np.linalg.norm(list(line["grad_norm"].values()))
    wanted["grad_share"] = (wanted["grad_norm"] / all_gradients) ** 2
    found = by_layer(line)
    for key, values in wanted.items():
        np.testing.assert_allclose(found[key], values, rtol=1e-12)
    assert found["residual_rms"] == list(line["residual_rms"].values())
    assert found["logit_max"] == line["logit_max"]


def test_a_figure_that_lacks_a_value_is_absent(tmp_path):
    """As where an overflow of fp16 leaves out the norm of the module in which it happens."""
    for module in MODULES:
        line = made_line(1)
        del line["grad_norm"][module], line["residual_rms"]["blocks.1"]
        found = by_layer(line)
        assert {"grad_norm", "grad_share", "residual_rms"}.isdisjoint(found)
        assert len(found["update_ratio"]) == LAYERS
    weights, both, one = {"a": 1.0, "b": 1.0}, {"a": 3.0, "b": 4.0}, {"b": 4.0}
    rows = [{"step": 1, "weight_norm": weights, "grad_norm": norms} for norms in (both, one)]
    made.write_rows(tmp_path / "layers.jsonl", [row | {"step": n} for n, row in enumerate(rows)])
    assert [r.get("grad_share") for r in read_layers(tmp_path)] == [0.36, 0.64, None, None]


def shown(step: int) -> dict[str, Any]:
    """What wandb is to have of a line."""
    found = {f"layers/{key}": value for key, value in by_layer(made_line(step)).items()}
    del found["layers/step"], found["layers/tokens_seen"]
    bins = list(range(LAYERS + 1))
    return {
        key: {"_type": "histogram", "values": v, "bins": bins} if isinstance(v, list) else v
        for key, v in found.items()
    }


def test_trackers_have_a_heat_map_of_each_figure(tmp_path: Path) -> None:
    """While a run trains, and by `llmexp sync`, which refuses damage."""
    rows, (live, over, bad) = made.make_rows(1, 12), (tmp_path / name for name in "012")
    live.mkdir()
    for run in (over, bad):
        made.make_run(run, 12)
    for run in (live, over):  # no row has the last one
        made.write_rows(run / "layers.jsonl", [made_line(step) for step in (4, 8, 11, 99)])
    made.write_rows(bad / "layers.jsonl", [{"step": 4, "grad_norm": {}}, {"tokens_seen": 5}])
    wanted = [row | (shown(row["step"]) if row["step"] in (4, 8, 11) else {}) for row in rows]
    with FakeWandb() as server:
        assert made.run_worker(live, rows, server.url).said == []
        assert made.bare(server.run.rows) == wanted
        server.runs.clear()
        done = made.llmexp(tmp_path, server, "sync", over, bad)
        assert made.bare(server.run.rows) == wanted
    first, second, *_ = done.out.splitlines()
    assert done.code == 1
    assert "12 of 12 rows sent, finished" in first
    assert "cannot be uploaded" in second
    assert "layers.jsonl: line 2" in second


def test_a_model_of_more_layers_than_a_histogram_has_bins_is_left_out() -> None:
    wandb = pytest.importorskip("wandb")
    from llmexp.tracker.wandb import _with_maps

    most = wandb.Histogram.MAX_LENGTH
    row = {"step": 1, "layers/a": [1.0] * most, "layers/b": [1.0] * (most + 1)}
    assert _with_maps(row).keys() == {"step", "layers/a"}
