"""Share 5 % of error out over the looks of a sweep that decides by itself, and foresee its cost.

No numpy: `llmexp plan` starts with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

from llmexp.runs.ledger import Look

ALPHA = 0.05  # the chance that any setting is called worse that is not


def level_of(seeds: int, most: int, looks: Sequence[Look]) -> float:
    """Return the level of a look at so many seeds a setting, behind these looks.

    In all 5 % times the square of the share of the seeds are spent: little while differences are
    uncertain, so that nearly all is left for the last look.
    """
    left = ALPHA * min(1.0, seeds / most) ** 2 - math.fsum(look.level for look in looks)
    return left if left > 1e-6 else 0.0


def following(seeds: int, most: int) -> int:
    """Return the seeds a setting of the look after that at `seeds`: half as many again."""
    return min(most, math.ceil(1.5 * seeds))


def expected_runs(settings: int, first: int, most: int) -> int:
    """Return about how many runs decide between settings that lie evenly over 4 sd of a seed."""
    left = [4 * i / (settings - 1) for i in range(settings)]
    looks, runs, last, count = list[Look](), 0.0, 0, first
    while len(left) > 1:
        runs += len(left) * (count - last)
        if count == most:
            break
        level = level_of(count, most, looks)
        looks.append(Look([], level, most, [], [], ""))
        # Student's t by Bonferroni over all pairs: nearly the bound of the studentized range.
        # A level of 0, as with hundreds of seeds at most, leaves nobody out.
        z = -NormalDist().inv_cdf((level or 1e-9) / (len(left) * (len(left) - 1)))
        t = z + (z**3 + z) / (4 * (len(left) - 1) * (count - 1))
        bound = t * math.sqrt(2 / count)
        left = [distance for distance in left if distance <= bound]
        last, count = count, following(count, most)
    return round(runs)
