"""Replay recorded runs and sweeps: rows, weights, status, `--json` and exit codes stay as they
were, within the tolerance of each case, on any machine.

`LLMEXP_RECORD_GOLDEN=1 pytest tests/golden` records them anew, for a change that is meant to alter
them. `make same BASE=<commit>` compares two checkouts on one machine, bit by bit (same.py).

Where the tolerances come from. Two machines differ in the last bit of each operation: their kernels
add in other orders. The initial weights are given (FIRST: uniform numbers of PCG64, which are exact
on every machine; drawing them is not). So a figure after n steps differs by about

    n x sqrt(K) x D

K: the terms of the longest sum (the 192 targets of a window); D: the change of the figure where one
rounding is made in each parameter, which a twin makes (train.twin). The roundings of a step act as
another twin, sqrt(K) times as large. `test_a_twin_stays_within_the_tolerance` holds D of each case
below tolerance / (n sqrt(K)): it is at most 1e-14 in fp64 after 9 steps, and 7e-7 in fp32 after 4.

Arithmetic in 16 bits (bf16, fp16, Muon's orthogonalisation) is no such case: after some updates a
figure is the machine's own. There the counts, the skipped steps, the scales and the data of all
rows are compared, and loss and norm of the first steps alone. They come from products of 16-bit
numbers with a relative rounding of u (2^-8 or 2^-11), some ten in a row from the embedding to the
logits (two layers of four matrices, and the head), whose errors are no larger than 10 u.
"""

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.conftest import TINY, llmexp

RECORDED = Path(__file__).parent / "recorded"
TIMED = re.compile(
    r"(_time|overhead_share|per_sec|per_sec_per_rank|mfu|memory.*|eta|age_s|bytes|updated|started|ended|pid|host)$"
)

FILES = "data.train_files=[train.npy]"
BASE = [
    *TINY[:-1], "data=tokens", FILES, "train.log_every=1", "train.eval_every=4",
    "data.val_ratio=0.1",
    "optimizer.lr=0.02", "schedule.warmup_steps=2", "checkpoint.every=4", "train.data_digest=true",
]  # fmt: skip
CUT = ["batch.real_batch_size=16", "batch.micro_batch_size=4"]
OWN_MODEL = """
import numpy as np
import torch
from torch import nn

class Bigram(nn.Module):
    def __init__(self, vocab_size, width):
        super().__init__()
        self.table = nn.Embedding(vocab_size, width)
        self.out = nn.Linear(width, vocab_size)
        draw = np.random.default_rng(0)
        for p in self.parameters():
            p.data.copy_(torch.from_numpy(draw.random(tuple(p.shape)) - 0.5) / 10)

    def forward(self, tokens_bt):
        return self.out(self.table(tokens_bt))
"""
OWN_CONFIG = "_target_: bigram.Bigram\nvocab_size: null\nwidth: 12\n"


def run(*more: str) -> list[str]:
    return ["train", *BASE, "hydra.run.dir=run", *more]


GIVEN = ["model.init_from=first"]
FP64 = run("precision=fp64", *CUT, *GIVEN)
OWN = ["train", "--config-dir", "own", "--allow", "bigram", "model=bigram",
       *(knob for knob in FP64[1:] if "model" not in knob)]  # fmt: skip
TWO = ["parallelism.nproc_per_node=2", "train.max_steps=6"]
GRID = ["batch.gradient_accumulation_steps=1,2", "clip.max_norm=0.5,1.0", "train.seed=1,2"]
SWEEP = ["train", "-m", *BASE, *GIVEN, "precision=fp64", "hydra.sweep.dir=sweep"]
LLAMA = ["model=llama_100m", "model.n_layers=2", "model.n_heads=2", "model.n_kv_heads=1",
         "model.d_model=16", "model.d_ff=24", "model.max_position_embeddings=32"]  # fmt: skip

# The arithmetic of 16 bits: units of rounding, and the steps whose loss and norm are compared.
BF16, FP16 = 2.0**-8, 2.0**-11
FIRST_STEPS = 2
MOST_TERMS = 192  # K above
# What stays as it is in the rows of a run with arithmetic of 16 bits.
COUNTS = ("step", "tokens_seen", "epoch", "lr", "amp", "loss_scale", "skipped", "skipped_steps",
          "target_tokens", "data_digest")  # fmt: skip


@dataclass(frozen=True)
class Case:
    """Commands in turn, the optimizer steps of their longest run, and the tolerance of a figure,
    relative and absolute. `coarse`: only the first steps are compared to it."""

    commands: list[list[str]]
    steps: int
    tolerance: float = 1e-11
    coarse: bool = False


CASES: dict[str, Case] = {
    "fp64": Case([[*FP64, "train.max_epochs=1.3"]], 4),
    "fp32": Case([run("precision=fp32", *CUT, *GIVEN, "train.max_epochs=1.3")], 4, 1e-4),
    "bf16_llama": Case(
        [run("precision=bf16", *CUT, *LLAMA, "train.max_steps=6")], 6, 10 * BF16, True
    ),
    "fp16_skips": Case(
        [run("precision=fp16", "precision.init_scale=1e7", *CUT, *GIVEN, "train.max_steps=6")],
        6, 10 * FP16, True,
    ),
    "ddp": Case([[*FP64, "parallelism=ddp", *TWO]], 6),
    "fsdp": Case([[*FP64, "parallelism=fsdp", *TWO]], 6),
    "tail_dropped": Case([[*FP64, "train.tail=drop", "train.max_epochs=1.3"]], 3),
    "masked": Case([[*FP64, "data.ignore_id=10", "train.max_steps=6"]], 6),
    "resumed": Case([[*FP64, "train.max_steps=9", "train.stop_step=5"], ["resume", "run"]], 9),
    "muon": Case(
        [[*FP64, "optimizer=muon", "clip=value", "clip.max_value=0.1", "train.max_steps=6"]],
        6, 10 * BF16, True,
    ),
    "own_model": Case([[*OWN, "train.max_steps=6"]], 6),
    "diverged": Case([[*FP64, "optimizer.lr=1e200", "train.max_steps=6"]], 6),
    "refused": Case(
        [run("batch.real_batch_size=7", "batch.micro_batch_size=2"), run("model.n_haeds=3")], 0
    ),
    "sweep_grid": Case(
        [
            [*SWEEP, *GRID, "batch.micro_batch_size=4", "train.max_tokens=960"],
            ["compare", "sweep", "--json"],
            ["runs", "sweep", "--json"],
        ],
        20,
    ),
    "sweep_halving": Case(
        [
            [*SWEEP, "optimizer.lr=0.001,0.01,0.02,0.1", "train.max_steps=8",
            "batch.real_batch_size=8", "sweep.halving=0.5"],
            ["compare", "sweep", "--json"],
        ],
        8,
    ),
}  # fmt: skip


EXIT_CODES = {"diverged": 3, "refused": 2}


def write_first(folder: Path) -> None:
    """Write the initial weights as a folder of GPT-2: uniform in +-0.05, norms at 1."""
    layers, width, inner, ids, positions = 2, 16, 24, 320, 32
    parts = {
        "ln_1": (width,), "attn.c_attn": (width, 3 * width), "attn.c_proj": (width, width),
        "ln_2": (width,), "mlp.c_fc": (width, inner), "mlp.c_proj": (inner, width),
    }  # fmt: skip
    shapes = {"wte.weight": (ids, width), "wpe.weight": (positions, width)}
    named = [(f"h.{n}.{part}", shape) for n in range(layers) for part, shape in parts.items()]
    for name, shape in [*named, ("ln_f", (width,))]:
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[-1:]}
    draw = np.random.default_rng(0)
    tensors = {}
    for name, shape in shapes.items():
        at = 1.0 if re.search(r"ln_.\.weight", name) else 0.0
        drawn = at + (draw.random(shape) - 0.5) / 10
        tensors[f"transformer.{name}"] = drawn.astype(np.float32)
    config = {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": ids,
        "n_positions": positions, "n_ctx": positions, "n_layer": layers, "n_head": 2,
        "n_embd": width, "n_inner": inner, "activation_function": "gelu_new", "resid_pdrop": 0.0,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0, "dtype": "float32",
    }  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")


def steady(found: Any, folder: Path) -> Any:
    """Leave out what differs from run to run: times, processes, places."""
    if isinstance(found, dict):
        return {k: steady(v, folder) for k, v in found.items() if not TIMED.search(k)}
    if isinstance(found, list):
        return [steady(v, folder) for v in found]
    return found.replace(str(folder), "HERE") if isinstance(found, str) else found


def produce(folder: Path, commands: list[list[str]], **env: str) -> dict[str, Any]:
    """Run the commands in `folder`: their exit codes, JSON, and the run folders that they leave."""
    (folder / "own" / "model").mkdir(parents=True)
    (folder / "own" / "model" / "bigram.yaml").write_text(OWN_CONFIG)
    (folder / "bigram.py").write_text(OWN_MODEL)
    write_first(folder / "first")
    results = [llmexp(*command, cwd=folder, **env) for command in commands]
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
    rows = (path / "metrics.jsonl").read_text().splitlines()
    files = (str(p.relative_to(path)) for p in path.rglob("*") if p.is_file())
    return {
        "rows": [steady(json.loads(line), folder) for line in rows],
        "status": steady(json.loads((path / "status.json").read_text()), folder),
        "weights": {p.name: sums(p) for p in sorted(path.glob("checkpoints/*"))},
        "run_keys": sorted(json.loads((path / "run.json").read_text())),
        "files": sorted({re.sub("^logs/.*", "logs/", name) for name in files}),
    }


def sums(checkpoint: Path) -> dict[str, float]:
    """Return what tells one set of weights from another: their sum, and that of their squares."""
    files = [load_file(path) for path in checkpoint.glob("model*.safetensors")]
    tensors = [t.astype(np.float64) for file in files for t in file.values()]
    squares = sum(float((t * t).sum()) for t in tensors)
    return {"sum": sum(float(t.sum()) for t in tensors), "squares": squares}


def comparable(found: Mapping[str, Any], coarse: bool) -> dict[str, Any]:
    """Return what a recording is compared by: of a coarse case its counts and its first steps."""
    if not coarse:
        return dict(found)
    runs = {}
    for name, run in found["runs"].items():
        rows = [{k: row[k] for k in COUNTS if k in row} for row in run["rows"]]
        for row, whole in zip(rows[:FIRST_STEPS], run["rows"], strict=False):
            row |= {k: whole[k] for k in ("train/loss", "grad_norm") if k in whole}
        kept = {key: run[key] for key in ("run_keys", "files")}
        runs[name] = {"rows": rows, "state": run["status"]["state"], **kept}
    return {"exit_codes": found["exit_codes"], "runs": runs}


def leaves(found: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the place and the value of each figure in a result."""
    if not found or not isinstance(found, (dict, list)):
        yield where, found
        return
    for key, value in found.items() if isinstance(found, dict) else enumerate(found):
        yield from leaves(value, f"{where}/{key}")


def differences(found: Any, recorded: Any, rtol: float) -> list[str]:
    """Name the places where two results differ by more than `rtol` of the recorded figure; 0 asks
    for equal bits."""

    def same(a: Any, b: Any) -> bool:
        numbers = isinstance(a, float) and isinstance(b, float)
        return a == b or (rtol > 0 and numbers and math.isclose(a, b, rel_tol=rtol, abs_tol=rtol))

    now, before = dict(leaves(found)), dict(leaves(recorded))
    pairs = {k: (now.get(k, "absent"), before.get(k, "absent")) for k in sorted({*now, *before})}
    return [f"{k}: {a!r}, before {b!r}" for k, (a, b) in pairs.items() if not same(a, b)]


@pytest.mark.parametrize("name", CASES)
def test_recorded_runs_and_sweeps_come_out_as_they_were(name, tokens, tmp_path):
    case = CASES[name]
    (tmp_path / "train.npy").write_bytes(tokens.read_bytes())
    found = comparable(produce(tmp_path, case.commands), case.coarse)
    assert found["exit_codes"][-1] == EXIT_CODES.get(name, 0)
    path = RECORDED / f"{name}.json"
    if os.environ.get("LLMEXP_RECORD_GOLDEN"):
        path.write_text(json.dumps(found, indent=1) + "\n")
    assert differences(found, json.loads(path.read_text()), case.tolerance) == []


# A sweep trains runs as "fp64" does.
SINGLE = [n for n, case in CASES.items() if case.steps and not case.coarse and "sweep" not in n]
SLOW = [pytest.param(n, marks=pytest.mark.slow) for n in SINGLE if n not in ("fp64", "fp32")]


@pytest.mark.parametrize("name", ["fp64", "fp32", *SLOW])
def test_a_twin_stays_within_the_tolerance(name, tokens, tmp_path):
    """One rounding in each parameter changes no figure by more than tolerance / (n sqrt(K))."""
    case = CASES[name]
    (tmp_path / "train.npy").write_bytes(tokens.read_bytes())
    commands = [[*c, "train.twin=1"] if c[0] == "train" else c for c in case.commands]
    found = produce(tmp_path, commands)
    recorded = json.loads((RECORDED / f"{name}.json").read_text())
    most = case.tolerance / (case.steps * math.sqrt(MOST_TERMS))
    for run, there in zip(found["runs"].values(), recorded["runs"].values(), strict=True):
        assert differences(run["rows"], there["rows"], most) == []
        assert differences(run["weights"], there["weights"], most) == []


@pytest.mark.parametrize(
    ("name", "at", "key", "change"),
    [
        ("fp64", -1, "train/loss", 1.001),
        ("fp64", -1, "grad_norm", 1.001),
        ("fp64", -1, "skipped", True),
        ("fp16_skips", 0, "skipped", False),
        ("fp16_skips", 0, "loss_scale", 2.0),
        ("fp16_skips", 0, "train/loss", 1.01),
    ],
)
def test_a_change_is_a_difference(name, at, key, change):
    """As a loss weight that is off by 1e-3, or a step that is skipped."""
    recorded, found = (json.loads((RECORDED / f"{name}.json").read_text()) for _ in range(2))
    row = found["runs"]["run"]["rows"][at]
    row[key] = row[key] * change if isinstance(change, float) else change
    assert len(differences(found, recorded, CASES[name].tolerance)) == 1
