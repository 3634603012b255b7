"""A rank of many, planned: what it holds, moves and saves is what the formulas behind
benchmarks/results/ranks.md say."""

import dataclasses

import pytest


@pytest.mark.slow
def test_a_rank_of_1024_does_what_the_formulas_say():
    # slow to import: not where other tests are collected
    from tools.plan_ranks import EVEN, Case, differences, processes

    fsdp = Case("fsdp", 128, 8, (1, 4), length=16, sizes=EVEN)
    cases = {
        "fsdp": fsdp,
        "fsdp, once": dataclasses.replace(fsdp, once=True),
        "fsdp, few ranks": dataclasses.replace(fsdp, nnodes=1),
        "fsdp_tp": Case("fsdp_tp", 64, 2, (1,), tp=2, length=16, sizes=EVEN),
    }
    (found,) = processes("plan", (cases, {}))
    assert {name: differences(case, found[name]) for name, case in cases.items()} == {
        name: [] for name in cases
    }
    many, few = (found[name]["windows"][1] for name in ("fsdp", "fsdp, few ranks"))
    numbers = [
        sorted((kind.split()[0], n) for kind, (n, _) in window.items()) for window in (many, few)
    ]
    assert numbers[0] == numbers[1]  # collectives of a step do not grow with the ranks
