"""The page about an exported model: README.md, which the hub shows as the model card."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmexp.folders import rundir
from llmexp.folders.rows import read_rows
from llmexp.hf.average import facts_of
from llmexp.metrics.keys import is_of_named_set, is_of_weights

_SHOWN = ("val/loss", "val/ppl", "val/bits_per_byte", "train/loss")


def card(path: Path, step: int, architecture: str, weights: str, more: Mapping[str, Any]) -> str:
    """Return the page about the model of a checkpoint: what it is, its figures, its config.

    The figures are those at its step. `more`: further facts, by their names.
    """
    run, config = facts_of(path), (path / rundir.CONFIG).read_text(encoding="utf-8")
    facts = [
        ("model", f"{run.get('model')}, {run.get('parameters', 0):,} parameters"),
        ("data", run.get("data")),
        ("tokenizer", run.get("tokenizer")),
        ("trained", f"{step:,} of {run.get('max_steps', 0):,} optimizer steps"),
        *more.items(),
        ("mean of", run.get("mean_of")),
        ("precision", run.get("precision")),
        ("llmexp commit", run.get("commit")),
    ]
    rows = [row for row in read_rows(path / rundir.METRICS) if row["step"] <= step]
    keys = [f"val/{weights}/loss", f"val/{weights}/bits_per_byte"]
    if weights == "model":
        named = dict.fromkeys(key for row in rows for key in row if is_of_named_set(key))
        keys = [*_SHOWN, *(key for key in named if not is_of_weights(key))]
    figures = [(key, _last(rows, key)) for key in keys]
    lines = [f"| {name} | {value} |" for name, value in facts if value]
    lines += [f"| {key} (step {at[0]:,}) | {at[1]:.4f} |" for key, at in figures if at]
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [llmexp]
---
# {path.resolve().name}

A {architecture} that llmexp has trained.

| | |
|---|---|
{chr(10).join(lines)}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(FOLDER)
tokenizer = AutoTokenizer.from_pretrained(FOLDER)
```

The config of the run:

```yaml
{config.rstrip()}
```
"""


def _last(rows: list[dict[str, float]], key: str) -> tuple[int, float] | None:
    """Return (step, value) of the last row with the key."""
    found = next((row for row in reversed(rows) if row.get(key) is not None), None)
    return None if found is None else (int(found["step"]), found[key])
