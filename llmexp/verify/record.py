"""A hook that writes down what every rank computes, step by step, as digests: tensors, gradients,
the RNG's state.

FOLDER/rank-<r>.jsonl holds a JSON object a step, each step once, also after a kill and a resume;
step 0 is what the run started from. The environment says where FOLDER is, and how much is recorded.
Two such files are equal where two runs computed the same bits.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import random
import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from llmexp import mesh
from llmexp.checkpoint.pieces import named_tensors, names_by_id
from llmexp.runs import rundir
from llmexp.settings.config import Config
from llmexp.system import fileio
from llmexp.train.diagnose import tensors_in

# The folder; "1": also what goes into and out of each module; "1": also which operations are not
# deterministic.
FOLDER, MODULES = "LLMEXP_RECORD_FOLDER", "LLMEXP_RECORD_MODULES"
WARNINGS = "LLMEXP_RECORD_WARNINGS"
HOOK, LAST_HOOK = "llmexp.verify.record.record", "llmexp.verify.record.entered"

STARTS = "starts.jsonl"

Records = dict[int, dict[int, dict[str, Any]]]  # by rank, by step


def recorded(config: Config) -> Config:
    """Return the config with the recorder before the user's own hooks, which may draw random
    numbers, and one after them."""
    return dataclasses.replace(config, hooks=[HOOK, *config.hooks, LAST_HOOK])


def environment(run: Path, *, modules: bool = False, warned: bool = False) -> dict[str, str]:
    """Return what a worker needs in its environment to record into `run`/verify."""
    found = {FOLDER: str((run / "verify").absolute())}
    if modules:
        found[MODULES] = "1"
    if warned:  # cuBLAS refuses to be deterministic without its variable
        found |= {WARNINGS: "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    return found


def record(event: str, context: Any) -> None:
    """Act as a hook (`event` and `context` as of every hook)."""
    if event == "step_start":
        _recorder().begin(context)
    elif event == "step_end":
        _recorder().end(context)


def entered(event: str, context: Any) -> None:
    """Act as the last hook: record what the user's own left of the parameters."""
    if event == "step_start" and os.environ.get(MODULES):
        _recorder().entered = {n: digest(t) for n, t in named_tensors(context.model).items()}


def read(run: Path) -> Records:
    """Return what the ranks of a run recorded."""
    files = {int(p.stem.removeprefix("rank-")): p for p in (run / "verify").glob("rank-*.jsonl")}
    return {
        rank: {row["step"]: row for row in rundir.read_rows(path)} for rank, path in files.items()
    }


def starts(run: Path) -> list[int]:
    """Return the step at which each process of rank 0 began."""
    return [row["step"] for row in rundir.read_rows(run / "verify" / STARTS)]


def digest(value: Any) -> str:
    """Return a digest of the bits, dtype and shape of this rank's part of a tensor, or of the text
    of anything else."""
    hashed = hashlib.blake2b(digest_size=8)
    if isinstance(value, Tensor):
        held = mesh.local_part(value.detach()).cpu().contiguous()
        hashed.update(f"{held.dtype}{tuple(held.shape)}".encode())
        hashed.update(held.flatten().view(torch.uint8).numpy().data)
    else:
        hashed.update(repr(value).encode())
    return hashed.hexdigest()


def digest_all(values: Iterable[Any]) -> str:
    return "".join(digest(value) for value in values)


@functools.cache
def _recorder() -> _Recorder:
    return _Recorder(Path(os.environ[FOLDER]) / f"rank-{os.environ.get('RANK', '0')}.jsonl")


class _Recorder:
    """The open file of this process, and what the step under way has shown so far."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: TextIO | None = None
        self.warned: set[str] = set()
        self._forget()

    def begin(self, context: Any) -> None:
        if self.file is None:
            self._open(context)
        self._forget()  # an evaluation has shown some too

    def _forget(self) -> None:
        # [module, "in" or "out", digest], in the order of the forward passes
        self.events: list[list[str]] = []
        # [parameter, digest], as the backward passes leave them on this rank
        self.gradients: list[list[str]] = []
        self.reduced: dict[str, str] = {}  # by parameter: what the optimizer gets
        self.entered: dict[str, str] = {}  # by parameter, when the user's hooks have had their turn

    def end(self, context: Any) -> None:
        seen = {key: getattr(self, key) for key in ("entered", "events", "gradients", "reduced")}
        tensors, warned = _tensors(context), sorted(self.warned)
        self._write(context.step, **seen, **tensors, rng=_rng(), warned=warned)

    def _open(self, context: Any) -> None:
        """Go on after the step before this one: what was recorded of later ones is of a process
        that was killed."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.stem == "rank-0":
            with open(self.path.with_name(STARTS), "a", encoding="utf-8") as begun:
                begun.write(json.dumps({"step": context.step}) + "\n")
        # step 0 is written anew
        kept = [row for row in rundir.read_rows(self.path) if row["step"] < context.step > 1]
        fileio.write_whole(self.path, "".join(json.dumps(row) + "\n" for row in kept))
        self.file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 (open for the whole run)
        # to look into a compiled graph would cut it
        if os.environ.get(MODULES) and not context.run.compiled.startswith("on"):
            self._watch(context.model, context.optimizers)
        if os.environ.get(WARNINGS):
            self._listen()
        if context.step == 1:
            classes = {name: type(m).__name__ for name, m in context.model.named_modules()}
            kernels = [kernel(o) for o in context.optimizers]
            self._write(0, modules=classes, optimizers=kernels, **_tensors(context))

    def _write(self, step: int, **found: Any) -> None:
        assert self.file is not None
        self.file.write(json.dumps({"step": step, **{k: v for k, v in found.items() if v}}) + "\n")
        self.file.flush()

    def _watch(self, model: nn.Module, optimizers: list[Optimizer]) -> None:
        for name, module in model.named_modules():
            going_in = functools.partial(self._pass, model, name, "in")
            module.register_forward_pre_hook(going_in, with_kwargs=True)
            module.register_forward_hook(functools.partial(self._pass, model, name, "out"))
        for name, tensor in named_tensors(model).items():
            if tensor.requires_grad:
                tensor.register_post_accumulate_grad_hook(functools.partial(self._left, name))
        names = names_by_id(model, optimizers)
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(functools.partial(self._before_update, names))

    def _pass(
        self, model: nn.Module, name: str, way: str, module: nn.Module, args: Any, more: Any
    ) -> None:
        """Note what goes into a module, or what comes out of it: `more` then, else by name."""
        if model.training:
            values = (args, more) if way == "in" else more
            self.events.append([name, way, digest_all(tensors_in(values))])

    def _left(self, name: str, parameter: Tensor) -> None:
        self.gradients.append([name, digest(parameter.grad)])

    def _before_update(
        self, names: dict[int, str], optimizer: Optimizer, args: Any, kwargs: Any
    ) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.reduced[names[id(parameter)]] = digest(parameter.grad)

    def _listen(self) -> None:
        known = re.compile(r"\s*(\S+) does not have a deterministic implementation")

        def note(message: Warning | str, *args: Any, **kwargs: Any) -> None:
            if named := known.match(str(message)):
                self.warned.add(named[1])

        torch.use_deterministic_algorithms(True, warn_only=True)
        warnings.simplefilter("always")
        warnings.showwarning = note


def kernel(optimizer: Optimizer) -> str:
    """Return the optimizer and which of torch's kernels it takes: "AdamW, fused"."""
    group = optimizer.param_groups[0]
    kind = [name for name in ("fused", "foreach") if group.get(name)]
    return ", ".join([type(optimizer).__name__, *kind])


def _tensors(context: Any) -> dict[str, dict[str, str]]:
    """Digest of parameters and buffers, and of the optimizers' state, by name."""
    names = names_by_id(context.model, context.optimizers)
    return {
        "parameters": {name: digest(t) for name, t in named_tensors(context.model).items()},
        "optimizer": {
            f"{number}/{names[id(p)]}/{key}": digest(value)
            for number, optimizer in enumerate(context.optimizers)
            for p, states in optimizer.state.items()
            for key, value in states.items()
        },
    }


def _rng() -> dict[str, str]:
    """Digest of the generators' states; each step starts from a seed of its own, so they tell what
    it drew."""
    found = {
        "torch": digest(torch.get_rng_state()),
        "python": digest(random.getstate()),
        "numpy": digest_all(
            v.tobytes() if isinstance(v, np.ndarray) else v for v in np.random.get_state()
        ),
    }
    if torch.cuda.is_initialized():
        found["cuda"] = digest(torch.cuda.get_rng_state())
    return found
