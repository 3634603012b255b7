"""A rank of many, planned: what it holds, moves and saves is what the formulas behind
docs/internals/scale.md say."""

from __future__ import annotations

import dataclasses

import pytest

from tests.benchmarks.plan_ranks import EVEN, Case, differences, processes

FSDP = Case("fsdp", 128, 8, (1, 4), length=16, sizes=EVEN)
CASES = {
    "fsdp": FSDP,
    "fsdp, once": dataclasses.replace(FSDP, once=True),
    "fsdp, few ranks": dataclasses.replace(FSDP, nnodes=1),
    "fsdp_tp": Case("fsdp_tp", 64, 2, (1,), tp=2, length=16, sizes=EVEN),
}


@pytest.mark.slow
def test_a_rank_of_1024_does_what_the_formulas_say():
    (found,) = processes("plan", (CASES, {}))
    assert {name: differences(case, found[name]) for name, case in CASES.items()} == {
        name: [] for name in CASES
    }
    many, few = (found[name]["windows"][1] for name in ("fsdp", "fsdp, few ranks"))
    numbers = [
        sorted((kind.split()[0], n) for kind, (n, _) in window.items()) for window in (many, few)
    ]
    assert numbers[0] == numbers[1]  # collectives of a step do not grow with the ranks
