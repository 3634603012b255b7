"""A checkpoint -> a folder that transformers loads: weights, config, tokenizer, a page about it.

Weights are written tensor by tensor, and no more than one is in memory. (The library's save_file
wants all tensors of a file at once.) The page is README.md, which the hub shows as the model card.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmexp import rundir
from llmexp.checkpoint.loading import Loaded, whole_tensor
from llmexp.data.tokenizers import Tokenizer, end_of_text
from llmexp.exchange.average import facts_of
from llmexp.exchange.families import Rule, family_of, to_config
from llmexp.exchange.tokenizer import doubts, tokenizer_files
from llmexp.fileio import new_folder, write_json, write_whole
from llmexp.metrics.keys import EMA

SHARD_BYTES = 5 * 10**9  # the size of files that the hub likes
NAMES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def theirs(loaded: Loaded, rule: Rule, dtype: torch.dtype) -> Tensor:
    """Return a tensor of theirs, made of ours in the memory that it takes itself."""
    found = torch.empty(_shape(loaded, rule), dtype=dtype)
    target = found.T if rule.transposed and found.ndim == 2 else found
    if len(rule.ours) == 1:
        parts = [target]
    else:
        parts = list(target.split([loaded.model[name][0].shape[0] for name in rule.ours]))
    for name, part in zip(rule.ours, parts, strict=True):
        whole_tensor(loaded, name, part)
    return found


def _shape(loaded: Loaded, rule: Rule) -> tuple[int, ...]:
    shapes = [loaded.model[name][0].shape for name in rule.ours]
    shape = shapes[0] if len(shapes) == 1 else (sum(s[0] for s in shapes), *shapes[0][1:])
    return shape[::-1] if rule.transposed else shape


def write_weights(
    folder: Path, loaded: Loaded, rules: list[Rule], dtype: torch.dtype | None
) -> int:
    """Write the tensors as safetensors of at most SHARD_BYTES each, with an index where there are
    several. `dtype` None: as in the checkpoint. Return the bytes of all tensors."""
    kinds = {r.theirs: dtype or loaded.model[r.ours[0]][0].dtype for r in rules}
    sizes = {r.theirs: math.prod(_shape(loaded, r)) * kinds[r.theirs].itemsize for r in rules}
    shards: list[list[Rule]] = [[]]
    for rule in rules:
        held = sum(sizes[r.theirs] for r in shards[-1])
        if shards[-1] and held + sizes[rule.theirs] > SHARD_BYTES:
            shards.append([])
        shards[-1].append(rule)
    place: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        name = name if len(shards) > 1 else "model.safetensors"
        _write_file(folder / name, loaded, shard, kinds, sizes)
        place |= {rule.theirs: name for rule in shard}
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": place}
        write_json(folder / "model.safetensors.index.json", index)
    return sum(sizes.values())


def _write_file(
    file: Path,
    loaded: Loaded,
    shard: list[Rule],
    kinds: dict[str, torch.dtype],
    sizes: dict[str, int],
) -> None:
    """Write one file in the format of safetensors: the length of the header, the header, and the
    tensors one after another."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for rule in shard:
        name, end = rule.theirs, at + sizes[rule.theirs]
        shape = list(_shape(loaded, rule))
        header[name] = {"dtype": NAMES[kinds[name]], "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(file, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for rule in shard:
            tensor = theirs(loaded, rule, kinds[rule.theirs])
            if tensor.numel() and not torch.stack(tensor.aminmax()).isfinite().all():
                kind = NAMES[kinds[rule.theirs]]
                raise ValueError(f"{rule.theirs} has values that are not finite in {kind}")
            f.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
        f.flush()
        os.fsync(f.fileno())


SHOWN = {
    "model": ("val/loss", "val/ppl", "val/bits_per_byte", "train/loss"),
    "ema": (f"{EMA}/loss", f"{EMA}/bits_per_byte"),
}


def card(path: Path, step: int, architecture: str, weights: str) -> str:
    """Return the page about the model of a run's checkpoint: what it is, its figures at that step,
    its config."""
    run, config = facts_of(path), (path / rundir.CONFIG).read_text(encoding="utf-8")
    facts = [
        ("model", f"{run.get('model')}, {run.get('parameters', 0):,} parameters"),
        ("data", run.get("data")),
        ("tokenizer", run.get("tokenizer")),
        ("trained", f"{step:,} of {run.get('max_steps', 0):,} optimizer steps"),
        ("weights", "their exponential moving average (train.ema)" * (weights == "ema")),
        ("mean of", run.get("mean_of")),
        ("precision", run.get("precision")),
        ("llmexp commit", run.get("commit")),
    ]
    rows = [row for row in rundir.read_rows(path / rundir.METRICS) if row["step"] <= step]
    figures = [(key, _last(rows, key)) for key in SHOWN[weights]]
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


TRANSFORMERS = "llmexp.models.hf.HuggingFace"  # its tensors have their names already


@dataclass(frozen=True)
class Exported:
    """The account of an export. `size`: bytes of the weights."""

    architecture: str
    parameters: int
    step: int
    size: int
    notes: list[str]


def export(
    loaded: Loaded,
    section: Mapping[str, Any],
    tokenizer: Tokenizer,
    folder: Path,
    dtype: str | None,
    run: Path,
    weights: str = "model",
) -> Exported:
    """Write a checkpoint's model into a new folder, whole or not at all.

    `section`: the model's knobs; `dtype`: a key of DTYPES, None: as trained. For the page:
    `run`, its folder, and `weights`, of naming.WEIGHTS. Raises ValueError for a model that
    transformers does not have.
    """
    end, kind = end_of_text(tokenizer), None if dtype is None else DTYPES[dtype]
    described, rules = _described(loaded, section, end)
    stored = kind or loaded.model[rules[0].ours[0]][0].dtype
    described["dtype"] = str(stored).removeprefix("torch.")
    architecture = (described.get("architectures") or [described["model_type"]])[0]
    length = described.get("n_positions") or described.get("max_position_embeddings")
    files = tokenizer_files(tokenizer, length)
    with new_folder(folder) as draft:
        size = write_weights(draft, loaded, rules, kind)
        write_json(draft / "config.json", described)
        write_json(draft / "generation_config.json", {"bos_token_id": end, "eos_token_id": end})
        for name, content in files.items():
            write_whole(draft / name, content)
        write_whole(draft / "README.md", card(run, loaded.step, architecture, weights))
    parameters = sum(math.prod(pieces[0].shape) for pieces in loaded.model.values())
    return Exported(architecture, parameters, loaded.step, size, doubts(tokenizer, files))


def _described(
    loaded: Loaded, section: Mapping[str, Any], end: int | None
) -> tuple[dict[str, Any], list[Rule]]:
    """Return the config.json of the model and the rules of its tensors. Raises ValueError."""
    if section["_target_"] != TRANSFORMERS:
        return to_config(section, end), list(family_of(section).tensors(section))
    config = json.loads((Path(section["path"]) / "config.json").read_text(encoding="utf-8"))
    config |= {"bos_token_id": end, "eos_token_id": end}
    return config, [Rule(name.removeprefix("model."), (name,)) for name in loaded.model]
