"""Run folders of a ladder with known losses, as small as they can be."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from llmexp.folders.ledger import Ledger
from tests.compare.synthetic import write_rows, write_steps
from tests.scaling.planted import Law

SMALL = Law(1.6, 60.0, 300.0, 0.32, 0.35)
BLOCKS = (20_000, 60_000, 180_000, 540_000, 1_600_000)
BUDGETS = (1e12, 5e12, 2.5e13)


def run(path: Path, loss: float, n: float, tokens: int, **changes: Any) -> Path:
    """A finished run of n parameters in blocks, and 64 x sqrt(n) each in head and embeddings.

    `facts`, `state`, `rates` replace those of the run; the others are the config's."""
    head = round(64 * math.sqrt(n))
    facts = {
        "parameters": n + 2 * head, "parameters_with_head": n + head, "parameters_in_blocks": n,
        "flops_per_token": 6 * (n + head), "max_tokens": tokens, "max_steps": 100,
        "tokens_per_step": tokens // 100, "sequence_length": 128, "tokenizer": "bytes",
        "data_fingerprint": {"tokenizer_sha256": "a", "val_files": ["v"]},
    } | changes.pop("facts", {})  # fmt: skip
    state, rates = changes.pop("state", "finished"), changes.pop("rates", (1e-3, 1e-4))
    config: dict[str, Any] = {
        "model": {"_target_": "llmexp.models.gpt2.GPT2", "d_model": int(math.sqrt(n) / 4)},
        "optimizer": {"_target_": "llmexp.optim.optimizers.adamw.adamw", "lr": 1e-3},
        "schedule": {"_target_": "llmexp.optim.schedule.cosine"},
        "train": {"seed": 1, "max_flops": 6 * (n + head) * tokens},
        "batch": {"real_batch_size": 8},
        "clip": {"kind": "norm", "max_norm": 1.0},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        config[section][name] = value
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    (path / "run.json").write_text(json.dumps(facts))
    (path / "status.json").write_text(json.dumps({"state": state, "summary": {"steps": 100}}))
    ends = ((50, tokens // 2, 5.0, 5.0, rates[0]), (100, tokens, loss, loss, rates[1]))
    names = ("step", "tokens_seen", "train/loss", "val/loss", "lr")
    write_rows(path, [dict(zip(names, row, strict=True)) for row in ends])
    halves = np.repeat([[5.0, loss], rates], 50, axis=1).tolist()
    write_steps(path, halves[0], [tokens / 100] * 100, halves[1])
    return path


def isoflop(
    folder: Path, law: Law = SMALL, noise: float = 0.002, seed: int = 0,
    blocks: Sequence[int] = BLOCKS, budgets: Sequence[float] = BUDGETS, **changes: Any,
) -> Path:  # fmt: skip
    """Budgets x sizes; the law counts N without embeddings, with the head."""
    rng = np.random.default_rng(seed)
    for i, c in enumerate(budgets):
        for j, n in enumerate(blocks):
            size = n + round(64 * math.sqrt(n))
            tokens = round(c / (6 * size))
            loss = law.loss(size, tokens) * math.exp(noise * rng.standard_normal())
            run(folder / f"{i}-{j}", loss, n, tokens, **{"train__max_flops": c, **changes})
    return folder


def as_sweep(folder: Path, *swept: str) -> Path:
    """The folder with a ledger, as of a sweep that has come to its end."""
    kept = Ledger(folder, "x", "x", "local", [], list(swept), created=1.8e9, state="finished")
    for path in sorted(folder.iterdir()):
        kept.add(path.name, [], path.name)
    kept.save()
    return folder
