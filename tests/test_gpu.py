"""On a CUDA device: the same numbers as on the CPU, and no host wait between rows. Skips itself
without one."""

from __future__ import annotations

import subprocess

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import Result, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SETTINGS = [
    "data=synthetic",
    "data.n_tokens=4000",
    "train.max_steps=10",
    "train.log_every=5",
    "batch.micro_batch_size=4",
]


def test_float64_on_the_gpu_equals_the_cpu(tmp_path):
    runs = [
        train(
            tmp_path,
            device,
            *SETTINGS,
            f"train.device={device}",
            "precision=fp64",
            "batch.real_batch_size=8",
        )
        for device in ("cpu", "cuda")
    ]
    for a, b in zip(*(run.rows() for run in runs), strict=True):
        # float64 in another order of summation: 2**-53 sqrt(a few thousand terms), amplified over
        # ten Adam steps.
        assert a["train/loss"] == pytest.approx(b["train/loss"], rel=1e-11)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-11)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_steps_without_a_row_do_not_wait_for_the_device(tmp_path, precision):
    """torch's sync debug mode raises at any wait; hooks switch it on between the rows only."""
    (tmp_path / "syncs.py").write_text(
        "import torch\n"
        "def watch(event, context):\n"
        "    quiet = context.step % 5 not in (0, 1)\n"
        "    torch.cuda.set_sync_debug_mode('error' if event == 'step_start' and quiet else "
        "'default')\n"
    )
    train(
        tmp_path, "run", "--allow", "syncs", "hooks=[syncs.watch]", *SETTINGS,
        f"precision={precision}",
        "train.device=cuda", "train.eval_every=null",
    )  # fmt: skip


def test_resume_is_bit_equal(tmp_path):
    settings = [
        *SETTINGS,
        "train.device=cuda",
        "model.dropout=0.1",
        "checkpoint.every=5",
        "precision=fp16",
    ]
    whole = train(tmp_path, "whole", *settings)
    subprocess.run(["cp", "-r", str(whole.folder), str(tmp_path / "cut")], check=True)
    cut = Result(0, "", "", tmp_path / "cut")
    subprocess.run(["rm", "-r", str(cut.checkpoint(10))], check=True)
    (cut.folder / "status.json").write_text('{"state": "running"}')
    train(tmp_path, "cut", *settings, "checkpoint.resume=must")
    first, second = (load_file(run.checkpoint(10) / "model.safetensors") for run in (whole, cut))
    assert all(torch.equal(first[k], second[k]) for k in first)
