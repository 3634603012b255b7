"""`llmexp verify determinism`: the same run twice, compared bit by bit after each step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from llmexp.checkpoint import loading
from llmexp.checkpoint.folders import checkpoint_folders
from llmexp.config.sections import Config
from llmexp.folders import rundir
from llmexp.folders.steps import STEPS_BIN
from llmexp.metrics.keys import TIMINGS
from llmexp.verify import record, runs
from llmexp.verify.checks import Check, none_differ

Texts = dict[str, str]
TextColumn = tuple[Any, ...]  # what it is; from where: a method of `Remains`, with what it is given
EACH = "after each step, each rank"
ROWS: TextColumn = ("metrics rows, but for times and memory", ("rows",))


class Remains:
    """Reads what a recorded run has left. Raises ConfigError for what is damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.read_rows, self.records = runs.read_run_rows(path), record.read_records(path)

    def rows(self, *keys: str) -> Texts:
        """Return figures of the rows by step: these `keys`, or all that say nothing of a machine.

        The digits of a float give it back exactly.
        """
        return {
            f"step {row['step']}, {key}": repr(value)
            for row in self.read_rows
            for key, value in row.items()
            if (key in keys if keys else key not in TIMINGS)
        }

    def steps(self, part: str) -> Texts:
        """Return the recorded digests of a part, such as "parameters", the earliest first."""
        ranks = sorted(self.records)
        return {
            f"step {step}, rank {rank}, {name}": digest
            for step in sorted({step for by_step in self.records.values() for step in by_step})
            for rank in ranks
            for name, digest in self.records[rank].get(step, {}).get(part, {}).items()
        }

    @cached_property
    def loaded(self) -> loading.Loaded:
        """Return the last checkpoint."""
        return loading.read_checkpoint(checkpoint_folders(self.path / rundir.CHECKPOINTS)[-1])

    def tensors(self, kind: str) -> Texts:
        """Return digests of tensors of the last checkpoint; of a split one for each piece."""
        found = {}
        for name, boxes in self.loaded.tensors.get(kind, {}).items():
            for box in boxes:
                with safe_open(box.file, framework="pt") as file:
                    where = f" from {box.offset}" if len(boxes) > 1 else ""
                    found[f"{name}{where}"] = record.digest(file.get_tensor(name))
        return found

    def state(self, *parts: str) -> Texts:
        """Return the values of parts of the last checkpoint's state by dotted name."""
        return _leaves({part: self.loaded.state.get(part) for part in parts})

    def step_file(self) -> Texts:
        """Return the bytes of steps.bin."""
        file = self.path / STEPS_BIN
        return {STEPS_BIN: file.read_bytes().hex() if file.exists() else ""}


def same_bits(columns: Sequence[TextColumn], a: Remains, b: Remains) -> list[Check]:
    """Check that each column is the same in both, also that none is in only one of them."""
    checks = []
    for what, *sources in columns:
        one, other = (
            {k: v for how, *given in sources for k, v in getattr(run, how)(*given).items()}
            for run in (a, b)
        )
        names = list(dict.fromkeys([*one, *other]))
        differing = [name for name in names if one.get(name) != other.get(name)]
        checks.append(none_differ(what, differing, len(names)))
    return checks


def _leaves(tree: Any, prefix: str = "") -> Texts:
    """Return the values of nested containers as texts by dotted name; tensors as digests."""
    if not isinstance(tree, dict | list | tuple):
        text = record.digest(tree) if isinstance(tree, Tensor) else repr(tree)
        return {prefix.removeprefix("."): text}
    found: Texts = {}
    for name, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        found |= _leaves(value, f"{prefix}.{name}")
    return found


_STEPS = 8
NO_TWIN = "train.deterministic=true names an operation that has no deterministic implementation"
# in the order in which a step does it
COLUMNS: tuple[TextColumn, ...] = (
    ("the data of each step", ("rows", "data_digest", "target_tokens")),
    ("loss and gradient norm of each step", ("rows", "train/loss", "grad_norm")),
    (f"parameters {EACH}", ("steps", "parameters")),
    (f"moments {EACH}", ("steps", "optimizer")),
    (f"RNG {EACH}", ("steps", "rng")),
    ROWS,
)


def verify(config: Config, path: Path, steps: int | None, shrink: bool) -> list[Check]:
    """Compare two runs in folders under `path`, of the same config. Raises ConfigError."""
    saves = {"every": None, "save_initial": False}
    plan = runs.watched(config, steps or _STEPS, shrink, checkpoint=saves)
    for name in ("first", "second"):
        runs.train_recorded(path / name, plan)
    checks = same_bits(COLUMNS, Remains(path / "first"), Remains(path / "second"))
    if any(check.passed is False for check in checks) and not config.train.deterministic:
        print(NO_TWIN, flush=True)
    return checks
