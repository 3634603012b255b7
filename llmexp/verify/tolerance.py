"""Bound how far a run may be from the reference: by what rounding alone does to that reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from llmexp.verify.checks import Check, at_most, none_differ
from llmexp.verify.reference import Errors, Followed, Roundoff

# Roundings that are drawn for a tolerance. Of 2 x 4 deviations (one of each step) the largest is
# rarely below one standard deviation; a run's own, at most as large in the mean, stays within four
# of them but once in 16,000 times.
SAMPLES, MARGIN = 2, 4.0
QUANTITIES = {
    "loss": "loss, relative error",
    "norm": "gradient norm, before and after clipping",
    "parameters": "parameters, of the distance moved",
}
MEANINGLESS = 0.5  # a relative error that a wrong run may have too


@dataclass(frozen=True)
class Off:
    """The distance of a run from the reference, in relative errors.

    That of the parameters is relative to the distance moved.
    """

    loss: float
    norm: float  # the larger of before and after clipping
    parameters: float
    differing: tuple[str, ...] = ()  # what has to be the same and is not
    note: str = ""

    def beyond(self, limits: Off) -> bool:
        return not all(getattr(self, key) <= getattr(limits, key) for key in QUANTITIES)


# In float64 nothing below these is a difference: about 1e4 unit roundoffs, room for long sums in
# another order.
FLOOR, NO_FLOOR = Off(1e-12, 1e-12, 1e-11), Off(0.0, 0.0, 0.0)


def tolerance_of(
    again: Callable[[Roundoff], Followed],
    want: Followed,
    start: nn.Module,
    sizes: Errors,
    least: Off,
) -> Off:
    """Return what rounding may do: MARGIN times how far it takes the reference itself.

    `again` computes the reference anew; the most of SAMPLES tries counts.
    """
    tries = [off_from(want, again(Roundoff(sizes, 10 * n)), start) for n in range(SAMPLES)]
    sizes_of = {key: [MARGIN * getattr(t, key) for t in tries] for key in QUANTITIES}
    limits = {key: max(getattr(least, key), *found) for key, found in sizes_of.items()}
    note = "derived" if least == NO_FLOOR else "the larger one of derived and a floor"
    return Off(**limits, note=note)


def off_from(want: Followed, found: Followed, start: nn.Module) -> Off:
    """Return how far a run is from the reference; infinitely without parameters at its end."""
    norm = off_by(found.norms, want.norms)
    norm = max(norm, off_by(found.norms_post_clip, want.norms_post_clip))
    parameters = moved_off(start, found.end, want.end) if found.end else math.inf
    return Off(off_by(found.losses, want.losses), norm, parameters)


def checks_of_run(name: str, off: Off, limits: Off, compared: int) -> list[Check]:
    """Return the checks of one run."""
    same = none_differ(
        f"{name}: steps, target counts, rates, first parameters", off.differing, compared
    )
    found = [(what, getattr(off, key), getattr(limits, key)) for key, what in QUANTITIES.items()]
    return [same, *(_within(f"{name}: {what}", a, b, limits.note) for what, a, b in found)]


def _within(what: str, found: float, limit: float, note: str) -> Check:
    """Check a limit; one as large as the thing itself proves nothing, since anything keeps it."""
    if math.isfinite(limit) and limit < MEANINGLESS:
        return at_most(what, found, limit, note)
    why = "rounding alone moves the reference this far, or it does not move at all"
    notes = filter(None, (note, f"{why}, so it shows nothing"))
    return Check(what, None, found, limit, "; ".join(notes))


def off_by(found: Sequence[float | None], want: Sequence[float | None]) -> float:
    """Return the largest relative error.

    It is infinite where only one of the two has a figure, or a figure is not finite.
    """
    worst = 0.0
    for a, b in zip(found, want, strict=True):
        if a is None and b is None:
            continue
        if a is None or b is None or not math.isfinite(a) or not math.isfinite(b):
            return math.inf
        if a != b:
            worst = max(worst, abs(a - b) / abs(b) if b else math.inf)
    return worst


def moved_off(start: nn.Module, found: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """||found - want|| / ||start - want|| over all trained parameters."""
    with torch.no_grad():
        trained = [(name, p) for name, p in start.named_parameters() if p.requires_grad]
        error = math.fsum(float((found[name] - want[name]).square().sum()) for name, _ in trained)
        moved = math.fsum(float((p - want[name]).square().sum()) for name, p in trained)
    if not moved:
        return math.inf if error else 0.0
    off = math.sqrt(error / moved)
    # nan is less than nothing, so the largest of several would miss it
    return off if math.isfinite(off) else math.inf
