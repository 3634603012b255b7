"""Figures layer by layer in a tracker: a heat map each, while a run trains and by `llmexp sync`."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmexp.features.layers.reading import by_layer
from llmexp.folders.rows import read_rows
from tests.tracker.fake_wandb import FakeWandb
from tests.tracker.test_sync import llmexp, make_run, rows_of
from tests.tracker.test_tracker import bare, make_rows, run_worker

LAYERS = 3
PARTS = ("attention.q_proj", "mlp.up_proj", "mlp.down_proj")
MODULES = ["embedding", *(f"blocks.{i}.{part}" for i in range(LAYERS) for part in PARTS), "head"]


def made_line(step: int) -> dict[str, Any]:
    draw = random.Random(step).expovariate
    line: dict[str, Any] = {"step": step, "tokens_seen": 64 * step, "logit_max": draw(1)}
    for key in ("grad_norm", "weight_norm", "update_norm"):
        line[key] = {name: draw(1) for name in MODULES}
    line["residual_rms"] = {f"blocks.{i}": draw(1) for i in range(LAYERS)}
    return line


def write_layers(run: Path, steps: list[int]) -> None:
    run.mkdir(exist_ok=True)
    text = "".join(json.dumps(made_line(step)) + "\n" for step in steps)
    (run / "layers.jsonl").write_text(text)


def shown(step: int) -> dict[str, Any]:
    """What wandb is to have of a line."""
    found = {f"layers/{key}": value for key, value in by_layer(made_line(step)).items()}
    del found["layers/step"], found["layers/tokens_seen"]
    bins = list(range(LAYERS + 1))
    return {
        key: {"_type": "histogram", "values": v, "bins": bins} if isinstance(v, list) else v
        for key, v in found.items()
    }


def test_a_layer_has_the_norm_of_all_its_tensors():
    line = made_line(1)
    norms = {
        key: np.array([[line[key][f"blocks.{i}.{p}"] for p in PARTS] for i in range(LAYERS)])
        for key in ("grad_norm", "weight_norm", "update_norm")
    }
    whole = {key: np.linalg.norm(values, axis=1) for key, values in norms.items()}
    all_gradients = np.linalg.norm(list(line["grad_norm"].values()))
    found = by_layer(line)
    for key, values in whole.items():
        np.testing.assert_allclose(found[key], values, rtol=1e-12)
    ratios = whole["update_norm"] / whole["weight_norm"]
    np.testing.assert_allclose(found["update_ratio"], ratios, rtol=1e-12)
    shares = (whole["grad_norm"] / all_gradients) ** 2
    np.testing.assert_allclose(found["grad_share"], shares, rtol=1e-12)
    assert found["residual_rms"] == list(line["residual_rms"].values())
    assert found["logit_max"] == line["logit_max"]


@pytest.mark.parametrize("module", MODULES)
def test_a_figure_that_lacks_a_value_is_absent(module):
    line = made_line(1)
    del line["grad_norm"][module], line["residual_rms"]["blocks.1"]
    found = by_layer(line)
    assert {"grad_norm", "grad_share", "residual_rms"}.isdisjoint(found)
    assert len(found["update_ratio"]) == LAYERS


def test_a_run_in_training_has_a_heat_map_of_each_figure(tmp_path: Path) -> None:
    rows = make_rows(1, 20)
    write_layers(tmp_path / "run", [5, 10, 15])
    with FakeWandb() as server:
        assert run_worker(tmp_path / "run", rows, server.url, start_timeout_s=20).said == []
    there = [shown(row["step"]) if row["step"] in (5, 10, 15) else {} for row in rows]
    assert bare(server.run.rows) == [a | b for a, b in zip(rows, there, strict=True)]


def test_sync_sends_them_and_refuses_damage(tmp_path: Path) -> None:
    run, bad = make_run(tmp_path / "0", 12), make_run(tmp_path / "1", 12)
    write_layers(run, [4, 8, 11, 99])  # no row has the last one
    (bad / "layers.jsonl").write_text('{"step": 4, "grad_norm": {}}\n{"tokens_seen": 5}\n')
    rows = read_rows(run / "metrics.jsonl")
    with FakeWandb() as server:
        code, lines, _ = llmexp(tmp_path, "sync", run, bad, server=server.url)
        arrived = rows_of(server.run)
    assert code == 1
    assert "12 of 12 rows sent, finished" in lines[0]
    assert "cannot be uploaded" in lines[1]
    assert "layers.jsonl: line 2" in lines[1]
    assert arrived == [r | (shown(r["step"]) if r["step"] in (4, 8, 11) else {}) for r in rows]


def test_a_model_of_more_layers_than_a_histogram_has_bins_is_left_out() -> None:
    wandb = pytest.importorskip("wandb")
    from llmexp.tracker.wandb import _with_maps

    most = wandb.Histogram.MAX_LENGTH
    row = {"step": 1, "layers/a": [1.0] * most, "layers/b": [1.0] * (most + 1)}
    assert _with_maps(row).keys() == {"step", "layers/a"}
