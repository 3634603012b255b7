"""Checkpoints: a folder of hashed files, committed by a rename, read without unpickling.

step_00000100/model.safetensors   parameters and persistent buffers under clean names
              state.pt            plain containers and tensors (torch.load(weights_only=True))
              manifest.json       format version, step, geometry, size and sha256 of each file; written last
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

FORMAT_VERSION = 1
MODEL, STATE, MANIFEST = "model.safetensors", "state.pt", "manifest.json"


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged or does not fit; the text names the file."""


@dataclass(frozen=True)
class Loaded:
    path: Path
    step: int
    manifest: dict[str, Any]
    tensors: dict[str, Tensor]
    state: dict[str, Any]


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Distinct tensors of the state dict by clean name: a tied parameter appears once, under its first name."""
    distinct: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    return {name: t.detach() for name, t in state.items() if distinct.setdefault(id(t), name) == name}


def load_model(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Copies the tensors into the model. Raises CheckpointError listing the names or shapes that differ."""
    own = model_tensors(model)
    differing = sorted(own.keys() ^ tensors.keys()) or [
        f"{name}: {tuple(tensors[name].shape)} for {tuple(t.shape)}"
        for name, t in own.items()
        if t.shape != tensors[name].shape
    ]
    if differing:
        raise CheckpointError(f"the checkpoint has another model shape; differing: {', '.join(differing[:8])}")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])


def save(
    root: Path, step: int, model: nn.Module, state: dict[str, Any], meta: dict[str, Any], keep: int | None
) -> Path:
    """Commits checkpoint `step` under `root`, then removes all but the newest `keep`. Raises OSError on a full disk;
    what was there before is then untouched.
    """
    final = root / f"step_{step:08d}"
    temporary = root / f".{final.name}.{os.getpid()}.tmp"
    root.mkdir(exist_ok=True)
    for leftover in root.glob(".step_*.tmp"):  # of a save that was killed; the run's lock is ours
        shutil.rmtree(leftover, ignore_errors=True)
    temporary.mkdir()
    try:
        tensors = {name: t.contiguous() for name, t in model_tensors(model).items()}
        save_file(tensors, temporary / MODEL, metadata={"format": "pt", "step": str(step)})
        torch.save(state, temporary / STATE)
        files = {name: _fingerprint(temporary / name) for name in (MODEL, STATE)}
        manifest = {"format_version": FORMAT_VERSION, "step": step, **meta, "files": files}
        with open(temporary / MANIFEST, "w", encoding="utf-8") as f:
            json.dump(manifest, f, indent=2, allow_nan=False)
            f.flush()
            os.fsync(f.fileno())
        _sync_folder(temporary)
        if final.exists():  # it was found damaged, or the run would not be here again
            os.rename(final, root / f".{final.name}.old.tmp")
        os.rename(temporary, final)
        _sync_folder(root)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, Exception) and not isinstance(error, OSError):
            raise OSError(f"saving {final} failed: {error}") from error  # torch and safetensors hide the errno
        raise
    if keep is not None:
        for old in [p for p in steps(root) if int(p.name[5:]) <= step][:-keep]:  # newer ones are damaged
            with contextlib.suppress(OSError):
                (old / MANIFEST).unlink()
                shutil.rmtree(old)
    return final


def steps(root: Path) -> list[Path]:
    """The checkpoint folders under `root`, oldest first."""
    return sorted(p for p in root.glob("step_*") if p.is_dir() and p.name[5:].isdigit())


def latest(root: Path, warn: Callable[[str], None]) -> Loaded | None:
    """The newest checkpoint whose manifest and hashes hold; each damaged one before it is named in a warning.

    None when there is no checkpoint at all. Raises CheckpointError when there are some and all are damaged.
    """
    found = steps(root)
    for path in reversed(found):
        try:
            return load(path)
        except CheckpointError as error:
            warn(f"checkpoint {path.name} is damaged and not used: {error}")
    if found:
        raise CheckpointError(f"{root}: all {len(found)} checkpoints are damaged; not starting from scratch over them")
    return None


def load(path: Path) -> Loaded:
    """Reads and checks one checkpoint, on the CPU. Raises CheckpointError naming the damage."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        version, step, files = manifest["format_version"], manifest["step"], manifest["files"]
        expected = {MODEL: files[MODEL], STATE: files[STATE]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / MANIFEST} is missing or unreadable ({error})") from None
    if version != FORMAT_VERSION:
        raise CheckpointError(f"{path}: format version {version}, this program reads version {FORMAT_VERSION}")
    for name, fingerprint in expected.items():
        file = path / name
        if file.is_symlink() or not file.is_file():
            raise CheckpointError(f"{file} is missing")
        if _fingerprint(file) != fingerprint:
            raise CheckpointError(f"{file} does not match the size and sha256 of its manifest")
    try:
        tensors = load_file(path / MODEL)
        state = torch.load(path / STATE, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    return Loaded(path, step, manifest, tensors, state)


def _fingerprint(path: Path) -> dict[str, Any]:
    with open(path, "rb") as f:
        digest = hashlib.file_digest(f, "sha256").hexdigest()
        os.fsync(f.fileno())
        return {"size": os.fstat(f.fileno()).st_size, "sha256": digest}


def _sync_folder(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
