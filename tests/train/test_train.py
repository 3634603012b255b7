"""What a run writes and does besides its arithmetic: rows and the tracker, faults, compile."""

import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from llmexp.system import hardware
from llmexp.system.devices import device_named
from tests import forks
from tests.conftest import HANG_S, PATHS, TINY, Result, environment, train
from tests.tools import exact
from tests.train.resumed import ends

SYNTHETIC = [
    "data=synthetic", "data.n_tokens=4000", "train.max_steps=12", "train.log_every=5",
    "train.eval_every=4",
]  # fmt: skip
TWO = ["parallelism=ddp", "parallelism.nproc_per_node=2"]


def failed(cwd: Path, *overrides: str) -> Result:
    words = ["train", *TINY, *SYNTHETIC, "train.log_every=1", *overrides, "hydra.run.dir=run"]
    result = ends(cwd, *words, code=3)
    assert "Traceback" not in result.err
    return result


def test_rows_come_at_their_steps_and_say_what_they_are(runs, tmp_path):
    """And the folder alone is enough to repeat the run."""
    result = runs(*SYNTHETIC)
    rows = result.rows()
    assert [r["step"] for r in rows] == [4, 5, 8, 10, 12]
    assert [r["step"] for r in rows if "val/loss" in r] == [4, 8, 12]
    run = result.json("run.json")
    for row in rows:
        assert row["tokens_seen"] == row["step"] * run["tokens_per_step"]
        assert row["epoch"] == row["step"] * run["real_batch_size"] / run["train_sequences"]
        assert row["tokens_per_sec"] * row["step_time"] == pytest.approx(run["tokens_per_step"])
        work = run["flops_per_token"] * row["tokens_per_sec"] / 1e12
        assert row["tflops_per_sec_per_rank"] == pytest.approx(work)
        assert "mfu" not in row  # no peak is known for a CPU
        assert 0 < row["data_time"] < row["step_time"]
    best = min(r["val/loss"] for r in rows if "val/loss" in r)
    assert result.json("status.json")["summary"]["best val/loss"] == best
    assert "\x1b" not in result.out + (result.folder / "train.log").read_text()
    again = runs.copy(tmp_path / "run", *SYNTHETIC)
    for name in ("metrics.jsonl", "status.json"):
        (again.folder / name).unlink()
    shutil.rmtree(again.folder / "checkpoints")
    env = environment(PYTHONPATH=PATHS)
    assert forks.start("llmexp.train", "run", cwd=tmp_path, env=env).wait(HANG_S) == 0
    assert exact(again) == exact(result)


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path):
    """The second micro-batch of step 7: its step has no row. tests/faults/test_numbers.py has the
    layer that it is laid to."""
    bad = ["--allow=own", "model._target_=own.nets.NotANumberOnce"]
    result = failed(tmp_path, *bad, "batch.gradient_accumulation_steps=2", "checkpoint.every=3")
    assert "step 7 has a loss that is not finite on rank 0; the update was not" in result.err
    assert "the last checkpoint is step_00000006; to continue: llmexp resume run" in result.err
    assert "the loss had grown" not in result.err
    assert [r["step"] for r in result.rows()] == [1, 2, 3, 4, 5, 6]
    assert not result.checkpoint(7).exists()


def test_a_loss_that_grows_beyond_all_bounds_ends_with_a_hint(tmp_path):
    steep = ["optimizer=sgd", "optimizer.lr=1e4", "clip=none", "schedule=constant"]
    result = failed(tmp_path, *steep, "train.max_steps=50")
    losses = [row["train/loss"] for row in result.rows()]
    assert f"the loss had grown from {min(losses):.4g} to {losses[-1]:.4g} before" in result.err


@pytest.mark.parametrize(
    ("scale", "limit", "said", "beyond"),
    [
        (1e30, "train.max_steps=4", "the loss scale fell to 6.25e+28", "train.max_steps=8"),
        (1e30, "train.max_tokens=384", "the loss scale fell to 6.25e+28", "train.max_steps=8"),
        (2**40, "train.max_consecutive_skips=3", "4 updates in a row were skipped, the last at "
         "step 4", "train.max_consecutive_skips=6"),
    ],
)  # fmt: skip
def test_a_scale_that_falls_too_long_stops_a_run_whose_command_goes_on_beyond_it(
    tmp_path, scale, limit, said, beyond
):
    half = ["precision=fp16", f"precision.init_scale={scale}"]
    budget = ["train.max_steps=null"] if "max_tokens" in limit else []
    stopped = failed(tmp_path, *half, *budget, limit)
    assert said in stopped.err
    assert ("no checkpoint yet" in stopped.err) == ("max_consecutive_skips" in limit)
    assert "fork" not in stopped.err
    command = stopped.err.rpartition("to continue: llmexp ")[2].strip()
    assert command == f"resume run {beyond}"
    again = ends(tmp_path, *command.split(), code=3)
    last = [
        max(int(n) for n in re.findall(r"step (\d+) has a gradient norm", done.out))
        for done in (stopped, again)
    ]
    assert last[1] > last[0]


def test_fp16_overflow_skips_updates_until_the_scale_fits(runs):
    half = ["precision=fp16", f"precision.init_scale={2**40}", "train.max_steps=40"]
    each = ["train.log_every=1", "train.eval_every=1", "train.eval_tokens=24"]
    result = runs(*SYNTHETIC, *half, *each)
    rows = result.rows()
    skipped = [r["skipped"] for r in rows]
    first = skipped.index(False)
    assert first > 0
    assert [r["loss_scale"] for r in rows[: first + 1]] == [
        2.0 ** (40 - i) for i in range(first + 1)
    ]
    # that of all skipped steps; an evaluation shows it at each step
    assert len({r["weight_norm"] for r in rows[:first]}) == 1
    assert rows[first]["weight_norm"] != rows[0]["weight_norm"]
    assert result.out.count("overflowed fp16; its update was skipped") == sum(skipped)
    assert rows[first]["lr"] == rows[0]["lr"]  # the schedule waited
    assert all("train/loss" in r and "grad_norm" not in r for r in rows[:first])


RECOMPILES = "own.hooks.show_recompiles"


@pytest.mark.parametrize(
    ("model", "hook"),
    [
        ("gpt_tiny", "own.traced.hook"),
        pytest.param("gpt_tiny", RECOMPILES, marks=pytest.mark.slow),
        pytest.param("llama_100m model.n_kv_heads=1", RECOMPILES, marks=pytest.mark.slow),
    ],
)
def test_compile_computes_the_same_without_recompiling(runs, model, hook):
    """Tail and evaluation included: every micro-batch has the same shape."""
    settings = [
        *f"model={model}".split(), *SYNTHETIC, "train.max_steps=null", "train.max_epochs=0.1",
        "--allow=own", f"hooks=[{hook}]", "batch.micro_batch_size=4",
        "batch.gradient_accumulation_steps=2",
    ]  # fmt: skip
    eager, compiled = (runs(*settings, f"train.compile={to}") for to in ("false", "true"))
    assert eager.json("run.json")["tail_sequences"] > 0
    # One graph, which serves evaluation too.
    assert "Recompiling function" not in compiled.err
    for a, b in zip(eager.rows(), compiled.rows(), strict=True):
        # fp32 in another order of operations: 6 roundoffs sqrt(192) as in test_invariance, and
        # Adam's first steps move entries at the noise level by lr; 1e-4 covers a handful of steps
        # of 1e-3.
        assert a["train/loss"] == pytest.approx(b["train/loss"], rel=1e-4)
        assert a["target_tokens"] == b["target_tokens"]


@pytest.mark.parametrize(
    ("name", "gib", "precision", "tflops", "device"),
    [
        ("NVIDIA H200", 139.8, "bf16", 989, "h200"),
        ("NVIDIA H200 NVL", 139.8, "bf16", 835, "h200-nvl"),
        ("NVIDIA H100 PCIe", 79.2, "bf16", 756, None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9.8, "bf16", None, None),
        ("NVIDIA A100-SXM4-40GB", 39.4, "bf16", 312, "a100-40"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "fp64", None, "a100-80"),
        ("NVIDIA A10", 22.5, "bf16", None, None),
        ("Tesla V100-SXM2-16GB", 15.8, "fp16", 125, "v100-16"),
        ("Tesla V100-PCIE-32GB", 31.7, "fp16", None, None),
        ("NVIDIA GeForce RTX 9999", 80.0, "bf16", None, None),
    ],
)
def test_a_gpu_is_known_by_its_name_and_its_memory(
    monkeypatch, name, gib, precision, tflops, device
):
    """`plan --measure plan.device=a100-40` asks for the very device that is there; an unknown one
    has no peak."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    properties = SimpleNamespace(total_memory=int(gib * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    peak = hardware.peak_flops(torch.device("cuda"), precision)
    assert peak == (None if tflops is None else tflops * 1e12)
    if device:
        assert hardware.accelerator(torch.device("cuda")) == device_named(device)


def test_evaluation_masks_what_training_masks(tmp_path):
    """Half of the ids are padding: neither loss counts them."""
    np.save(tmp_path / "t.npy", np.tile(np.array([5, 63], dtype=np.uint16), 2000))
    settings = ["data=tokens", "data.train_files=[t.npy]", "data.val_ratio=0.2"]
    settings += ["train.max_steps=2", "optimizer.lr=1e-9"]
    row = train(tmp_path, "masked", *settings, "data.ignore_id=63").rows()[-1]
    assert row["target_tokens"] == 8 * 6
    # the only target is 5, after 63
    assert row["val/loss"] == pytest.approx(row["train/loss"], rel=0.02)
    assert "val/bits_per_byte" not in row  # what made these ids is not known
    whole = train(tmp_path, "whole", *settings).rows()[-1]
    assert abs(whole["val/loss"] - row["val/loss"]) > 1e-5


def test_a_step_is_saved_once(tmp_path):
    """A signal while a checkpoint is being committed finds it done."""
    hooks = ["--allow=own", "hooks=[own.hooks.note,own.faults.act]", "checkpoint.every=2"]
    chosen = ["train", *TINY, *SYNTHETIC, *hooks, "hydra.run.dir=run"]
    result = ends(tmp_path, *chosen, code=75, FAULT_PLAN="saved-4:term")
    assert (tmp_path / "events.txt").read_text().count("saved 4") == 1
    assert "llmexp resume run --allow own" in result.out
    assert result.json("status.json")["summary"]["tokens_seen"] == 4 * 96
