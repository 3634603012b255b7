"""Paths in, an answer out: one law for each ladder, and what ladders are to each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from llmexp.compare.records import listed
from llmexp.laws.fitting import Surface
from llmexp.laws.gain import Gain, gain
from llmexp.laws.isoflop import Parabolas, parabolas
from llmexp.laws.ladders import ladders
from llmexp.laws.points import COUNTS, Ladder, Point, counts_of
from llmexp.laws.power import AXES, Power
from llmexp.settings.values import ConfigError, nearest
from llmexp.system.text import number

FORMS = ("surface", "isoflop", "power")
TOP = 1e40  # FLOPs; no prediction lies further


@dataclass
class Answer:
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
    def parabolas(self) -> list[Parabolas | None]:
        """Return the parabolas beside each surface."""
        return [parabolas(s) for s in self.surfaces]


def fit(
    paths: Sequence[str | Path],
    *,
    form: str | None = None,
    by: str | None = None,
    count: str | None = None,
    predict: float | str | None = None,
) -> Answer:
    """Fit laws to the runs under the paths, sweeps, folders of them, globs or CSV files.

    `form`: surface (L over N and D), isoflop (parabolas, beside the surface), power (one axis,
    `by`: tokens, flops, parameters or a knob); default: what the runs allow. `count`: how N counts
    parameters (all, head, blocks). `predict`: FLOPs to predict at, of a power law a value of `by`.
    Raises ConfigError for what cannot be fitted.
    """
    target = None if predict is None else positive(predict)
    for name, value, known in (("form", form, FORMS), ("count", count, tuple(COUNTS))):
        if value is not None and value not in known:
            raise ConfigError(
                f"--{name} {value}: must be one of {', '.join(known)}; for example --{name} "
                f"{known[0]}"
            )
    if by is not None and form not in (None, "power"):
        raise ConfigError(f"--by {by}: is of a power law; for example --form power --by {by}")
    found, problems = ladders(paths, None if by in AXES else by)
    points = [p for ladder in found for p in ladder.points]
    counted = _count(points, count)
    if by is not None and by not in AXES:
        _check_axis(by, points)
    if by is not None or (form is None and all(_one_axis(ladder, counted) for ladder in found)):
        form = "power"
    laws: list[Surface | Power] = []
    refused: list[ConfigError] = []
    for seed, ladder in enumerate(found):  # or ladders of equally many runs share their draws
        try:
            if form == "power":
                laws.append(Power(ladder, counted, by or _axis(ladder, counted), target, seed))
            else:
                laws.append(Surface(ladder, counted, target, seed))
        except ConfigError as error:
            refused.append(error)
    if not laws:
        raise refused[0]
    answer = Answer(form or "surface", counted, laws, (*problems, *map(str, refused)))
    if answer.surfaces and not answer.surfaces[0].edge:  # at an edge a frontier is a guess
        answer.gains = [gain(answer.surfaces[0], s) for s in answer.surfaces[1:] if not s.edge]
    return answer


def positive(given: float | str) -> float:
    """Return the FLOPs to predict at. Raises ConfigError for what is none."""
    try:
        value = float(given)
    except (TypeError, ValueError):
        value = -1.0
    if not 0 < value < TOP:
        raise ConfigError(
            f"--predict {given}: a number above 0 is needed, FLOPs; for example --predict 1e16"
        )
    return value


def _count(points: Sequence, count: str | None) -> str:
    """Return how N counts parameters: as asked for, else the first way that all runs know."""
    known = counts_of(points)
    if not known:
        raise ConfigError(
            "the paths count parameters in no common way (CSV files and runs together); fit them "
            "one by one, for example llmexp fit outputs/default"
        )
    if count is None:
        return known[0]
    if known == ["given"]:
        raise ConfigError(
            f"--count {count}: a CSV file has one N, counted as it was there; leave --count out"
        )
    if count not in known:
        raise ConfigError(f"--count {count}: not all runs know it; for example --count {known[0]}")
    return count


def _check_axis(by: str, points: Sequence[Point]) -> None:
    """Raise ConfigError for a key of which no run has a number above 0."""
    if any((number(p.values.get(by)) or 0) > 0 for p in points):
        return
    given = [p.record.config if p.record else p.values for p in points]
    keys = {k for values in given for k, v in values.items() if (number(v) or 0) > 0}
    vary = [k for k in sorted(keys) if len({number(g.get(k)) for g in given}) > 1]
    there = f" (runs differ in {listed(vary, 8)})" if vary else ""
    raise ConfigError(
        f"--by {by}: no run has a number above 0 of that name{there}; for example --by tokens."
        f"{nearest(by, [*AXES, *keys])}"
    )


def _one_axis(ladder: Ladder, count: str) -> bool:
    """Tell whether the runs are of one size, or of one length."""
    sizes, tokens, _, _ = ladder.figures(count)
    return len(set(sizes)) == 1 or len(set(tokens)) == 1


def _axis(ladder: Ladder, count: str) -> str:
    """Return the axis of a power law that nobody named."""
    sizes, tokens, _, _ = ladder.figures(count)
    if len(set(sizes)) == 1:
        return "tokens"
    return "parameters" if len(set(tokens)) == 1 else "flops"
