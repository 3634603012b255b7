"""What a run writes and does besides its arithmetic: rows and the tracker, faults, traces, compile,
reductions."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from llmexp.system import hardware
from llmexp.system.devices import device_named
from tests.conftest import HANG_S, ROOT, TINY, Result, environment, llmexp, train

SYNTHETIC = [
    "data=synthetic",
    "data.n_tokens=4000",
    "train.max_steps=12",
    "train.log_every=5",
    "train.eval_every=4",
]


def test_rows_come_at_their_steps_and_say_what_they_are(tmp_path):
    cut_short = ["train.profile_start=11", "train.profile_steps=5"]  # a trace, by the end
    result = train(tmp_path, "run", *SYNTHETIC, "metrics.picture=true", *cut_short)
    assert (result.folder / "trace_step_00000011.json").stat().st_size > 1000
    rows = result.rows()
    assert [r["step"] for r in rows] == [4, 5, 8, 10, 12]
    assert [r["step"] for r in rows if "val/loss" in r] == [4, 8, 12]
    run = result.json("run.json")
    for row in rows:
        assert row["tokens_seen"] == row["step"] * run["tokens_per_step"]
        assert row["epoch"] == row["step"] * run["real_batch_size"] / run["train_sequences"]
        assert row["tokens_per_sec"] * row["step_time"] == pytest.approx(run["tokens_per_step"])
        assert row["tflops_per_sec_per_rank"] == pytest.approx(
            run["flops_per_token"] * row["tokens_per_sec"] / 1e12
        )
        assert "mfu" not in row  # no peak is known for a CPU
        assert 0 < row["data_time"] < row["step_time"]
    assert result.json("status.json")["summary"]["best val/loss"] == min(
        r["val/loss"] for r in rows if "val/loss" in r
    )
    assert (result.folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "\x1b" not in result.out + (result.folder / "train.log").read_text()


def test_looking_does_not_change_the_run(tmp_path):
    """Rows of the same steps are bit-equal with and without evaluation, samples, saves, digests and
    a trace."""
    quiet = train(
        tmp_path,
        "quiet",
        *SYNTHETIC,
        "train.eval_every=null",
        "model.dropout=0.2",
        "train.log_every=4",
    )
    busy = train(
        tmp_path, "busy", *SYNTHETIC, "model.dropout=0.2", "train.log_every=1",
        "train.sample_every=3",
        "train.sample_tokens=5", "checkpoint.every=2", "train.data_digest=true",
        "train.profile_start=2",
        "train.eval_every=2",
    )  # fmt: skip
    seen = {r["step"]: r for r in busy.rows()}
    for row in quiet.rows():
        for key in ("train/loss", "grad_norm", "lr", "tokens_seen"):
            assert row[key] == seen[row["step"]][key]
    assert quiet.rows()[-1]["weight_norm"] == busy.rows()[-1]["weight_norm"]
    trace = json.loads((busy.folder / "trace_step_00000002.json").read_text())
    assert any("adamw" in str(e.get("name", "")).lower() for e in trace["traceEvents"])
    steps = {
        e["name"] for e in trace["traceEvents"] if str(e.get("name", "")).startswith("ProfilerStep")
    }
    assert len(steps) == 3


def test_ddp_reduces_once_a_step(tmp_path):
    """The gradient all-reduces of two ranks, counted in rank 0's trace of two steps of four
    micro-batches each."""
    result = train(
        tmp_path, "run", *SYNTHETIC, "parallelism=ddp", "parallelism.nproc_per_node=2",
        "train.max_steps=4",
        "batch.gradient_accumulation_steps=4", "batch.micro_batch_size=2",
        "train.profile_start=2",
        "train.profile_steps=2", "train.eval_every=null", "train.log_every=100",
    )  # fmt: skip
    trace = json.loads((result.folder / "trace_step_00000002.json").read_text())
    events = [
        e for e in trace["traceEvents"] if e.get("name") == "gloo:all_reduce" and e.get("ph") == "X"
    ]
    # Each step: target count, loss, the agreement on signals, and DDP's buckets: one for a model
    # this small, two in the first steps before DDP has rebuilt them.
    assert 4 * 2 <= len(events) <= 5 * 2, len(events)


def bad_model(tmp_path) -> list[str]:
    (tmp_path / "bad.py").write_text(
        "import torch\n"
        "from llmexp.models.gpt2 import GPT2\n"
        "class Bad(GPT2):\n"
        "    calls = 0\n"
        "    def forward(self, tokens):\n"
        "        logits = super().forward(tokens)\n"
        "        Bad.calls += self.training\n"
        "        return logits * (float('nan') if Bad.calls == 14 else 1.0)\n"
    )
    return ["--allow", "bad", "model._target_=bad.Bad", "batch.gradient_accumulation_steps=2"]


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path):
    """The second micro-batch of step 7: said by step and quantity, no row, nothing saved, the
    checkpoint intact."""
    result = llmexp("train", *TINY, *SYNTHETIC, *bad_model(tmp_path), "checkpoint.every=3",
    "train.log_every=1",
                    "hydra.run.dir=run", cwd=tmp_path)  # fmt: skip
    assert result.code == 3
    assert (
        "step 7 has a loss that is not finite on rank 0; the update was not applied" in result.err
    )
    assert "the last checkpoint is step_00000006; to go on: llmexp resume run" in result.err
    assert "Traceback" not in result.err
    assert "the loss had grown" not in result.err
    assert [r["step"] for r in result.rows()] == [1, 2, 3, 4, 5, 6]
    assert "NaN" not in (result.folder / "metrics.jsonl").read_text()
    status = result.json("status.json")
    assert (status["state"], status["exit_code"]) == ("failed", 3)
    assert not list((result.folder / "checkpoints").glob("*07"))


def test_a_loss_that_grows_beyond_all_bounds_ends_with_a_hint(tmp_path):
    result = llmexp("train", *TINY, *SYNTHETIC, "optimizer=sgd", "optimizer.lr=1e4", "clip=none",
    "schedule=constant",
                    "train.max_steps=50", "train.log_every=1", "hydra.run.dir=run",
                    cwd=tmp_path)  # fmt: skip
    assert result.code == 3
    losses = [row["train/loss"] for row in result.rows()]
    assert (
        f"the loss had grown from {min(losses):.4g} to {losses[-1]:.4g} before: a smaller "
        "optimizer.lr" in result.err
    )


def goes_on(failed: Result, knob: str, folder: Path) -> None:
    """Assert that the command of a failure goes on beyond it, at the scale that it fell to."""
    command = failed.err.rpartition("to go on: llmexp ")[2].strip()
    assert command == f"resume {failed.folder.name} {knob}"
    again = llmexp(*command.split(), cwd=folder)
    assert "its update was skipped" in again.out
    skips = [int(n) for n in re.findall(r"step (\d+) has a gradient norm", again.out)]
    assert max(skips) > max(int(n) for n in re.findall(r"step (\d+) has a", failed.out))


@pytest.mark.parametrize("budget", ["train.max_steps=4", "train.max_tokens=384"])
def test_fp16_whose_scale_still_falls_is_given_more_steps(tmp_path, budget):
    wide = [*SYNTHETIC, "precision=fp16", "precision.init_scale=1e30", "train.log_every=1"]
    wide = [w for w in wide if not w.startswith("train.max_steps")]
    run = llmexp("train", *TINY, *wide, budget, "hydra.run.dir=wide", cwd=tmp_path)
    assert run.code == 3
    assert f"the loss scale fell to {1e30 / 16:g}" in run.err
    assert "fork" not in run.err
    goes_on(run, "train.max_steps=8", tmp_path)


def test_fp16_overflow_skips_and_a_hopeless_scale_stops(tmp_path):
    overflowing = [*SYNTHETIC, "precision=fp16", f"precision.init_scale={2**40}"]
    each = ["train.log_every=1", "train.eval_every=1", "train.eval_tokens=24"]
    result = train(tmp_path, "run", *overflowing, *each, "train.max_steps=40")
    rows = result.rows()
    skipped = [r["skipped"] for r in rows]
    first = skipped.index(False)
    assert first > 0
    assert all(skipped[:first])
    assert [r["loss_scale"] for r in rows[: first + 1]] == [
        2.0 ** (40 - i) for i in range(first + 1)
    ]
    # that of all skipped steps; an evaluation shows it at each step
    assert len({r["weight_norm"] for r in rows[:first]}) == 1
    assert rows[first]["weight_norm"] != rows[0]["weight_norm"]
    assert result.out.count("overflowed fp16; its update was skipped") == sum(skipped)
    assert rows[first]["lr"] == rows[0]["lr"]  # the schedule waited
    assert all("train/loss" in r and "grad_norm" not in r for r in rows[:first])
    more = ["train.max_consecutive_skips=3", "hydra.run.dir=stopped"]
    stopped = llmexp("train", *TINY, *overflowing, *more, cwd=tmp_path)
    assert stopped.code == 3
    assert "4 updates in a row were skipped, the last at step 4" in stopped.err
    assert "no checkpoint yet" in stopped.err
    goes_on(stopped, "train.max_consecutive_skips=6", tmp_path)


TRACED = """
import torch

torch._logging.set_logs(recompiles=True)
if __name__ == "traced":  # as compiled, but for the C++, which takes its time to build
    compiled = torch.compile
    torch.compile = lambda *a, **k: compiled(*a, **{**k, "backend": "aot_eager", "mode": None})

def hook(event, context):
    pass
"""


@pytest.mark.parametrize(
    ("model", "hook"),
    [
        ("gpt_tiny", "traced"),
        pytest.param("gpt_tiny", "built", marks=pytest.mark.slow),
        pytest.param("llama_100m", "built", marks=pytest.mark.slow),
    ],
)
def test_compile_computes_the_same_without_recompiling(tmp_path, model, hook):
    """Tail and evaluation included: every micro-batch has the same shape."""
    (tmp_path / f"{hook}.py").write_text(TRACED)
    sizes = [o for o in TINY if o.startswith(("model.n_layers", "batch", "tracker", "train"))]
    shape = ["model.n_heads=2", "model.d_model=16", "model.d_ff=24"]
    shape += ["model.n_kv_heads=1"] if model == "llama_100m" else []
    settings = [f"model={model}", *sizes, *shape, *SYNTHETIC, "precision=fp32",
    "train.max_steps=null",
    "train.max_epochs=0.1", "--allow", hook, f"hooks=[{hook}.hook]",
                "batch.micro_batch_size=4", "batch.gradient_accumulation_steps=2"]  # fmt: skip
    runs = []
    for name, compiled in (("eager", "false"), ("compiled", "true")):
        run = llmexp(
            "train", *settings, f"train.compile={compiled}", f"hydra.run.dir={name}", cwd=tmp_path
        )
        assert run.code == 0, run.err
        runs.append(run)
    eager, compiled_run = runs
    assert eager.json("run.json")["tail_sequences"] > 0
    # One graph, which serves evaluation too.
    assert "Recompiling function" not in compiled_run.err
    for a, b in zip(eager.rows(), compiled_run.rows(), strict=True):
        # fp32 in another order of operations: 6 roundoffs sqrt(192) as in test_invariance, and
        # Adam's first steps move entries at the noise level by lr; 1e-4 covers a handful of steps
        # of 1e-3.
        assert a["train/loss"] == pytest.approx(b["train/loss"], rel=1e-4)
        assert a["target_tokens"] == b["target_tokens"]


@pytest.mark.parametrize(
    ("name", "precision", "tflops"),
    [
        ("NVIDIA H200", "bf16", 989),
        ("NVIDIA H100 80GB HBM3", "bf16", 989),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A100-SXM4-80GB", "fp64", None),
        ("NVIDIA A10G", "bf16", 70),
        ("NVIDIA A10", "bf16", None),
        ("NVIDIA H200 NVL", "bf16", 835),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", None),
        ("Tesla V100-SXM2-32GB", "fp16", 125),
        ("Tesla V100-PCIE-32GB", "fp16", None),
        ("NVIDIA RTX A1000", "bf16", None),
        ("NVIDIA GeForce RTX 9999", "bf16", None),
    ],
)
def test_unknown_gpus_have_no_peak(monkeypatch, name, precision, tflops):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(hardware, "memory_bytes", lambda device: 80 << 30)
    peak = hardware.peak_flops(torch.device("cuda"), precision)
    assert peak == (None if tflops is None else tflops * 1e12)


@pytest.mark.parametrize(
    ("name", "gib", "device"),
    [
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40"),
        ("NVIDIA A100-PCIE-40GB", 39.6, "a100-40"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "a100-80"),
        ("Tesla V100-SXM2-16GB", 15.8, "v100-16"),
        ("Tesla V100-SXM2-32GB", 31.7, "v100-32"),
        ("NVIDIA H200 NVL", 139.8, "h200-nvl"),
    ],
)
def test_a_gpu_is_known_by_its_name_and_its_memory(monkeypatch, name, gib, device):
    """`plan --measure plan.device=a100-40` asks for the very device that is there."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    properties = SimpleNamespace(total_memory=int(gib * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert hardware.accelerator(torch.device("cuda")) == device_named(device)


def test_the_run_can_be_repeated_from_its_folder_alone(tmp_path):
    result = train(tmp_path, "run", *SYNTHETIC)
    first = [r["train/loss"] for r in result.rows()]
    for name in ("metrics.jsonl", "status.json"):
        (result.folder / name).unlink()
    subprocess.run(["rm", "-r", str(result.folder / "checkpoints")], check=True)
    again = subprocess.run(
        [sys.executable, "-m", "llmexp.train", "run"], cwd=tmp_path,
        env=environment(PYTHONPATH=str(ROOT)),
        capture_output=True, text=True, timeout=HANG_S, check=False,
    )  # fmt: skip
    assert again.returncode == 0, again.stderr
    assert [r["train/loss"] for r in result.rows()] == first


def test_evaluation_masks_what_training_masks(tmp_path):
    """Half of the ids are padding: neither loss counts them, and without any target left there is
    no figure."""
    stream = np.tile(np.array([5, 63], dtype=np.uint16), 2000)
    np.save(tmp_path / "t.npy", stream)
    settings = [
        "data=tokens",
        "data.train_files=[t.npy]",
        "data.val_ratio=0.2",
        "train.max_steps=2",
    ]
    masked = train(tmp_path, "masked", *settings, "data.ignore_id=63", "optimizer.lr=1e-9")
    row = masked.rows()[-1]
    assert row["target_tokens"] == 8 * 6
    # the only target is 5, after 63
    assert row["val/loss"] == pytest.approx(row["train/loss"], rel=0.02)
    assert "val/bits_per_byte" not in row  # what made these ids is not known
    whole = train(tmp_path, "whole", *settings, "optimizer.lr=1e-9").rows()[-1]
    assert abs(whole["val/loss"] - row["val/loss"]) > 1e-5


def test_a_step_is_saved_once(tmp_path):
    """A signal while a checkpoint is being committed finds it done."""
    (tmp_path / "sig.py").write_text(
        "import os, signal\n"
        "def watch(event, context):\n"
        "    if event == 'saved':\n"
        "        print('SAVED', context.step, flush=True)\n"
        "        if context.step == 4:\n"
        "            os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    result = llmexp("train", *TINY, *SYNTHETIC, "--allow", "sig", "hooks=[sig.watch]",
    "checkpoint.every=2",
                    "hydra.run.dir=run", cwd=tmp_path)  # fmt: skip
    assert result.code == 75, result.err
    assert result.out.count("SAVED 4") == 1
    assert "llmexp resume run --allow sig" in result.out
    assert result.json("status.json")["summary"]["tokens_seen"] == 4 * 96
