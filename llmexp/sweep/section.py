"""The section `sweep` of a command: its knobs, and how they are read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmexp.config.convert import convert_section
from llmexp.config.kinds import Kind
from llmexp.config.knobs import idle
from llmexp.config.values import choice, count, flatten, knob, refuse, section_knobs, where

_IN_A_GRID, _NO_SCREEN = where("sweep.search.trials", None), where("sweep.screen", None)
_DECIDING, _ONE_BY_ONE = where("sweep.decide"), where("sweep.decide", False)


@dataclass(frozen=True, kw_only=True)
class Search:
    """The section `sweep.search`: points that Optuna chooses by the results of others."""

    trials: int | None = count(
        "trials of a search; null: the sweep is a grid", 30, default=None, acts=_NO_SCREEN
    )
    sampler: str = choice("how Optuna chooses them", "tpe | gp | cmaes | qmc", default="tpe")
    rerun_top: int = knob(
        "best trials of a search that are trained again before one is named",
        3,
        at_least=0,
        default=3,
    )
    seeds: int = count("fresh seeds that each of them is trained with", 3, default=3)


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The way that the points of a sweep are run; no part of a run's own config."""

    resume: str | None = knob(
        "folder of a sweep to continue: finished runs are skipped, crashed ones resumed, failed "
        "ones retried; null: a new one",
        "outputs/default/2030-01-01_12-00-00",
    )
    max_parallel: int | None = count(
        "runs at the same time; null: one for each slot of devices, 1 on a CPU", 2
    )
    devices_per_run: int | None = count(
        "CUDA devices of each run; null: as many as it has ranks", 1
    )
    on_infeasible: str = choice(
        "a run that is refused ends the sweep before it starts, or is left out", "refuse | skip"
    )
    max_retries: int = knob(
        "times that failed runs are started again once the others have ended", 1, at_least=0
    )
    stop_on_failure: bool = knob("start no further run after one has failed")
    warm: bool = knob(
        "start runs on this machine as forks of a process that has imported torch already "
        "(Linux); false: each one imports it",
        default=True,
    )
    hang_timeout_s: float | None = knob(
        "seconds without output (a row, a line, a checkpoint) after which a run is "
        "ended; null: never",
        1800.0,
        above=0,
    )
    halving: float | None = knob(
        "successive halving: share of its steps that each run gets at first; null: all",
        0.125,
        above=0,
        at_most=1,
        acts=(_ONE_BY_ONE, _NO_SCREEN),
    )
    halving_keep: float = knob(
        "share of the runs that continues after each rung",
        0.5,
        above=0,
        below=1,
        default=0.5,
        acts=where("sweep.halving"),
    )
    screen: int | str | None = count(
        "runs of a screen, a fraction of all combinations of keys with two values each: 8, 16 or "
        "32; auto: by the number of keys; null: all combinations",
        16,
        auto=True,
        default=None,
    )
    decide: bool = knob(
        "train further seeds of the settings that can still be best, until one is best, all are "
        "alike, or the seeds, hours or tokens are used up",
        default=False,
        acts=(_IN_A_GRID, _NO_SCREEN),
    )
    first_seeds: int = knob(
        "seeds of each setting before the first interim analysis, with sweep.decide",
        2,
        at_least=2,
        default=2,
        acts=_DECIDING,
    )
    max_seeds: int = knob(
        "seeds of a setting at most, with sweep.decide", 8, at_least=2, default=8, acts=_DECIDING
    )
    max_hours: float | None = knob(
        "hours of training of all runs together, beyond which sweep.decide gives no further "
        "seeds; null: no limit",
        8.0,
        above=0,
        default=None,
        acts=_DECIDING,
    )
    max_tokens: int | None = count(
        "tokens of all runs together, beyond which sweep.decide gives no further seeds; null: no "
        "limit",
        1_000_000_000,
        default=None,
        acts=_DECIDING,
    )
    twins: int = knob(
        "times that the leading setting of a grid is trained once more at the end, different in "
        "rounding only",
        2,
        at_least=0,
        acts=(where("sweep.report", "runs"), _IN_A_GRID, _NO_SCREEN),
    )
    min_effect: float = knob(
        "nats of loss below which a difference does not matter", 0.002, at_least=0
    )
    report: str = choice(
        "the table at the end", "runs | throughput", default="runs", acts=_ONE_BY_ONE
    )
    search: Search = field(default_factory=Search)

    def devices_of(self, ranks: int, devices: int) -> int:
        """Return the CUDA devices that a point of so many ranks takes; none for one on the CPU."""
        return (self.devices_per_run or ranks) if devices else 0

    def at_once(self, devices: int, needs: Sequence[int]) -> int:
        """Return how many points run at once on CUDA devices; `needs`: those of each point."""
        most = self.max_parallel or devices or 1
        if not any(needs):
            return most
        return max(1, min(most, devices * len(needs) // sum(needs)))


def build_sweep(mapping: Mapping[str, Any]) -> Sweep:
    """Return the section `sweep`. Raises ConfigError, also for what does nothing beside others."""
    found = convert_section(Sweep, mapping, "sweep.")
    flat = flatten(dataclasses.asdict(found), "sweep.")
    knobs = {f"sweep.{name}": knob for name, knob in section_knobs(Sweep).items()}
    for key, condition in idle(knobs, flat).items():
        called_off = found.resume is not None and key == "sweep.halving_keep"
        if flat[key] and flat[key] != knobs[key].default and not called_off:
            kind: Kind = "conflict" if condition.values else "idle_knob"
            raise refuse(kind, key, flat[key], "; ".join(condition.why(flat)))
    return found
