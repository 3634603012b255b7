"""Find the micro-batch size for batch.micro_batch_size=auto.

It is the largest that fits, or a smaller one that is faster. Each is tried with all ranks of the
run, in processes of their own, in a folder that goes. Where the ranks of a run were started on
their hosts already, each of them starts such a process.

`python -m llmexp.forecast.fitting` reads a config (JSON) and answers with the size, or the refusal.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmexp import mesh
from llmexp.config.convert import build, with_knobs
from llmexp.config.knobs import deciding_work, fields
from llmexp.config.sections import Config, plain
from llmexp.config.values import AUTO, ConfigError, error_record, refuse
from llmexp.folders import rundir
from llmexp.folders.door import config_yaml
from llmexp.folders.remembered import MEMORY, remember, remembered
from llmexp.forecast import memory
from llmexp.modes.micro_batch import POLL_S, STORE, cut, is_open
from llmexp.system import fileio, hardware
from llmexp.system.child import (
    DONE,
    STOP,
    die_with_parent,
    first_to_go_without_memory,
    how_it_died,
    kill_family,
    never_fail_to_print,
)
from llmexp.system.devices import Device, device_called
from llmexp.system.redact import redacted
from llmexp.system.text import gib
from llmexp.system.workers import keep_template, start_worker, warm
from llmexp.train.assembly.assemble import Parts, assemble

_KEY = "batch.micro_batch_size"
FASTER = 1.02  # a smaller size has to be, to be taken
# What a forecast may be wrong by: beyond it nothing is tried.
UNSURE = 1.2
Measure = Callable[[Config], dict[str, Any]]
_SIZES = "micro_batch_sizes"  # the folder of the cache

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


def with_size(config: Config, ranks: AllRanks | None = None) -> Config:
    """Return the config with a number in the place of `auto`.

    It was found for such a run before, or it is found now: by all ranks of the run where they are
    there already, else on this host. Raises ConfigError.
    """
    if not is_open(config):
        return config
    parts = assemble(config)
    room, deciding = _deciding(config, parts, ranks.least_memory() if ranks else None)
    found = remembered(_SIZES, *deciding)
    if found is None:
        with warm():
            found = _find(parts, room, ranks.measured if ranks else measured)
        remember(_SIZES, found, *deciding)
    return cut(config, found["micro_batch_size"])


def known(config: Config, parts: Parts) -> Config:
    """Return the config with the number that was found for such a run before.

    Raises ConfigError where none was.
    """
    found = remembered(_SIZES, *_deciding(config, parts)[1])
    if found is None:
        text = "the size is found when the run starts; for a forecast add plan.device"
        raise refuse("missing_value", _KEY, AUTO, text, "auto plan.device=cpu")
    return cut(config, found["micro_batch_size"])


def _deciding(
    config: Config, parts: Parts, least: float | None = None
) -> tuple[memory.Room, tuple[Any, ...]]:
    """Return the memory of a rank, and what the size depends on.

    `least`: the bytes of the rank that has least, if others than this host's are asked. Raises
    ConfigError where the memory is not known.
    """
    run, name, limit, device = parts.run, parts.run.device_name, config.batch.memory_gib, None
    if parts.device.type == "cuda":
        there = (hardware.memory_bytes(parts.device) or 0) / memory.GIB
        device = device_called(name, there) or Device(name, name, 0)
        device = dataclasses.replace(device, gib=there)
    room = memory.room_of(parts, device, limit)
    if room is None:
        text = "this host does not say what memory it has; give batch.memory_gib"
        raise refuse("missing_value", _KEY, AUTO, text, "auto batch.memory_gib=16")
    if least is not None and limit is None:
        room = dataclasses.replace(room, total=least, usable=memory.USABLE * least)
    usable = round(room.usable / memory.GIB, 2)
    return room, (deciding_work(parts.config, name), run.threads_per_rank, usable)


def _find(parts: Parts, room: memory.Room, measured: Measure) -> dict[str, Any]:
    """Try sizes, from the largest that should fit, and return the fastest of those that do.

    Raises ConfigError where none does.
    """
    whole = parts.run.micro_batch_size  # of a rank, still in one piece
    sizes = [n for n in range(whole, 0, -1) if whole % n == 0]
    first = _first(parts, room, sizes)
    best, why = dict[str, Any](), ""
    for size in sizes[sizes.index(first) :]:
        # about as many for every size: two micro-batches of the first one, or as many as there are
        sequences = size * -(-min(whole, 2 * first) // size)
        real = {"real_batch_size": sequences * parts.run.dp_size, "ramp": None}
        try:
            found = measured(with_knobs(_cut(parts, size, sequences), batch=real))
        except Died as death:
            # the size is not the cause; a host without memory kills with the same words
            if str(death) == why and "SIGKILL" not in why:
                text = f"steps fail, whatever the size: {why}"
                raise refuse("failed", _KEY, AUTO, text) from None
            why = str(death)
        else:
            peak = found["peak_bytes"]
            rate = parts.run.sequence_length * sequences / found["step_s"]
            if peak <= room.usable:
                of_a_step = parts.run.real_batch_size // parts.run.dp_size
                kind = deciding_work(_cut(parts, size, of_a_step), parts.run.device_name)
                remember(MEMORY, {"peak_bytes": peak}, kind)
                _say(size, f"fits: {gib(peak)} GiB, {rate:,.0f} tokens/s a rank")
                if best and rate < FASTER * best["tokens_per_sec_per_rank"]:
                    return best
                best = {
                    "micro_batch_size": size,
                    "peak_bytes": round(peak),
                    "usable_bytes": round(room.usable),
                    "tokens_per_sec_per_rank": rate,
                }
                continue
            why = f"took {gib(peak)} of {gib(room.usable)} GiB"
        if best:
            return best
        _say(size, f"does not fit: {why}")
    if not best:
        raise _refusal(parts, why)
    return best


def _first(parts: Parts, room: memory.Room, sizes: list[int]) -> int:
    """Return the size to begin with: the largest that should fit, if the model can be rehearsed.

    Raises ConfigError where even one sequence is far too much.
    """
    try:
        compiled = parts.config.train.compile is True
        forecast = memory.Forecast(parts, parts.precision, room, compiled)
        if forecast.fits(forecast.cut):
            return sizes[0]
        if (largest := forecast.largest(forecast.cut, sizes[0])) is not None:
            return largest.micro
        least = forecast.needed(memory.cut_to(forecast.cut, 1))
    except Exception:  # of a model of the user's, which has to see its values
        return sizes[0]
    if least > UNSURE * room.usable:
        text = f"one sequence takes {gib(least)} GiB a rank, {gib(room.usable)} may be used"
        raise _refusal(parts, text)
    return 1


def _refusal(parts: Parts, why: str) -> ConfigError:
    """Return the refusal of a length that does not fit."""
    limited = ", or raise batch.memory_gib" * (parts.config.batch.memory_gib is not None)
    way = f"take a shorter sequence or a smaller model{limited}; llmexp plan plan.device=... names"
    text = f"does not fit at micro_batch_size 1: {why}; {way} more"
    return refuse("too_large", "batch.sequence_length", parts.run.sequence_length, text)


def _cut(parts: Parts, size: int, sequences: int) -> Config:
    """Return the config with so many sequences of a rank in a step, cut into this micro-batch."""
    batch = {"micro_batch_size": size, "gradient_accumulation_steps": sequences // size}
    return with_knobs(parts.config, batch=batch)


def _say(size: int, text: str) -> None:
    print(f"{_KEY}=auto: {size} {redacted(text)}", file=sys.stderr, flush=True)


def main() -> None:
    """Answer the question on standard input."""
    request, answers = json.load(sys.stdin), sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        try:
            config, run, ranks = build(request["config"]), request.get("run"), None
            if run is None:
                keep_template()
            else:
                ranks = AllRanks(Path(run), config.parallelism.start_timeout_s)
            size = with_size(config, ranks).batch.micro_batch_size
            found: dict[str, Any] = {"micro_batch_size": size}
        except ConfigError as error:
            found = {"error": error_record(error)}
        except Lost as error:
            found = {"lost": str(error)}
    print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    die_with_parent()
    never_fail_to_print()
    STOP.install().importing = False  # a signal ends what is tried, and its folder goes
    main()
