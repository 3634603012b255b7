"""Replay recorded runs and sweeps: rows, checkpoints, status, `--json` and exit codes stay as they
were.

`LLMEXP_RECORD_GOLDEN=1 pytest tests/golden` records them anew, for a change that is meant to alter
them. On the machine that recorded them (same processor, same torch) every figure is equal to the
last bit; on another one figures agree within the tolerance of the case, and digests of checkpoints
are left out.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import TINY, llmexp

RECORDED = Path(__file__).parent / "recorded"
TIMED = re.compile(
    r"(_time|outside_share|per_sec|per_sec_per_rank|mfu|memory.*|eta|age_s|bytes|updated|started|ended|pid|host)$"
)

FILES = "data.train_files=[train.npy]"
BASE = [
    *TINY[:-1], "data=tokens", FILES, "train.log_every=1", "train.eval_every=4",
    "data.val_ratio=0.1",
    "optimizer.lr=0.02", "schedule.warmup_steps=2", "checkpoint.every=4", "train.data_digest=true",
]  # fmt: skip
CUT = ["batch.real_batch_size=16", "batch.micro_batch_size=4"]
OWN_MODEL = """
from torch import nn

class Bigram(nn.Module):
    def __init__(self, vocab_size, width):
        super().__init__()
        self.table = nn.Embedding(vocab_size, width)
        self.out = nn.Linear(width, vocab_size)

    def forward(self, tokens_bt):
        return self.out(self.table(tokens_bt))
"""
OWN_CONFIG = "_target_: bigram.Bigram\nvocab_size: null\nwidth: 12\n"


def run(*more: str) -> list[str]:
    return ["train", *BASE, "hydra.run.dir=run", *more]


FP64 = run("precision=fp64", *CUT)
OWN = ["train", "--config-dir", "own", "--allow", "bigram", "model=bigram",
       *(knob for knob in FP64[1:] if "model" not in knob)]  # fmt: skip
TWO = ["parallelism.nproc_per_node=2", "train.max_steps=6"]
GRID = ["batch.gradient_accumulation_steps=1,2", "clip.max_norm=0.5,1.0", "train.seed=1,2"]
SWEEP = ["train", "-m", *BASE, "precision=fp64", "hydra.sweep.dir=sweep"]
LLAMA = ["model=llama_100m", "model.n_layers=2", "model.n_heads=2", "model.n_kv_heads=1",
         "model.d_model=16", "model.d_ff=24", "model.max_position_embeddings=32"]  # fmt: skip

# Each: the commands in turn, and the relative tolerance on another machine than the recording one.
CASES: dict[str, tuple[list[list[str]], float]] = {
    "fp64": ([[*FP64, "train.max_epochs=1.3"]], 1e-9),
    "fp32": ([run("precision=fp32", *CUT, "train.max_epochs=1.3")], 1e-2),
    "bf16_llama": ([run("precision=bf16", *CUT, *LLAMA, "train.max_steps=6")], 0.2),
    "fp16_skips": ([run("precision=fp16", "precision.init_scale=1e7", *CUT, "train.max_steps=6")],
    0.2),
    "ddp": ([[*FP64, "parallelism=ddp", *TWO]], 1e-9),
    "fsdp": ([[*FP64, "parallelism=fsdp", *TWO]], 1e-9),
    "tail_dropped": ([[*FP64, "train.tail=drop", "train.max_epochs=1.3"]], 1e-9),
    "masked": ([[*FP64, "data.ignore_id=10", "train.max_steps=6"]], 1e-9),
    "resumed": ([[*FP64, "train.max_steps=9", "train.stop_step=5"], ["resume", "run"]], 1e-9),
    "muon": ([[*FP64, "optimizer=muon", "clip=value", "clip.max_value=0.1", "train.max_steps=6"]],
    1e-9),
    "own_model": ([[*OWN, "train.max_steps=6"]], 1e-9),
    "diverged": ([[*FP64, "optimizer.lr=1e200", "train.max_steps=6"]], 1e-9),
    "refused": ([run("batch.real_batch_size=7", "batch.micro_batch_size=2"),
    run("model.n_haeds=3")], 1e-9),
    "sweep_grid": (
        [
            [*SWEEP, *GRID, "batch.micro_batch_size=4", "train.max_tokens=960"],
            ["compare", "sweep", "--json"],
            ["runs", "sweep", "--json"],
        ],
        1e-9,
    ),
    "sweep_halving": (
        [
            [*SWEEP, "optimizer.lr=0.001,0.01,0.02,0.1", "train.max_steps=8",
            "batch.real_batch_size=8",
             "sweep.halving=0.5"],
            ["compare", "sweep", "--json"],
        ],
        1e-9,
    ),
}  # fmt: skip


def machine() -> dict[str, str]:
    """Name what decides the last bit of a figure."""
    names = {
        line
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith(("model name", "flags"))
    }
    processor = hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()
    return {"torch": torch.__version__, "machine": platform.machine(), "processor": processor}


def steady(found: Any, folder: Path) -> Any:
    """Leave out what differs from run to run: times, processes, places."""
    if isinstance(found, dict):
        return {k: steady(v, folder) for k, v in found.items() if not TIMED.search(k)}
    if isinstance(found, list):
        return [steady(v, folder) for v in found]
    return found.replace(str(folder), "HERE") if isinstance(found, str) else found


def produce(folder: Path, commands: list[list[str]]) -> dict[str, Any]:
    """Run the commands in `folder`: their exit codes, JSON, and the run folders that they leave."""
    (folder / "own" / "model").mkdir(parents=True)
    (folder / "own" / "model" / "bigram.yaml").write_text(OWN_CONFIG)
    (folder / "bigram.py").write_text(OWN_MODEL)
    results = [llmexp(*command, cwd=folder) for command in commands]
    printed = [
        steady(json.loads(r.out), folder)
        for r, command in zip(results, commands, strict=True)
        if "--json" in command
    ]
    found: dict[str, Any] = {"exit_codes": [r.code for r in results], "json": printed, "runs": {}}
    for path in sorted(folder.rglob("run.json")):
        found["runs"][str(path.parent.relative_to(folder))] = run_folder(path.parent, folder)
    return found


def run_folder(path: Path, folder: Path) -> dict[str, Any]:
    manifests = {
        p.parent.name: json.loads(p.read_text())
        for p in sorted(path.glob("checkpoints/*/manifest.json"))
    }
    return {
        "rows": [
            steady(json.loads(line), folder)
            for line in (path / "metrics.jsonl").read_text().splitlines()
        ],
        "status": steady(json.loads((path / "status.json").read_text()), folder),
        "digests": {name: manifest["digest"] for name, manifest in manifests.items()},
        "run_keys": sorted(json.loads((path / "run.json").read_text())),
        "files": sorted(
            {
                re.sub("^logs/.*", "logs/", str(p.relative_to(path)))
                for p in path.rglob("*")
                if p.is_file()
            }
        ),
    }


def differences(found: Any, recorded: Any, rtol: float, where: str = "") -> list[str]:
    """Name the places where two results differ by more than `rtol` of the recorded figure; 0 asks
    for equal bits."""
    if isinstance(recorded, dict) and isinstance(found, dict):
        keys = sorted({*recorded, *found})
        missing = object()
        return [
            d
            for k in keys
            for d in differences(
                found.get(k, missing), recorded.get(k, missing), rtol, f"{where}/{k}"
            )
        ]
    if isinstance(recorded, list) and isinstance(found, list) and len(recorded) == len(found):
        pairs = zip(found, recorded, strict=True)
        return [
            d for i, (f, r) in enumerate(pairs) for d in differences(f, r, rtol, f"{where}/{i}")
        ]
    numbers = all(isinstance(x, float) for x in (found, recorded))
    same = found == recorded or (
        numbers and rtol > 0 and math.isclose(found, recorded, rel_tol=rtol, abs_tol=rtol)
    )
    return [] if same else [f"{where}: {found!r}, recorded {recorded!r}"]


@pytest.mark.parametrize("name", CASES)
def test_recorded_runs_and_sweeps_come_out_as_they_were(name, tokens, tmp_path):
    commands, rtol = CASES[name]
    (tmp_path / "train.npy").write_bytes(tokens.read_bytes())
    found = produce(tmp_path, commands)
    path = RECORDED / f"{name}.json"
    if os.environ.get("LLMEXP_RECORD_GOLDEN"):
        path.write_text(json.dumps({"machine": machine(), **found}, indent=1) + "\n")
    recorded = json.loads(path.read_text())
    here = recorded.pop("machine") == machine()
    if not here:
        for run in [*recorded["runs"].values(), *found["runs"].values()]:
            del run["digests"]
    assert differences(found, recorded, 0.0 if here else rtol) == []
