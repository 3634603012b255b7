"""Write tensors to a safetensors file, and hash it while it is written."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from llmexp.checkpoint.slices import TYPES
from llmexp.config.values import Plain

HASH_BYTES = 2**20  # that are hashed while a processor's cache holds them
_ORDER = list(TYPES)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor, on the host, in the order of its elements."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> tuple[Plain, dict[str, int]]:
    """Write a safetensors file and flush it to the disk.

    Return its size and sha256, and the byte where each tensor begins.

    The library's own function returns no hash (the file would be read again for it), and writes the
    metadata in a random order. Raises OSError.
    """
    named = sorted(tensors.items(), key=lambda item: (_ORDER.index(item[1].dtype), item[0]))
    head = header([(name, t.dtype, tuple(t.shape)) for name, t in named], metadata)
    digest, begins = hashlib.sha256(head), dict[str, int]()
    with open(path, "wb") as file:
        file.write(head)
        for name, tensor in named:
            begins[name] = file.tell()
            data = bytes_of(tensor)
            for start in range(0, len(data), HASH_BYTES):
                part = data[start : start + HASH_BYTES]
                digest.update(part)
                file.write(part)
        file.flush()
        os.fsync(file.fileno())
        size = file.tell()
    return {"size": size, "sha256": digest.hexdigest()}, begins


def header(
    named: Sequence[tuple[str, torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
) -> bytes:
    """Return the beginning of a safetensors file with these tensors in this order."""
    entries: Plain = {"__metadata__": dict(sorted(metadata.items()))}
    at = 0
    for name, dtype, shape in named:
        end = at + math.prod(shape) * dtype.itemsize
        entries[name] = {
            "dtype": TYPES[dtype], "shape": list(shape), "data_offsets": [at, end]
        }  # fmt: skip
        at = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # what follows is aligned
    return len(text).to_bytes(8, "little") + text
