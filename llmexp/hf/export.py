"""A checkpoint -> a folder that transformers loads: weights, config, tokenizer, a page about it.

Weights are written tensor by tensor, and no more than one is in memory. (The library's save_file
wants all tensors of a file at once.) The page is README.md, which the hub shows as the model card.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmexp.checkpoint import tensor_files
from llmexp.checkpoint.loading import Loaded, fill_all, read_tensor
from llmexp.checkpoint.slices import TYPES
from llmexp.config.rules import TRANSFORMERS
from llmexp.config.values import ConfigError
from llmexp.data.tokenizers.base import Tokenizer
from llmexp.folders import rundir
from llmexp.folders.rows import read_rows
from llmexp.hf.average import facts_of
from llmexp.hf.check import check_folder
from llmexp.hf.families import NameRule, family_of, to_config
from llmexp.hf.multipliers import multipliers
from llmexp.hf.tokenizer import doubts, tokenizer_files
from llmexp.metrics.keys import OTHER_WEIGHTS, is_of_named_set, is_of_weights
from llmexp.models.common import all_finite
from llmexp.system.fileio import new_folder, write_json, write_whole

SHARD_BYTES = 5 * 10**9  # the size of files that the hub likes
EXPORT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


VOCABULARY = {("token_embedding.weight",), ("head.weight",)}  # a row an id
_SHOWN = ("val/loss", "val/ppl", "val/bits_per_byte", "train/loss")


@dataclass(frozen=True)
class Stored:
    """The form of the weights in the files.

    `dtype` None: as in the checkpoint; `vocabulary`: the ids to write, without rows of padding
    behind them, None: all; `factor`: on each of our parameters.
    """

    dtype: torch.dtype | None = None
    vocabulary: int | None = None
    factor: Callable[[str], float] = lambda name: 1.0


def theirs(loaded: Loaded, rule: NameRule, dtype: torch.dtype, form: Stored) -> Tensor:
    """Return a tensor of theirs, made of ours in the memory that it takes itself."""
    found = torch.empty(written_shape(loaded, rule), dtype=dtype)
    if rule.expert is not None:
        box = [(rule.expert, rule.expert + 1), *((0, size) for size in found.shape)]
        return found.copy_(read_tensor(loaded, rule.ours[0], box)[0])
    target = found.T if rule.transposed and found.ndim == 2 else found
    rows = [loaded.model[name][0].shape[0] for name in rule.ours[1:]]
    parts = target.split([len(target) - sum(rows), *rows]) if rows else [target]
    for name, part in zip(rule.ours, parts, strict=True):
        if (factor := form.factor(name)) == 1:
            fill_all(loaded, {name: part}, loaded.model)
        else:  # rounded once
            part.copy_(read_tensor(loaded, name).double() * factor)
    return found


def written_shape(loaded: Loaded, rule: NameRule, vocabulary: int | None = None) -> tuple[int, ...]:
    """Return the shape of a tensor of theirs, of so many ids of the vocabulary; None: of all."""
    shape = rule.shape(lambda name: loaded.model[name][0].shape)
    if vocabulary is None or rule.ours not in VOCABULARY:
        return shape
    return (vocabulary, *shape[1:])


def write_weights(folder: Path, loaded: Loaded, rules: list[NameRule], form: Stored) -> int:
    """Write the tensors as safetensors of at most SHARD_BYTES each, and return their bytes.

    Several files get an index.
    """
    kinds = {r.theirs: form.dtype or loaded.model[r.ours[0]][0].dtype for r in rules}
    shapes = {r.theirs: written_shape(loaded, r, form.vocabulary) for r in rules}
    sizes = {name: math.prod(shape) * kinds[name].itemsize for name, shape in shapes.items()}
    shards: list[list[NameRule]] = [[]]
    held = 0
    for rule in rules:
        held += sizes[rule.theirs]
        if shards[-1] and held > SHARD_BYTES:
            shards.append([])
            held = sizes[rule.theirs]
        shards[-1].append(rule)
    place: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        suffix = f"-{number:05}-of-{len(shards):05}" if len(shards) > 1 else ""
        place |= {rule.theirs: f"model{suffix}.safetensors" for rule in shard}
        named = [(rule.theirs, kinds[rule.theirs], shapes[rule.theirs]) for rule in shard]
        # the length of its header, the header, the tensors in turn
        with open(folder / f"model{suffix}.safetensors", "wb") as f:
            f.write(tensor_files.header(named, {"format": "pt"}))
            for rule, (name, kind, shape) in zip(shard, named, strict=True):
                tensor = theirs(loaded, rule, kind, form)
                tensor = tensor[: shape[0]] if shape else tensor  # without padding
                if not all_finite(tensor):
                    text = f"{name} has values that are not finite in {TYPES[kind]}"
                    raise ConfigError("not_finite", text)
                f.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
            f.flush()
            os.fsync(f.fileno())
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": place}
        write_json(folder / "model.safetensors.index.json", index)
    return sum(sizes.values())


@dataclass(frozen=True)
class Exported:
    """The account of an export.

    `size`: bytes of the weights; `padding`: the rows of the vocabulary that were left out.
    """

    folder: Path
    architecture: str
    parameters: int
    step: int
    size: int
    padding: int
    problems: list[str]  # what transformers may do otherwise, in words

    def __str__(self) -> str:
        size = f"{self.parameters:,} parameters, {self.size / 2**20:,.1f} MiB"
        lines = [f"{self.folder}: {self.architecture} of step {self.step:,}, {size}"]
        if self.padding:
            rows = f"{self.padding:,} rows of the vocabulary behind the tokenizer's ids"
            lines.append(f"left out: {rows} (--keep-padding writes them)")
        use = f"transformers.AutoModelForCausalLM.from_pretrained({str(self.folder)!r})"
        return "\n".join([*lines, f"use it: {use}"])


def export_model(
    loaded: Loaded,
    section: Mapping[str, Any],
    tokenizer: Tokenizer,
    folder: Path,
    form: Stored,
    run: Path,
    *,
    weights: str = "model",
    check: bool = False,
) -> Exported:
    """Write a checkpoint's model into a new folder, whole or not at all.

    `section`: the model's knobs. For the page: `run`, its folder, and `weights`, of naming.WEIGHTS.
    `check`: read the files with transformers before the folder gets its name. Raises ConfigError
    for a model that transformers does not have.
    """
    end, form = tokenizer.eot_token, replace(form, factor=multipliers(section))
    described, rules = _described(loaded, section, end)
    padding = 0
    if form.vocabulary is not None and "vocab_size" in section:
        padding = section["vocab_size"] - form.vocabulary
        described["vocab_size"] = form.vocabulary
    trained = loaded.model[rules[0].ours[0]][0].dtype
    stored = form.dtype or trained
    described["dtype"] = str(stored).removeprefix("torch.")
    architecture = (described.get("architectures") or [described["model_type"]])[0]
    length = described.get("n_positions") or described.get("max_position_embeddings")
    files = tokenizer_files(tokenizer, length, described["model_type"])
    facts = {
        "weights": OTHER_WEIGHTS.get(weights, ("",))[0],
        "stored as": rounding(stored, trained),
        "parametrization": (section.get("parametrization", "standard") != "standard")
        * "trained with mup, whose multipliers are now in the final norm and in the queries",
        "vocabulary": padding and f"{form.vocabulary:,} ids; {padding:,} rows of padding left out",
    }
    with new_folder(folder) as draft:
        size = write_weights(draft, loaded, rules, form)
        write_json(draft / "config.json", described)
        write_json(draft / "generation_config.json", {"bos_token_id": end, "eos_token_id": end})
        for name, content in files.items():
            write_whole(draft / name, content)
        write_whole(draft / "README.md", card(run, loaded.step, architecture, weights, facts))
        notes = doubts(tokenizer, files)
        if check:
            notes += check_folder(draft, tokenizer)
    parameters = sum(math.prod(written_shape(loaded, r, form.vocabulary)) for r in rules)
    return Exported(folder, architecture, parameters, loaded.step, size, padding, notes)


def rounding(stored: torch.dtype, trained: torch.dtype) -> str:
    """Return the type of the written weights, and whether they were rounded for it."""
    name, before = (str(kind).removeprefix("torch.") for kind in (stored, trained))
    return f"{name}, rounded from {before}" if stored.itemsize < trained.itemsize else name


def _described(
    loaded: Loaded, section: Mapping[str, Any], end: int | None
) -> tuple[dict[str, Any], list[NameRule]]:
    """Return the config.json of the model and the rules of its tensors. Raises ConfigError."""
    if section["_target_"] != TRANSFORMERS:
        return to_config(section, end), list(family_of(section).tensors(section))
    config = json.loads((Path(section["path"]) / "config.json").read_text(encoding="utf-8"))
    config |= {"bos_token_id": end, "eos_token_id": end}
    return config, [NameRule(name.removeprefix("model."), (name,)) for name in loaded.model]


def card(path: Path, step: int, architecture: str, weights: str, more: Mapping[str, Any]) -> str:
    """Return the page about the model of a checkpoint: what it is, its figures, its config.

    The figures are those at its step. `more`: further facts, by their names.
    """
    run, config = facts_of(path), (path / rundir.CONFIG).read_text(encoding="utf-8")
    facts = {
        "model": f"{run.get('model')}, {run.get('parameters', 0):,} parameters",
        "data": run.get("data"),
        "tokenizer": run.get("tokenizer"),
        "trained": f"{step:,} of {run.get('max_steps', 0):,} optimizer steps",
        **more,
        "mean of": run.get("mean_of"),
        "precision": run.get("precision"),
        "llmexp commit": run.get("commit"),
    }
    rows = [row for row in read_rows(path / rundir.METRICS) if row["step"] <= step]
    keys = [f"val/{weights}/loss", f"val/{weights}/bits_per_byte"]
    if weights == "model":
        named = dict.fromkeys(key for row in rows for key in row if is_of_named_set(key))
        keys = [*_SHOWN, *(key for key in named if not is_of_weights(key))]
    lines = [f"| {name} | {value} |" for name, value in facts.items() if value]
    for key in keys:
        if last := next((row for row in reversed(rows) if row.get(key) is not None), None):
            lines.append(f"| {key} (step {last['step']:,}) | {last[key]:.4f} |")
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
