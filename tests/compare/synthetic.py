"""Run folders with known contents."""

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from llmexp.folders import steps as records
from llmexp.folders.ledger import Ledger
from llmexp.run import Parent

STEPS = 400
LN_2 = math.log(2)


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
    parent: str | None = None,
    reaches: int | None = None,
    rows: dict[str, Any] | None = None,
    facts: dict[str, Any] | None = None,
    status: dict[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """A run whose losses are those of its seed's batches, plus `offset`, plus a wobble of its own.

    `rows`, `facts` and `status` are added to each row, run.json and status.json; `parent` is the
    trunk that it goes on from; from the step `reaches` on its val loss is 1, and 2 before;
    `clip__kind=` sets clip.kind."""
    path.mkdir(parents=True)
    real, length = micro * accumulation, 128
    config = {
        "name": path.name,
        "batch": {"micro_batch_size": micro, "gradient_accumulation_steps": accumulation,
                  "real_batch_size": real, "sequence_length": length},
        "train": {"seed": seed, "log_every": 1, "max_steps": steps},
        "data": {"_target_": "llmexp.data.sources.stdlib.stdlib", "seed": 0},
        "tokenizer": {"_target_": f"llmexp.data.tokenizers.{tokenizer}"},
        "clip": {"kind": "norm", "max_norm": max_norm}, "tracker": {"kind": "none"},
    }  # fmt: skip
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
    } | ({"parent": parent_in(parent)} if parent else {})  # fmt: skip
    (path / "run.json").write_text(json.dumps(known | (facts or {})))
    step = np.arange(1, steps + 1)
    batches = 0.05 * np.random.default_rng([seed, real]).standard_normal(steps)
    mine = wobble * ar1(np.random.default_rng([seed, 77, own]), steps, 0.5)[0] if steps else 0.0
    loss = 2.5 + 3 * np.exp(-step / 80) + batches + offset + mine
    written = []
    for s, value in zip(step.tolist(), loss.tolist(), strict=True):
        row = {
            "step": s, "tokens_seen": s * real * length, "epoch": 0.1, "train/loss": value,
            "lr": 0.001, "grad_norm": 1.5, "step_time": step_time,
            "tokens_per_sec": 2000.0 + own, "peak_memory_gib": 1.25,
        }  # fmt: skip
        if s % val_every == 0:
            val = val_loss(s, offset) if reaches is None else 2.0 - (s >= reaches)
            row |= {"val/loss": val, "val/ppl": math.exp(val), "val/bits_per_byte": val / LN_2}
        written.append(row | (rows or {}))
    write_rows(path, written)
    write_steps(path, loss.tolist(), [real * length] * steps)
    summary = {
        "tokens_seen": steps * real * length, "steps": steps, "train_time": steps * step_time,
        "mean tokens_per_sec": real * length / step_time, "peak_memory_gib": 1.25,
        "skipped_steps": 0, "clip_fraction": 0.25,
    }  # fmt: skip
    ended = {
        "state": state, "updated": 1.8e9, "started": 1.8e9 - 100, "exit_code": 0, "error": None,
        "summary": summary,
    }  # fmt: skip
    (path / "status.json").write_text(json.dumps(ended | (status or {})))
    return path


def val_loss(step: float, offset: float = 0.0) -> float:
    """The validation loss of a made run after this step."""
    return 2.6 + 3 * math.exp(-step / 80) + offset


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    lines = [json.dumps(row, separators=(",", ":")) + "\n" for row in rows]
    (path / "metrics.jsonl").write_text("".join(lines))


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


def each(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs that a row of data stands for: of a mapping such as `seed: {1: 0.0, 2: 0.1}` all
    values, each with its offset; of several mappings all combinations, with sums of offsets."""
    given = {key.replace(".", "__"): value for key, value in row.items()}
    whole = ("facts", "status", "point", "rows")
    varied = {k: v for k, v in given.items() if isinstance(v, dict) and k not in whole}
    runs = []
    for values in itertools.product(*(v.items() for v in varied.values())):
        own = dict(zip(varied, (value for value, _ in values), strict=True))
        offset = given.get("offset", 0.0) + sum(offset for _, offset in values)
        runs.append(given | own | {"offset": offset})
    return runs


def make_case(path: Path, rows: Sequence[dict[str, Any]], swept: Sequence[str] = ()) -> Path:
    """The folder of the runs of these rows: a sweep where it varies keys."""
    runs = [run for row in rows for run in each(row)]
    named = {str(run.pop("name", i)): run for i, run in enumerate(runs)}
    if swept:
        return make_sweep(path, named, list(swept))
    for i, (name, run) in enumerate(named.items()):
        run.pop("point", None)
        make_run(path / name, **{"own": i, **run})
    return path


def told(answer: Any) -> str:
    """What `llmexp compare --why` prints of an answer, and what it could not read."""
    notes = [f"{r['label']}: {r['note']}" for r in answer.data["runs"] if r["note"]]
    problems = [f"problem: {text}" for text in answer.problems]
    return "\n".join([str(answer), "", *answer.data["why"], *notes, *problems])
