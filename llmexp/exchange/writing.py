"""Write the weights of a checkpoint under Hugging Face's names, tensor by tensor: no more than one
is in memory. (The library's save_file wants all tensors of a file at once.)"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import torch
from torch import Tensor

from llmexp.checkpoint.loading import Loaded, whole_tensor
from llmexp.exchange.families import Rule

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
        text = json.dumps(index, indent=2) + "\n"
        (folder / "model.safetensors.index.json").write_text(text)
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
