"""Run folders with known contents."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from llmexp.run import Parent
from llmexp.runs import steps as records
from llmexp.runs.ledger import Ledger

STEPS = 400


def ar1(rng: np.random.Generator, n: int, r: float, runs: int = 1) -> np.ndarray:
    """Stationary AR(1) series of deviation 1, by their recursion: [runs, n]."""
    noise = rng.standard_normal((n, runs)) * np.sqrt(1 - r * r)
    x = np.empty((n, runs))
    x[0] = rng.standard_normal(runs)
    for i in range(1, n):
        x[i] = r * x[i - 1] + noise[i]
    return x.T


def write_steps(
    path: Path, losses: Sequence[float], targets: Sequence[float], rates: Sequence[float] = ()
) -> None:
    """steps.bin with these losses, targets and learning rates (usually 0.001)."""
    rates = rates or [0.001] * len(losses)
    found = zip(losses, targets, rates, strict=True)
    data = b"".join(records.STEP_RECORD.pack(loss, n, 1.5, lr) for loss, n, lr in found)
    (path / records.STEPS_BIN).write_bytes(data)


def make_run(
    path: Path,
    *,
    offset: float = 0.0,
    wobble: float = 0.002,
    steps: int = STEPS,
    seed: int = 1,
    micro: int = 8,
    accumulation: int = 1,
    max_norm: float = 1.0,
    state: str = "finished",
    own: int = 0,
    tokenizer: str = "bytes",
    val_every: int = 100,
    step_time: float = 0.5,
    facts: dict[str, Any] | None = None,
    status: dict[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """A run whose losses are those of its seed's batches, plus `offset`, plus a wobble of its own.

    `facts` and `status` are added to run.json and status.json; `clip__kind=` sets clip.kind."""
    path.mkdir(parents=True)
    real, length = micro * accumulation, 128
    config = {
        "name": path.name,
        "batch": {
            "micro_batch_size": micro,
            "gradient_accumulation_steps": accumulation,
            "real_batch_size": real,
            "sequence_length": length,
        },
        "train": {"seed": seed, "log_every": 1, "max_steps": steps},
        "data": {"_target_": "llmexp.data.sources.stdlib", "seed": 0},
        "tokenizer": {"_target_": f"llmexp.data.tokenizers.{tokenizer}"},
        "clip": {"kind": "norm", "max_norm": max_norm},
        "tracker": {"kind": "none"},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        config.setdefault(section, {})[name] = value
    (path / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    known = {
        "real_batch_size": real, "micro_batch_size": micro,
        "gradient_accumulation_steps": accumulation, "dp_size": 1,
        "tokens_per_step": real * length, "sequence_length": length, "eval_sequences": 256,
        "max_steps": steps,
        "max_tokens": steps * real * length,
        "tokenizer": tokenizer, "model": "GPT2", "device_name": "cpu",
        "data_fingerprint": {"tokenizer_sha256": tokenizer},
    }  # fmt: skip
    (path / "run.json").write_text(json.dumps(known | (facts or {})))
    step = np.arange(1, steps + 1)
    batches = 0.05 * np.random.default_rng([seed, real]).standard_normal(steps)
    mine = wobble * ar1(np.random.default_rng([seed, 77, own]), steps, 0.5)[0]
    loss = 2.5 + 3 * np.exp(-step / 80) + batches + offset + mine
    rows = []
    for i, s in enumerate(step):
        row = {
            "step": int(s),
            "tokens_seen": int(s) * real * length,
            "epoch": 0.1,
            "train/loss": float(loss[i]),
        }
        row |= {
            "lr": 0.001,
            "grad_norm": 1.5,
            "step_time": step_time,
            "tokens_per_sec": 2000.0 + own,
            "peak_memory_gib": 1.25,
        }
        if s % val_every == 0:
            val = 2.6 + 3 * float(np.exp(-s / 80)) + offset
            row |= {
                "val/loss": val,
                "val/ppl": float(np.exp(val)),
                "val/bits_per_byte": val / np.log(2),
            }
        rows.append(json.dumps(row, separators=(",", ":")))
    (path / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    write_steps(path, loss.tolist(), [real * length] * steps)
    summary = {
        "tokens_seen": steps * real * length,
        "steps": steps,
        "train_time": steps * step_time,
    }
    summary |= {
        "mean tokens_per_sec": real * length / step_time,
        "peak_memory_gib": 1.25,
        "skipped_steps": 0,
        "clipped_share": 0.25,
    }
    ended = {
        "state": state,
        "updated": 1.8e9,
        "started": 1.8e9 - 100,
        "exit_code": 0,
        "error": None,
        "summary": summary,
    }
    (path / "status.json").write_text(json.dumps(ended | (status or {})))
    return path


def parent_in(folder: str, **known: Any) -> dict[str, Any]:
    """The `parent` in a fork's run.json: a checkpoint in this folder, of step 0 by itself."""
    begin = Parent(folder, folder, 0, 0, 0, 0, order="", digest="")
    return asdict(replace(begin, **known))


def make_sweep(path: Path, points: dict[str, dict[str, Any]], swept: list[str]) -> Path:
    """A sweep's folder with its ledger; `point` of a run's settings is added to its entry there."""
    kept = Ledger(path, "x", "x", "local", [], swept, created=1.8e9, state="finished")
    for label, settings in points.items():
        entry = kept.add(label, [])
        settings = dict(settings)
        vars(entry).update(settings.pop("point", {}))
        make_run(path / entry.folder, own=entry.number, **settings)
    kept.save()
    return path
