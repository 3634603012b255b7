"""Records made up for tests: smooth curves with known values, no training and no folders."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from llmexp.compare.comparing import findings, with_words
from llmexp.compare.records import Record, Result, Setting
from llmexp.folders.ledger import Look

LENGTH = 128  # tokens of a sequence


def rows(n: int, level: float, batch: int, seed: int) -> dict[str, np.ndarray]:
    """A row for every ten steps; every tenth has an evaluation, and so has the last."""
    rng = np.random.default_rng(seed)
    step = np.arange(1.0, n + 1) * 10
    evaluated = (np.arange(n) % 10 == 9) | (np.arange(n) == n - 1)
    seconds = 0.05 + 0.02 * rng.random(n)
    noise = np.where(np.arange(n) >= 5, 20 + step / 20 + rng.random(n), np.nan)
    return {
        "step": step, "tokens_seen": step * batch * LENGTH, "step_time": seconds,
        "train/loss": level + 3 / (1 + step / 200) + 0.05 * rng.standard_normal(n),
        "val/loss": np.where(evaluated, level + 0.03 + 3 / (1 + step / 200), np.nan),
        "grad_norm": np.exp(0.3 * rng.standard_normal(n)) * (1 + 30 / step),
        "lr": 1e-3 * np.minimum(step / 100, 1), "tokens_per_sec": batch * LENGTH / seconds,
        "noise_scale": noise, "noise_scale_low": noise * 0.7, "noise_scale_high": noise * 1.4,
    }  # fmt: skip


def steps_of(columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What steps.bin would have: between two rows all steps are as the second one."""
    step = columns["step"]
    each = np.arange(1.0, step[-1] + 1)
    row = np.searchsorted(step, each)
    tokens = np.interp(each, [0.0, *step], [0.0, *columns["tokens_seen"]])
    found = {key: columns.get(key, step * np.nan)[row] for key in ("train/loss", "lr")}
    return found | {"tokens": tokens, "target_tokens": np.diff(tokens, prepend=0.0)}


def trained(
    setting: int, seed: int, loss: float, looks: Sequence[Look] = (),
    min_effect: float | None = None,
) -> Record:  # fmt: skip
    """A run of a sweep over two keys, of one step."""
    config = {"optimizer.lr": 1.0 + setting, "train.seed": seed}
    columns = {"step": 1.0, "tokens_seen": 64.0, "train/loss": loss, "val/loss": loss}
    facts = {"max_tokens": 64, "tokens_per_step": 64, "max_steps": 1, "real_batch_size": 1}
    arrays = {key: np.array([value]) for key, value in columns.items()}
    return Record(
        Path(f"/s/{setting}-{seed}"), f"{setting}-{seed}", Path("/s"), "finished", config, facts,
        {"summary": {"train_time": 60.0, "tokens_seen": 64}}, arrays, steps=steps_of(arrays),
        swept=("optimizer.lr", "train.seed"), looks=list(looks), min_effect=min_effect,
    )  # fmt: skip


def record(
    name: str, values: dict[str, Any], level: float, n: int, seed: int, state: str = "finished"
) -> Record:
    """A run with what its status says of clipping and of the noise scale."""
    batch = 8 * values.get("batch.gradient_accumulation_steps", 1)
    columns = rows(n if state == "finished" else n // 2, level, batch, seed)
    near = f"real_batch_size={batch} is near the noise scale (31 to 66 sequences)."
    summary = {
        "train_time": 512.3 + 7 * seed, "mean tokens_per_sec": 183_201.3 - 911 * seed,
        "clip_fraction": 0.31, "peak_memory_gib": 11.25 + 0.5 * (seed % 4),
    }  # fmt: skip
    status = {
        "state": state, "host": "node-1", "summary": summary,
        "clip": {"steps": n * 10, "share": 0.5, "quantiles": {"50": 1.1, "90": 2.7, "99": 9.25},
                 "table": [{"limit": 2, "share": 0.2}]},
        "noise": {"noise_scale": 45.2, "low": 31.0, "high": 66.0, "measurements": n,
                  "verdict": near},
    }  # fmt: skip
    tokens = batch * LENGTH
    facts = {
        "device": "cuda", "device_name": "NVIDIA H200", "world_size": 1, "parallelism": "single",
        "precision": "bf16", "commit": "4f1e9a0", "real_batch_size": batch,
        "versions": {"python": "3.11.7", "torch": "2.13.0"}, "tokens_per_step": tokens,
        "max_steps": 10 * n, "max_tokens": 10 * n * tokens,
        "overrides": [f"{k}={v}" for k, v in values.items()],
    }  # fmt: skip
    config = {"batch.micro_batch_size": 8, "optimizer.lr": 1e-3, "clip.kind": "norm",
              "clip.max_norm": 1.0, "train.seed": 1} | values  # fmt: skip
    return Record(
        Path("/runs") / str(seed), name, Path("/runs/accumulation_x_clip"), state, config, facts,
        status, columns, steps=steps_of(columns),
    )  # fmt: skip


def entry(
    number: int, values: dict[str, Any], *, n: int = 300, seeds: int = 1, state: str = "finished"
) -> Setting:
    """The runs of a setting; each number is worse by 0.0173 than the one before."""
    name = ",".join(f"{key.rpartition('.')[2]}={value}" for key, value in values.items()) or "a run"
    level, runs = 3.0 + 0.0173 * number, []
    for s in range(seeds):
        loss = level + 0.004 * s + 0.001 * (number * s % 3)
        one = record(f"{name},seed={s}", values, loss, n, 11 * number + s, state)
        runs.append(replace(one, config=one.config | {"train.seed": s}))
    return Setting(name, tuple(runs), values, {}, {}, state)


def comparison(entries: list[Setting], **more: Any) -> Result:
    """What a comparison of all of these runs finds; `more` replaces fields."""
    return replace(with_words(findings([r for e in entries for r in e.runs])), **more)


def grid(*, n: int = 300, seeds: int = 1, **keys: list[Any]) -> list[Setting]:
    """Every pair of values; `__` in a name stands for the dot."""
    names = [key.replace("__", ".") for key in keys]
    points = itertools.product(*keys.values())
    return [
        entry(i, dict(zip(names, p, strict=True)), n=n, seeds=seeds) for i, p in enumerate(points)
    ]
