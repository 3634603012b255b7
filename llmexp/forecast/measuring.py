"""Train a few steps of a run in a process of its own, with all its ranks, in a folder that goes.

Where the ranks of a run were started on their hosts already, each of them starts such a process.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from llmexp import mesh
from llmexp.config.convert import with_knobs
from llmexp.config.knobs import fields
from llmexp.config.sections import Config, plain
from llmexp.folders import rundir
from llmexp.folders.door import config_yaml
from llmexp.modes.micro_batch import POLL_S, STORE
from llmexp.system import fileio
from llmexp.system.child import DONE, first_to_go_without_memory, how_it_died, kill_family
from llmexp.system.workers import start_worker

ERRORS = "stderr.log"
LATE_S = 30.0  # for ranks to answer after another one has failed


class Died(Exception):
    """The process did not reach its end; the text is what it printed last."""


class Lost(Exception):
    """Ranks of the run do not answer."""


def _describe(config: Config, path: Path, whole: bool = False) -> None:
    """Make the folder of a run that tries the steps of a config, or times the `whole` of it."""
    path.mkdir(parents=True)
    quiet = with_knobs(
        config,
        tracker={"kind": "none", "also": []},
        train={key.partition(".")[2]: None for key, knob in fields().items() if knob.a_step},
        parallelism={"max_restarts": 0},
    )
    fileio.write_whole(path / rundir.CONFIG, config_yaml(plain(quiet)))
    fileio.write_json(path / rundir.ASKED, {"mode": "calibration", "all": whole})


def measured(config: Config, whole: bool = False, disk: Path | None = None) -> dict[str, Any]:
    """Return what the run's steps took, with the seconds of its start and its end.

    Those of its start as a fork are without the template's, which are `import_s`.

    Of the `whole` run return what comes between them too (`modes.calibration`). `disk`: a folder on
    the one that checkpoints are saved to. Raises Died.
    """
    prefix = "llmexp-steps-"
    with tempfile.TemporaryDirectory("", prefix, disk, ignore_cleanup_errors=True) as there:
        path = Path(there) / "run"
        _describe(config, path, whole)
        asked = time.time()
        process = start_worker(str(path), log=path / ERRORS)
        started = time.time()
        first_to_go_without_memory(process.pid)
        try:
            code = process.wait()
        except BaseException:
            kill_family(process.pid)
            process.wait()
            raise
        ended = time.time()
        if code != DONE or not (path / rundir.FOUND).is_file():
            printed = fileio.last_line(path / ERRORS).removeprefix("llmexp: ") if code > 0 else ""
            why = rundir.read_status(path).get("error") or printed
            raise Died(str(why) or how_it_died(code, stopped=False))
        found: dict[str, Any] = fileio.read_json(path / rundir.FOUND)
    found["import_s"], found["start_s"] = started - asked, found.pop("began") - started
    found["end_s"] = ended - found.pop("ended")
    return found


class AllRanks:
    """Ask all ranks of the run in the folder, which wait for questions (`modes.micro_batch`)."""

    def __init__(self, run: Path, timeout_s: float) -> None:
        self._logs, self._world = run / "logs", int(os.environ["WORLD_SIZE"])
        self._store, self._asked = mesh.visited_store(STORE, timeout_s), 0
        for old in self._logs.glob("trial-*"):  # of a start that was killed
            shutil.rmtree(old, ignore_errors=True)

    def least_memory(self) -> float | None:
        """Return the bytes that each rank has; None where one does not know."""
        found = [json.loads(text) for text in self._answers("memory", math.inf)]
        return None if None in found else min(found)

    def measured(self, config: Config) -> dict[str, Any]:
        """Return what the run's steps took on all ranks, as `measured` does.

        Raises Died, and Lost.
        """
        number, path = self._asked, self._logs / f"trial-{self._asked}"
        self._asked += 1
        _describe(config, path)
        try:
            self._store.set(f"question/{number}", json.dumps({"trial": path.name}))
            answers = self._answers(f"ended/{number}", LATE_S, f"failed/{number}")
            if failed := [one for one in map(json.loads, answers) if one]:
                raise Died(min(failed, key=lambda one: one["order"])["text"])
            found: dict[str, Any] = fileio.read_json(path / rundir.FOUND)
            return found
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def _answers(self, key: str, late_s: float, failed: str = "") -> list[bytes]:
        """Return what each rank says; once one has `failed` the others have `late_s` to say it.

        Raises Lost.
        """
        end, waiting = math.inf, list(range(self._world))
        while waiting := [rank for rank in waiting if not self._store.check([f"{key}/{rank}"])]:
            if failed and end == math.inf and self._store.check([failed]):
                end = time.monotonic() + late_s
            if time.monotonic() > end:
                raise Lost(f"{mesh.numbered(waiting)} was lost while sizes were tried")
            time.sleep(POLL_S)
        return [self._store.get(f"{key}/{rank}") for rank in range(self._world)]
