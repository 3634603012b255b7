"""Judge settings at one look, or at several whose chances of a false alarm add up to 5 %.

A sweep that decides by itself (`sweep.decide`) looks at its losses after the first seeds, and again
after further ones. "Add seeds until p < 0.05" would err several times as often as it says; here
each look has a level of its own (Lan and DeMets 1983). A setting that one look shows to be worse
stays so, and gets no further seeds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from llmexp.compare.evidence import FEW, Fitted
from llmexp.compare.inference import Judged, Model, fit, judged
from llmexp.compare.records import Setting
from llmexp.compare.statistics import Difference, estimate

Level = tuple[Collection[str] | None, float]  # the seeds that a look is over (None: all); its level


@dataclass(frozen=True)
class Stood(Fitted):
    """The model of all settings over the seeds of the last look, and how the settings stand."""

    lead: Setting
    found: Mapping[object, tuple[Difference, bool]]  # by identity; whether it was shown to be worse


@dataclass(frozen=True)
class _Seen:
    """Hold what one look saw."""

    members: Sequence[Setting]
    model: Model
    best: int
    standing: Mapping[int, Judged]
    level: float

    @property
    def number(self) -> dict[object, int]:
        return {r.identity: i for i, r in enumerate(self.members)}

    def beside(self, identity: object, lead: object, sign: float = 1.0) -> Difference:
        """Return a setting's figure minus the leading one's, as this look saw both."""
        i, first = self.number[identity], self.number.get(lead, self.best)
        weights = sign * self.model.difference(first, i)
        return estimate(self.model, weights, self.standing[i].rivals, self.level)


def stood(candidates: Sequence[Setting], looks: Sequence[Level], sign: float) -> Stood | None:
    """Judge settings at each look; None where no look had enough seeds.

    `sign`: -1 where the higher figure is better.
    """
    left, out = list(candidates), dict[object, _Seen]()
    last: _Seen | None = None
    for seeds, level in looks:
        members, model = together([over(r, seeds) for r in left], sign)
        if model is None or level <= 0:
            continue
        last = _Seen(members, model, *judged(model, level), level)
        for i, s in last.standing.items():
            identity = members[i].identity
            if s.worse and last.beside(identity, members[last.best].identity).real:
                out[identity] = last
        left = [r for r in left if r.identity not in out]
    if last is None:
        return None
    first = last.members[last.best].identity
    found = {
        r.identity: (out.get(r.identity, last).beside(r.identity, first, sign), r.identity in out)
        for r in candidates
        if r.identity != first and (r.identity in out or r.identity in last.number)
    }
    lead = next(r for r in candidates if r.identity == first)
    every, model = last.members, last.model
    if len(looks) > 1:  # also those that are out
        every, whole = together([over(r, looks[-1][0]) for r in candidates], sign)
        model = whole or model
    return Stood(model, {r.identity: i for i, r in enumerate(every)}, last.level, lead, found)


def over(r: Setting, seeds: Collection[str] | None) -> Setting:
    """Return a setting as it stands over some of its seeds."""
    if seeds is None:
        return r
    return replace(r, seeds={s: y for s, y in r.seeds.items() if s in seeds})


def together(candidates: Sequence[Setting], sign: float) -> tuple[Sequence[Setting], Model | None]:
    """Fit the model to the settings that can be judged together.

    These share seeds, or have enough seeds of their own, whichever are more.
    """
    several = [r for r in candidates if len(r.seeds) > 1]
    own = [r for r in several if len(r.seeds) >= FEW]
    for members in (several, *sorted((connected(several), own), key=len, reverse=True)):
        if len(members) > 1:
            model = fit([{s: sign * y for s, y in r.seeds.items()} for r in members])
            if model and (model.blocked or len(own) >= len(members)):
                return members, model
    return [], None


def connected(rivals: Sequence[Setting]) -> list[Setting]:
    """Return the largest set of settings of which each shares two seeds or more with another."""
    left, best = list(rivals), list[Setting]()
    while left:
        found = [left.pop()]
        for r in found:  # which grows
            near = [o for o in left if len(r.seeds.keys() & o.seeds.keys()) > 1]
            found += near
            left = [o for o in left if o not in near]
        best = max(best, found, key=len)
    return [r for r in rivals if r in best]
