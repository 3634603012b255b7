"""A sweep without its command line, for tests of how its points run."""

import contextlib
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from llmexp.folders.ledger import Ledger, PointFacts
from llmexp.sweep import local
from llmexp.sweep.current import Current
from llmexp.sweep.local import Local
from llmexp.sweep.points import Point
from llmexp.sweep.running import drive
from llmexp.sweep.section import build_sweep
from tests.conftest import ROOT

DEFAULTS = yaml.safe_load((ROOT / "conf" / "config.yaml").read_text())["sweep"]
SHARED = ("launcher", "grid", "signals")
STEPS = 30
RUN = [
    "data=synthetic", "data.n_tokens=5000", f"train.max_steps={STEPS}", "train.log_every=1",
    "train.eval_every=null", "train.eval_tokens=500", "checkpoint.every=10", "optimizer.lr=0.01",
    "model.dropout=0.1",
]  # fmt: skip
# Two points of two steps, of which the warm-up is one.
PAIR = [
    *RUN, "schedule=constant", "schedule.warmup_ratio=0.5", "train.max_steps=2",
    "clip.max_norm=0.5,1.0", "sweep.min_effect=0.5",
]  # fmt: skip


def current_sweep(folder: Path, **given: Any) -> Current:
    """A sweep in a folder, with these knobs of the section `sweep` and fields of `Current`."""
    knobs = {key: value for key, value in given.items() if key not in SHARED}
    shared: dict[str, Any] = {key: given[key] for key in SHARED if key in given}
    launcher, grid = shared.pop("launcher", "local"), shared.pop("grid", True)
    ledger = Ledger(folder, "n", "g", launcher, [], [])
    return Current(
        build_sweep(DEFAULTS | knobs), None, [], folder, True, grid, launcher, None, None,
        contextlib.ExitStack(), opened=ledger, **shared,
    )  # fmt: skip


def new_point(current: Current, name: str, ranks: int = 1, devices: int = 0) -> Point:
    """A point of the sweep, in a run folder without a config of its own."""
    entry = current.ledger.add(name.partition("-")[2], [], name)
    path = current.where / name
    path.mkdir(exist_ok=True)
    if not (path / "config.yaml").exists():
        (path / "config.yaml").write_text("{}")
    facts = PointFacts(name, devices, {"max_steps": 80, "nproc_per_node": ranks})
    return Point(entry, current.where, [], [], None, checked=facts)


def stand_in(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Have a shell run the script in place of each worker; $0 is the run's folder."""

    def start(argument: str, log: Path, env: dict[str, str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["bash", "-c", script, argument], env=env, process_group=0)

    monkeypatch.setattr(local, "start_worker", start)


def run_locally(current: Current, points: list[Point]) -> None:
    drive(Local(current, points), list(points), current, quiet_display())


def quiet_display() -> SimpleNamespace:
    return SimpleNamespace(line=print, tick=lambda: None)
