"""Record, as a hook, what every rank computes in each step: digests of parameters, moments and RNG.

FOLDER/rank-<r>.jsonl holds a JSON object a step, each step once, also after a kill and a resume;
step 0 is what the run started from. The environment says where FOLDER is. Two such files are equal
where two runs computed the same bits.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from torch import Tensor

from llmexp import mesh
from llmexp.checkpoint.saving import other_buffers
from llmexp.checkpoint.slices import named_tensors, names_by_id
from llmexp.config.values import ConfigError
from llmexp.optim.states import apart
from llmexp.system import fileio

FOLDER, HOOK = "LLMEXP_RECORD_FOLDER", "llmexp.verify.record.record"
_STARTS = "starts.jsonl"

Records = dict[int, dict[int, dict[str, Any]]]  # by rank, by step


def recorder_environment(run: Path) -> dict[str, str]:
    """Return what a worker needs in its environment to record into `run`/verify."""
    return {FOLDER: str((run / "verify").absolute())}


def record(event: str, context: Any) -> None:
    """Act as a hook (`event` and `context` as of every hook)."""
    if event == "step_start" and not _files:
        _open(context)
    elif event == "step_end":
        _write(context.step, **_tensors(context), rng=_rng())


def read_records(run: Path) -> Records:
    """Return what the ranks of a run recorded."""
    files = {int(p.stem.removeprefix("rank-")): p for p in (run / "verify").glob("rank-*.jsonl")}
    return {rank: {row["step"]: row for row in _lines(path)} for rank, path in files.items()}


def starts(run: Path) -> list[int]:
    """Return the step at which each process of rank 0 began."""
    return [row["step"] for row in _lines(run / "verify" / _STARTS) if row["rank"] == 0]


def processes(run: Path) -> dict[int, int]:
    """Return the last process of each rank that has begun."""
    return {row["rank"]: row["pid"] for row in _lines(run / "verify" / _STARTS)}


def _lines(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a file of records; that of a killed process may end in a torn one.

    Raises ConfigError for damage.
    """
    if not path.exists():
        return []
    try:
        return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
    except ValueError:
        raise ConfigError(
            "damaged_file", f"{path}: is damaged; remove {path.parent.parent}, and start again"
        ) from None


def digest(value: Any) -> str:
    """Return a digest of the bits, dtype and shape of this rank's part of a tensor.

    Anything else is digested by its text.
    """
    hashed = hashlib.blake2b(digest_size=8)
    if isinstance(value, Tensor):
        held = mesh.local_part(value.detach()).cpu().contiguous()
        hashed.update(f"{held.dtype}{tuple(held.shape)}".encode())
        hashed.update(held.flatten().view(torch.uint8).numpy().data)
    else:
        hashed.update(repr(value).encode())
    return hashed.hexdigest()


_files: list[TextIO] = []  # that of this process, once it is open


def _open(context: Any) -> None:
    """Go on after the step before this one.

    What was recorded of later steps is of a process that was killed.
    """
    rank = int(os.environ.get("RANK", "0"))
    path = Path(os.environ[FOLDER]) / f"rank-{rank}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(_STARTS), "a", encoding="utf-8") as begun:
        begun.write(json.dumps({"step": context.step, "rank": rank, "pid": os.getpid()}) + "\n")
    # step 0 is written anew
    kept = [row for row in _lines(path) if row["step"] < context.step > 1]
    fileio.write_whole(path, "".join(json.dumps(row) + "\n" for row in kept))
    _files.append(open(path, "a", encoding="utf-8"))  # noqa: SIM115 (open for the whole run)
    if context.step == 1:
        _write(0, **_tensors(context))


def _write(step: int, **found: Any) -> None:
    row = {"step": step, **{k: v for k, v in found.items() if v}}
    _files[0].write(json.dumps(row) + "\n")
    _files[0].flush()


def _tensors(context: Any) -> dict[str, dict[str, str]]:
    """Digest of parameters and buffers, and of the optimizers' state, by name."""
    names = names_by_id(context.model, context.optimizers)
    return {
        "parameters": {
            name: digest(t)
            for find in (named_tensors, other_buffers)
            for name, t in find(context.model).items()
        },
        "optimizer": {
            f"{number}/{names[id(p)]}/{key}": digest(value)
            for number, optimizer in enumerate(context.optimizers)
            for p, state in optimizer.state.items()
            for held in apart(state)
            for key, value in held.items()
        },
    }


def _rng() -> dict[str, str]:
    """Return digests of the generators' states.

    Each step starts from a seed of its own, so they tell what it drew.
    """
    found = {
        "torch": digest(torch.get_rng_state()),
        "python": digest(random.getstate()),
        "numpy": "".join(
            digest(v.tobytes() if isinstance(v, np.ndarray) else v) for v in np.random.get_state()
        ),
    }
    if torch.cuda.is_initialized():
        found["cuda"] = digest(torch.cuda.get_rng_state())
    return found
