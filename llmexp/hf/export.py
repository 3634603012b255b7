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
from llmexp.hf.card import card
from llmexp.hf.check import check_folder
from llmexp.hf.families import NameRule, family_of, to_config
from llmexp.hf.multipliers import multipliers
from llmexp.hf.tokenizer import doubts, tokenizer_files
from llmexp.metrics.keys import OTHER_WEIGHTS
from llmexp.models.common import all_finite
from llmexp.system.fileio import new_folder, write_json, write_whole

SHARD_BYTES = 5 * 10**9  # the size of files that the hub likes
EXPORT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


VOCABULARY = {("token_embedding.weight",), ("head.weight",)}  # a row an id


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
    found = torch.empty(_shape(loaded, rule), dtype=dtype)
    if rule.expert is not None:
        (name,), number = rule.ours, rule.expert
        box = [(number, number + 1), *((0, size) for size in found.shape)]
        return found.copy_(read_tensor(loaded, name, box)[0])
    target = found.T if rule.transposed and found.ndim == 2 else found
    if len(rule.ours) == 1:
        parts = [target]
    else:
        parts = list(target.split([loaded.model[name][0].shape[0] for name in rule.ours]))
    for name, part in zip(rule.ours, parts, strict=True):
        if (factor := form.factor(name)) == 1:
            fill_all(loaded, {name: part}, loaded.model)
        else:  # rounded once
            part.copy_(read_tensor(loaded, name).double() * factor)
    return found


def _shape(loaded: Loaded, rule: NameRule) -> tuple[int, ...]:
    shapes = [loaded.model[name][0].shape for name in rule.ours]
    if rule.expert is not None:
        return shapes[0][1:]
    shape = shapes[0] if len(shapes) == 1 else (sum(s[0] for s in shapes), *shapes[0][1:])
    return shape[::-1] if rule.transposed else shape


def written_shape(loaded: Loaded, rule: NameRule, vocabulary: int | None) -> tuple[int, ...]:
    """Return the shape of a tensor of theirs without the padding of the vocabulary."""
    shape = _shape(loaded, rule)
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
    for rule in rules:
        held = sum(sizes[r.theirs] for r in shards[-1])
        if shards[-1] and held + sizes[rule.theirs] > SHARD_BYTES:
            shards.append([])
        shards[-1].append(rule)
    place: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        name = name if len(shards) > 1 else "model.safetensors"
        _write_file(folder / name, loaded, shard, kinds, shapes, form)
        place |= {rule.theirs: name for rule in shard}
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": place}
        write_json(folder / "model.safetensors.index.json", index)
    return sum(sizes.values())


def _write_file(
    file: Path,
    loaded: Loaded,
    shard: list[NameRule],
    kinds: dict[str, torch.dtype],
    shapes: dict[str, tuple[int, ...]],
    form: Stored,
) -> None:
    """Write one file of safetensors: the length of its header, the header, the tensors in turn."""
    named = [(rule.theirs, kinds[rule.theirs], shapes[rule.theirs]) for rule in shard]
    with open(file, "wb") as f:
        f.write(tensor_files.header(named, {"format": "pt"}))
        for rule in shard:
            tensor = theirs(loaded, rule, kinds[rule.theirs], form)
            if shapes[rule.theirs] != tensor.shape:  # without the padding of the vocabulary
                tensor = tensor[: shapes[rule.theirs][0]]
            if not all_finite(tensor):
                kind = TYPES[kinds[rule.theirs]]
                raise ConfigError(
                    "not_finite", f"{rule.theirs} has values that are not finite in {kind}"
                )
            f.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
        f.flush()
        os.fsync(f.fileno())


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
