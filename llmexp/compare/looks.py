"""Judge settings at one look, or at several whose chances of a false alarm add up to 5 %.

A sweep that decides by itself (`sweep.decide`) looks at its losses after the first seeds, and again
after further ones. "Add seeds until p < 0.05" would err several times as often as it says; here
each look has a level of its own (Lan and DeMets 1983). A setting that one look shows to be worse
stays so, and gets no further seeds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from llmexp.compare.inference import FEW, Difference, Model, fit_model, judged
from llmexp.compare.records import Setting

Level = tuple[Collection[str] | None, float]  # the seeds that a look is over (None: all); its level


@dataclass(frozen=True)
class Seen:
    """Hold settings over the seeds of a look, their model, and the chance of an error."""

    members: Sequence[Setting]
    model: Model
    level: float

    @cached_property
    def number(self) -> dict[object, int]:
        """Return the number of each setting in the model, by its identity."""
        return {r.identity: i for i, r in enumerate(self.members)}

    @cached_property
    def standing(self) -> tuple[object, dict[object, tuple[Difference, bool]]]:
        """Return the best setting, and how each other one stands to it, by their identities."""
        best, found = judged(self.model, self.level)
        name = [r.identity for r in self.members]
        return name[best], {name[i]: one for i, one in found.items()}

    def beside(self, identity: object, lead: object, sign: float = 1.0) -> Difference:
        """Return a setting's figure minus the leading one's, as this look saw both."""
        best, found = self.standing
        first = self.number[lead if lead in self.number else best]
        judged_at = found[identity][0]
        return self.model.pair(
            first, self.number[identity], judged_at.rivals, judged_at.alpha, sign
        )


@dataclass(frozen=True)
class Stood:
    """Hold how settings stand at the last of some looks."""

    lead: Setting
    found: Mapping[object, tuple[Difference, bool]]  # by identity; whether it was shown to be worse
    seen: Seen  # all settings over the seeds of the last look


def stood(candidates: Sequence[Setting], looks: Sequence[Level], sign: float) -> Stood | None:
    """Judge settings at each look; None where no look had enough seeds.

    `sign`: -1 where the higher figure is better.
    """
    left, out = list(candidates), dict[object, Seen]()
    last = None
    for seeds, level in looks:
        seen = _together(left, seeds, sign, level)
        if seen is None or level <= 0:
            continue
        last = seen
        best, found = seen.standing
        out |= {i: seen for i, (_, worse) in found.items() if worse and seen.beside(i, best).real}
        left = [r for r in left if r.identity not in out]
    if last is None:
        return None
    first = last.standing[0]
    known = [r.identity for r in candidates if r.identity in out or r.identity in last.number]
    found = {i: (out.get(i, last).beside(i, first, sign), i in out) for i in known if i != first}
    lead = next(r for r in candidates if r.identity == first)
    whole = None
    if len(looks) > 1:  # also those that are out
        whole = _together(candidates, looks[-1][0], sign, last.level)
    return Stood(lead, found, whole or last)


def _together(
    candidates: Sequence[Setting], seeds: Collection[str] | None, sign: float, level: float
) -> Seen | None:
    """Fit the model to the settings that can be judged together over some of their seeds.

    These share seeds, or have enough seeds of their own, whichever are more. None where there are
    none.
    """
    known = {
        r: {s: sign * y for s, y in r.seeds.items() if seeds is None or s in seeds}
        for r in candidates
    }
    several = [r for r in candidates if len(known[r]) > 1]
    own = [r for r in several if len(known[r]) >= FEW]
    left, connected = list(several), list[Setting]()
    while left:  # the largest set of which each shares two seeds or more with another
        found = [left.pop()]
        for r in found:  # which grows
            near = [o for o in left if len(known[r].keys() & known[o].keys()) > 1]
            found += near
            left = [o for o in left if o not in near]
        connected = max(connected, found, key=len)
    connected = [r for r in several if r in connected]
    for members in (several, *sorted((connected, own), key=len, reverse=True)):
        model = fit_model([known[r] for r in members]) if len(members) > 1 else None
        if model and (model.blocked or len(own) >= len(members)):
            return Seen(members, model, level)
    return None
