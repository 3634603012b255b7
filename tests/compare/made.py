"""Comparisons made up for the tests of the page: smooth curves with known values, no training."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmexp.compare.records import Column, Record, Result, Setting
from llmexp.folders.ledger import Look

COLUMNS = (
    Column("final val/loss", "Final val loss", "lower"),
    Column("best val/loss", "Best val loss", "lower"),
    Column("tokens_seen", "Tokens", "", 6),
    Column("train_time", "Time (s)", "lower", 3),
    Column("mean tokens_per_sec", "Tokens/s", "higher", 4),
    Column("peak_memory_gib", "Peak memory (GiB)", "lower", 3),
    Column("clip_fraction", "Clipped", "", 2),
)


def rows(n: int, level: float, batch: int, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    step = np.arange(1.0, n + 1) * 10
    evaluated = (np.arange(n) % 10 == 9) | (np.arange(n) == n - 1)
    seconds = 0.05 + 0.02 * rng.random(n)
    train = level + 3 / (1 + step / 200) + 0.05 * rng.standard_normal(n)
    norm = np.exp(0.3 * rng.standard_normal(n)) * (1 + 30 / step)
    noise = np.where(np.arange(n) >= 5, 20 + step / 20 + rng.random(n), np.nan)
    return {
        "step": step, "tokens_seen": step * batch * 128, "step_time": seconds, "train/loss": train,
        "val/loss": np.where(evaluated, level + 0.03 + 3 / (1 + step / 200), np.nan),
        "grad_norm": norm, "lr": 1e-3 * np.minimum(step / 100, 1),
        "tokens_per_sec": batch * 128 / seconds, "noise_scale": noise,
        "noise_scale_low": noise * 0.7, "noise_scale_high": noise * 1.4,
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
    setting: int,
    seed: int,
    loss: float,
    looks: Sequence[Look] = (),
    min_effect: float | None = None,
) -> Record:
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
    accumulation = values.get("batch.gradient_accumulation_steps", 1)
    batch = 8 * accumulation
    columns = rows(n if state == "finished" else n // 2, level, batch, seed)
    limit = values.get("clip.max_norm", 1.0)
    limit = limit if isinstance(limit, float) else 1.0
    table = [
        {"limit": c, "share": min(1.0, 1 / (1 + c * c)), "coefficient": c / (1 + c)}
        for c in (0.25, 0.5, 1, 2, 4)
    ]
    near = f"real_batch_size={batch} is near the noise scale (31 to 66 sequences)."
    status = {
        "state": state, "host": "node-1", "summary": {},
        "clip": {"steps": n * 10, "share": 1 / (1 + limit), "table": table,
                 "quantiles": {"50": 1.1, "90": 2.7, "99": 9.25}},
        "noise": {"noise_scale": 45.2, "low": 31.0, "high": 66.0, "measurements": n,
                  "verdict": near},
    }  # fmt: skip
    facts = {
        "device": "cuda", "device_name": "NVIDIA H200", "world_size": 1, "parallelism": "single",
        "precision": "bf16", "commit": "4f1e9a0" if seed % 5 else "99be2c1",
        "real_batch_size": batch, "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "overrides": [f"{k}={v}" for k, v in values.items()],
    }  # fmt: skip
    config = {"batch.micro_batch_size": 8, "optimizer.lr": 1e-3, "clip.kind": "norm",
              "clip.max_norm": 1.0} | values  # fmt: skip
    return Record(
        Path("/runs") / str(seed), name, Path("/runs/accumulation_x_clip"), state, config, facts,
        status, columns, steps=steps_of(columns),
    )  # fmt: skip


def entry(
    number: int, values: dict[str, Any], *, n: int = 300, seeds: int = 1, state: str = "finished"
) -> Setting:
    name = ",".join(f"{key.rpartition('.')[2]}={value}" for key, value in values.items()) or "a run"
    level, runs = 3.0 + 0.0173 * number, []
    for s in range(seeds):
        own = name if seeds == 1 else f"{name},seed={s}"
        runs.append(record(own, values, level + 0.004 * s, n, 11 * number + s, state))
    final = level + 0.03 + 3 / (1 + n / 20)
    figures = {
        "final val/loss": final, "best val/loss": final - 0.001,
        "tokens_seen": float(runs[0].columns["tokens_seen"][-1]),
        "train_time": 512.3 + 7 * number, "mean tokens_per_sec": 183_201.3 - 911 * number,
        "clip_fraction": 0.31, "peak_memory_gib": 11.25 + 0.5 * (number % 4),
    }  # fmt: skip
    if state == "failed":
        figures = {"tokens_seen": figures["tokens_seen"]}
    intervals = {"final val/loss": (final - 0.006, final + 0.006)} if seeds > 1 else {}
    return Setting(name, tuple(runs), values, figures, intervals, state)


def comparison(entries: list[Setting], **more: Any) -> Result:
    """The entries in the order that they have, with what else a comparison holds; `more` replaces
    fields."""
    differing = tuple(dict.fromkeys(key for e in entries for key in e.values))
    columns = tuple(c for c in COLUMNS if any(c.key in e.figures for e in entries))
    sentences = (
        f"Use {entries[0].name}: final val/loss 3.217, the lowest.",
        "The next three are indistinguishable from it: they differ by less than the noise floor of "
        "0.004.",
    )
    fields: dict[str, Any] = dict(
        settings=tuple(entries), differing=differing, columns=columns, metric=COLUMNS[0],
        align="tokens", align_at=3_072_000.0, batch="scaling", problems=(), factors=differing,
    )  # fmt: skip
    judged = [e for e in entries if e.state == "finished" and "final val/loss" in e.figures]
    marks = {e: 0.0173 * i for i, e in enumerate(judged) if len(judged) > 1}
    for e in entries:
        e.label = e.label or e.name
        if (size := marks.get(e)) is not None and not e.mark:
            e.mark, e.size = ("worse", size) if size else ("best", None)
    headline, *notes = more.pop("sentences", sentences) or ("",)
    return Result(**fields | {"headline": headline, "notes": tuple(notes)} | more)


def grid(*, n: int = 300, seeds: int = 1, **keys: list[Any]) -> list[Setting]:
    """Every pair of values; `__` in a name stands for the dot."""
    names = [key.replace("__", ".") for key in keys]
    points = itertools.product(*keys.values())
    return [
        entry(i, dict(zip(names, p, strict=True)), n=n, seeds=seeds) for i, p in enumerate(points)
    ]
