"""Paths in, an answer out: one law for each ladder, and what ladders are to each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from llmexp.config.values import ConfigError, nearest
from llmexp.scaling.gain import Gain, gain
from llmexp.scaling.isoflop import Parabolas, parabolas
from llmexp.scaling.ladders import CELL, GIVEN, Ladder, LawPoint, counts_of, ladders
from llmexp.scaling.law import OWN_AXES, Power, Surface
from llmexp.system.text import listed, number

FORMS = ("surface", "isoflop", "power")
TOP = 1e40  # FLOPs; no prediction lies further


@dataclass
class Fits:
    """Hold what fits found."""

    form: str
    count: str
    laws: list[Surface | Power]
    problems: tuple[str, ...] = ()
    gains: list[Gain] = field(default_factory=list)

    @property
    def surfaces(self) -> list[Surface]:
        """Return the laws that are surfaces."""
        return [law for law in self.laws if isinstance(law, Surface)]

    @cached_property
    def parabolas(self) -> dict[Surface | Power, Parabolas | None]:
        """Return the parabolas beside each surface."""
        return {s: parabolas(s) for s in self.surfaces}


def fit(
    paths: Sequence[Any],
    *,
    form: str | None = None,
    by: str | None = None,
    count: str | None = None,
    predict: float | str | None = None,
    figure: str | None = None,
    filter: str | None = None,
) -> Fits:
    """Fit laws to the runs under the paths, sweeps, folders of them, globs, or runs of others.

    `form`: surface (L over N and D), isoflop (parabolas, beside the surface), power (one axis,
    `by`: tokens, flops, parameters or a knob); default: what the runs allow. `count`: how N counts
    parameters (all, head, blocks). `predict`: FLOPs to predict at, of a power law a value of `by`,
    or a size and tokens, such as N=1e9,D=2e10. `figure` and `filter` are of runs of others.
    Raises ConfigError for what cannot be fitted.
    """
    if by is not None and form not in (None, "power"):
        raise ConfigError(
            "conflict", f"--by {by}: is of a power law; for example --form power --by {by}"
        )
    found, problems = ladders(paths, None if by in OWN_AXES else by, figure, filter)
    points = [p for ladder in found for p in ladder.points]
    counted = _count(points, count)
    if by is not None and by not in OWN_AXES:
        _check_axis(by, points)
    axes = [by or _axis(ladder, counted) for ladder in found]
    if by is not None or (form is None and "" not in axes):
        form = "power"
    at = {} if predict is None else _targets(predict)
    if form == "power" and "N" in at:
        text = "is of a surface; a power law takes one number"
        raise ConfigError("conflict", f"--predict {predict}: {text}")
    place, target = (at["N"], at["D"]) if "N" in at else None, at.get("")
    answer, refused = Fits(form or "surface", counted, []), list[ConfigError]()
    for ladder, axis in zip(found, axes, strict=True):
        seed = len(answer.laws)  # or ladders of equally many runs would share their draws
        try:
            answer.laws.append(
                Power(ladder, counted, axis or "flops", target, seed)
                if form == "power"
                else Surface(ladder, counted, target, seed, place)
            )
        except ConfigError as error:
            refused.append(error)
            problems.append(f"{error} (left out: {listed([p.name for p in ladder.points])})")
    if not answer.laws:
        raise refused[0]
    answer.problems = tuple(problems)
    if answer.surfaces and not answer.surfaces[0].edge:  # at an edge a frontier is a guess
        answer.gains = [gain(answer.surfaces[0], s) for s in answer.surfaces[1:] if not s.edge]
    return answer


def _targets(given: float | str) -> dict[str, float]:
    """Return what to predict at: a number under "", or the N and D of N=1e9,D=2e10.

    Raises ConfigError.
    """
    text = str(given)
    try:
        pairs = [part.split("=") for part in text.split(",")] if "=" in text else [["", text]]
        found = {name.strip(): float(value) for name, value in pairs}
    except ValueError:
        found, pairs = {}, []
    known = {*found} in ({""}, {"N", "D"}) and len(found) == len(pairs)
    if not known or not all(0 < v < TOP for v in found.values()) or text.startswith("="):
        text = "a number above 0 is needed, or a size and tokens"
        example = "--predict 1e16 or --predict N=1e9,D=2e10"
        raise ConfigError("wrong_type", f"--predict {given}: {text}; for example {example}")
    return found


def _count(points: Sequence[LawPoint], count: str | None) -> str:
    """Return how N counts parameters: as asked for, else the first way that all runs know."""
    known = counts_of(points)
    if not known:
        raise ConfigError(
            "cannot_fit",
            "the paths count parameters in no common way (tables and runs together); fit them "
            "one by one, for example llmexp fit outputs/default",
        )
    if count is None or count in known:
        return count or known[0]
    if known == [GIVEN]:
        raise ConfigError(
            "idle_knob",
            f"--count {count}: a table has one N, counted as it was there; leave --count out",
        )
    raise ConfigError(
        "cannot_fit", f"--count {count}: not all runs know it; for example --count {known[0]}"
    )


def _check_axis(by: str, points: Sequence[LawPoint]) -> None:
    """Raise ConfigError for a key of which no run has a number above 0."""
    if any((number(p.values.get(by)) or 0) > 0 for p in points):
        return
    given = [p.record.config if p.record else p.values for p in points]
    keys = {k for values in given for k, v in values.items() if (number(v) or 0) > 0}
    vary = [k for k in sorted(keys) if len({number(g.get(k)) for g in given}) > 1]
    there = f" (runs differ in {listed(vary, 8)})" if vary else ""
    raise ConfigError(
        "unknown_row",
        f"--by {by}: no run has a number above 0 of that name{there}; for example --by tokens."
        f"{nearest(by, [*OWN_AXES, *keys])}",
    )


def _axis(ladder: Ladder, count: str) -> str:
    """Return the one axis that runs of one size, length or ratio have; empty where both vary."""
    sizes, tokens, _, _ = ladder.figures(count)
    if len(set(sizes)) == 1:
        return "tokens"
    if np.ptp(np.log(tokens / sizes)) < math.log(CELL):  # tokens follow from the size
        return "flops"
    return "parameters" if len(set(tokens)) == 1 else ""
