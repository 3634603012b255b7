"""Bound how far a run may be from the reference: by what rounding alone does to that reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from llmexp.verify.checks import Check, at_most, none_differ, print_wrapped
from llmexp.verify.reference import Errors, Followed, Roundoff

# Roundings that are drawn for a tolerance. Of 2 x 4 deviations (one of each step) the largest is
# rarely below one standard deviation; a run's own, at most as large in the mean, stays within four
# of them but once in 16,000 times.
SAMPLES, MARGIN = 2, 4.0
MEANINGLESS = 0.5  # a relative error that a wrong run may have too
EXACT = ("target_tokens", "lr")  # of the rows, but for 1e-14 of a rate
Off = dict[str, float]  # how far a run is from the reference, by what is compared
# In float64 nothing below these is a difference: about 1e4 unit roundoffs, room for long sums in
# another order.
FLOOR: Off = {
    "loss, relative error": 1e-12,
    "gradient norm, before and after clipping": 1e-12,
    "parameters, of the distance moved": 1e-11,
}


def checks_of_runs(
    kind: str,
    runs: Mapping[str, Followed],
    want: Followed,
    start: nn.Module,
    reference: Callable[[Roundoff], Followed],
    rounding: Errors,
) -> list[Check]:
    """Return the checks of runs in a precision beside what `reference` has computed.

    Tolerances are what rounding may do: MARGIN times how far it takes the reference itself, the
    most of SAMPLES tries. In float64 they are at least FLOOR.
    """
    offs = {name: off_from(want, run, start) for name, run in runs.items()}
    limits, note = FLOOR, ""
    if kind != "fp64" or any(not off[key] <= FLOOR[key] for off in offs.values() for key in off):
        print_wrapped(f"{kind}: allowed is {MARGIN:g} x what its rounding does to the reference")
        again = [reference(Roundoff(rounding, 10 * n)) for n in range(SAMPLES)]
        tries = [off_from(want, found, start) for found in again]
        limits, note = {key: MARGIN * max(off[key] for off in tries) for key in FLOOR}, "derived"
        if kind == "fp64":
            limits = {key: max(limits[key], FLOOR[key]) for key in FLOOR}
            note = "the larger one of derived and a floor"
    checks, compared = [], (1 + len(EXACT)) * len(want.rows["lr"]) + len(trained_of(start))
    for name, off in offs.items():
        same = f"{name}: steps, target counts, rates, first parameters"
        checks.append(none_differ(same, runs[name].differing, compared))
        checks += [within_limit(f"{name}: {key}", off[key], limits[key], note) for key in FLOOR]
    return checks


def off_from(want: Followed, found: Followed, start: nn.Module) -> Off:
    """Return how far a run is from the reference; infinitely without parameters at its end."""
    loss, *norms = (
        off_by(found.rows[key], want.rows[key])
        for key in ("train/loss", "grad_norm", "grad_norm_post_clip")
    )
    parameters = moved_off(start, found.end, want.end) if found.end else math.inf
    return dict(zip(FLOOR, (loss, max(norms), parameters), strict=True))


def within_limit(what: str, found: float, limit: float, note: str = "") -> Check:
    """Check a limit; one as large as the thing itself proves nothing, since anything keeps it."""
    if math.isfinite(limit) and limit < MEANINGLESS:
        return at_most(what, found, limit, note)
    why = "rounding alone moves the reference this far, or it does not move at all"
    notes = filter(None, (note, f"{why}, so it shows nothing"))
    return Check(what, None, found, limit, "; ".join(notes))


def trained_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def off_by(found: Sequence[float | None], want: Sequence[float | None]) -> float:
    """Return the largest relative error.

    It is infinite where only one of the two has a figure, or a figure is not finite.
    """
    worst = 0.0
    for a, b in zip(found, want, strict=True):
        if a is None or b is None or not math.isfinite(a - b):
            worst = worst if a is b is None else math.inf
        elif a != b:
            worst = max(worst, abs(a - b) / abs(b) if b else math.inf)
    return worst


def moved_off(start: nn.Module, found: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """||found - want|| / ||start - want|| over all trained parameters."""
    with torch.no_grad():
        own = trained_of(start)
        error = math.fsum(float((found[name] - want[name]).square().sum()) for name in own)
        moved = math.fsum(float((p - want[name]).square().sum()) for name, p in own.items())
    if not moved:
        return math.inf if error else 0.0
    off = math.sqrt(error / moved)
    # nan is less than nothing, so the largest of several would miss it
    return off if math.isfinite(off) else math.inf
