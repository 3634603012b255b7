"""Find the micro-batch size for batch.micro_batch_size=auto.

It is the largest that fits, or a smaller one that is faster. Each is tried with all ranks of the
run, in processes of their own. `python -m llmexp.forecast.fitting` reads a config (JSON) and
answers with the size, or the refusal.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmexp.config.convert import build, with_knobs
from llmexp.config.knobs import deciding_work
from llmexp.config.sections import Config
from llmexp.config.values import AUTO, ConfigError, error_record, refuse
from llmexp.folders.remembered import MEMORY, remember, remembered
from llmexp.forecast import memory
from llmexp.forecast.measuring import AllRanks, Died, Lost, measured
from llmexp.modes.micro_batch import cut, is_open
from llmexp.system import hardware
from llmexp.system.child import STOP, die_with_parent, never_fail_to_print
from llmexp.system.devices import Device, device_called
from llmexp.system.redact import redacted
from llmexp.system.text import gib
from llmexp.system.workers import warm
from llmexp.train.assembly.assemble import Parts, assemble

_KEY = "batch.micro_batch_size"
FASTER = 1.02  # a smaller size has to be, to be taken
# What a forecast may be wrong by: beyond it nothing is tried.
UNSURE = 1.2
Measure = Callable[[Config], dict[str, Any]]
_SIZES = "micro_batch_sizes"  # the folder of the cache


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

    `least`: the bytes of the rank that has least, if others than this host's are asked.
    """
    room, run = _room(parts, config.batch.memory_gib), parts.run
    if least is not None and config.batch.memory_gib is None:
        room = dataclasses.replace(room, total=least, usable=memory.USABLE * least)
    usable = round(room.usable / memory.GIB, 2)
    kind = deciding_work(parts.config, run.device_name)
    return room, (kind, run.threads_per_rank, usable)


def _room(parts: Parts, limit: float | None) -> memory.Room:
    """Return the memory of a rank on the device of the run.

    Raises ConfigError where it is not known.
    """
    device = None
    if parts.device.type == "cuda":
        there = hardware.memory_bytes(parts.device) or 0
        name = parts.run.device_name
        device = device_called(name, there / memory.GIB) or Device(name, name, 0)
        device = dataclasses.replace(device, gib=there / memory.GIB)
    room = memory.room_of(parts, device, limit)
    if room is None:
        text = "this host does not say what memory it has; give batch.memory_gib"
        raise refuse("missing_value", _KEY, AUTO, text, "auto batch.memory_gib=16")
    return room


def _find(parts: Parts, room: memory.Room, measured: Measure) -> dict[str, Any]:
    """Try sizes, from the largest that should fit, and return the fastest of those that do.

    Raises ConfigError where none does.
    """
    whole = parts.run.micro_batch_size  # of a rank, still in one piece
    sizes = [n for n in range(whole, 0, -1) if whole % n == 0]
    first = _first(parts, room, sizes)
    best: dict[str, Any] | None = None
    why = ""
    for size in sizes[sizes.index(first) :]:
        sequences = _sequences(size, first, whole)
        real = {"real_batch_size": sequences * parts.run.dp_size, "ramp": None}
        try:
            found = measured(with_knobs(_cut(parts, size, sequences), batch=real))
        except Died as death:
            # the size is not the cause; a host without memory kills with the same words
            if str(death) == why and "SIGKILL" not in why:
                raise refuse(
                    "failed", _KEY, AUTO, f"steps fail, whatever the size: {why}"
                ) from None
            why = str(death)
        else:
            rate = parts.run.sequence_length * sequences / found["step_s"]
            if found["peak_bytes"] <= room.usable:
                of_a_step = parts.run.real_batch_size // parts.run.dp_size
                kind = deciding_work(_cut(parts, size, of_a_step), parts.run.device_name)
                remember(MEMORY, {"peak_bytes": found["peak_bytes"]}, kind)
                _say(size, f"fits: {gib(found['peak_bytes'])} GiB, {rate:,.0f} tokens/s a rank")
                if best is not None and rate < FASTER * best["tokens_per_sec_per_rank"]:
                    return best
                best = {
                    "micro_batch_size": size,
                    "peak_bytes": round(found["peak_bytes"]),
                    "usable_bytes": round(room.usable),
                    "tokens_per_sec_per_rank": rate,
                }
                continue
            why = f"took {gib(found['peak_bytes'])} of {gib(room.usable)} GiB"
        if best is not None:
            return best
        _say(size, f"does not fit: {why}")
    if best is None:
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


def _sequences(size: int, first: int, whole: int) -> int:
    """Return the sequences of a rank in a step that is tried.

    They are about as many for every size: two micro-batches of the first one where the run has as
    many.
    """
    return size * -(-min(whole, 2 * first) // size)


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
            if run is not None:
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
