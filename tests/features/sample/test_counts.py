"""How often a run writes a text between its steps, as a plan counts it and as the loop does it."""

from types import SimpleNamespace as Namespace
from typing import Any

import pytest

from llmexp.features.sample.forecast import counts
from llmexp.features.sample.train import Sample


@pytest.mark.parametrize("every", [None, 1, 3, 4, 9])
@pytest.mark.parametrize(("first", "steps"), [(0, 1), (0, 8), (3, 8), (5, 9)])
def test_a_plan_counts_what_the_loop_writes(first, steps, every):
    """That at the end is no part of it."""
    chosen: Any = Namespace(sample_every=every, sample_tokens=5)
    config = Namespace(train=chosen)
    found = counts(
        config,
        lambda n: steps // n - first // n if n else 0,
        lambda n: n is not None and steps % n == 0,
    )
    written = [s for s in range(first + 1, steps + 1) if Sample(chosen).due(s, s == steps)]
    assert found == {"sample": len(written)}
