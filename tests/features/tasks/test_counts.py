"""How often tasks are scored, as a plan counts it and as the loop does it."""

from types import SimpleNamespace as Namespace
from typing import Any

import pytest

from llmexp.features.tasks.forecast import counts
from llmexp.features.tasks.train import Tasks


@pytest.mark.parametrize("every", [None, 1, 3, 4, 9])
@pytest.mark.parametrize(("first", "steps"), [(0, 1), (0, 8), (3, 8), (5, 9)])
def test_a_plan_counts_what_the_loop_scores(first, steps, every):
    nothing: Any = Namespace()
    feature = Tasks(nothing, nothing, every)
    config = Namespace(train=Namespace(tasks=["t"], tasks_every=every))
    found = counts(
        config,
        lambda n: steps // n - first // n if n else 0,
        lambda n: n is not None and steps % n == 0,
    )
    scored = [s for s in range(first + 1, steps + 1) if feature.measure(s, s == steps)]
    assert found == {"tasks": len(scored)}
