"""What limits a run, by its rates over the micro-batch: planted times of steps, of a device with
known limits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llmexp.compare.records import Record
from llmexp.compare.throughput import rows_of

LENGTH, FLOPS, PEAK = 100, 1e6, 1e12


def planted(micro: int, step_time: float, *, peak: float | None = PEAK, **facts: object) -> Record:
    """A run of which every step but the first one took `step_time` seconds."""
    times = np.array([9.0, step_time, step_time, step_time])
    rate = micro * LENGTH / times
    columns = {"step_time": times, "tokens_per_sec": rate, "tokens_per_sec_per_rank": rate}
    if peak is not None:
        columns["mfu"] = FLOPS * rate / peak
    known = {"model": "GPT2", "precision": "bf16", "world_size": 1, "micro_batch_size": micro,
    "parameters": 100,
             "gradient_accumulation_steps": 1, "sequence_length": LENGTH} | facts  # fmt: skip
    return Record(Path("run"), "run", None, "finished", {}, known, {}, columns)


def verdicts(
    launch: float, arithmetic: float, memory: float, *micros: int, **more: object
) -> list[str | None]:
    """Of a device whose step takes the longest of: `launch` seconds whatever the batch; and for
    each sequence `arithmetic` seconds and `memory` seconds."""
    times = {m: max(launch, m * arithmetic, m * memory) for m in micros}
    return [
        row.get("verdict")
        for row in rows_of([planted(m, times[m], **more) for m in reversed(micros)])
    ]  # type: ignore[arg-type]


LEAST = LENGTH * FLOPS / PEAK  # seconds for a sequence at the peak


@pytest.mark.parametrize(
    ("launch", "arithmetic", "memory", "micros", "expected"),
    [
        # as long for a larger micro-batch; half of the peak; a tenth of the peak; a device's whole
        # range
        (1.0, 2, 0, (1, 2, 4), [None, "launch-bound", "launch-bound"]),
        (0, 2, 0, (1, 2, 4), ["compute-bound"] * 3),
        (0, 1, 10, (4, 8), [None, "memory-bound"]),
        (16 * LEAST, 2, 0, (1, 2, 4, 8, 16, 32),
         [None, *["launch-bound"] * 3, *["compute-bound"] * 2]),
    ],
)  # fmt: skip
def test_what_limits_a_device(launch, arithmetic, memory, micros, expected):
    assert verdicts(launch, arithmetic * LEAST, memory * LEAST, *micros) == expected


def test_what_is_not_known_is_not_printed():
    assert verdicts(0, LEAST, 10 * LEAST, 4, 8, peak=None) == [None, None]
    between = [planted(4, 1.0), planted(8, 2 / 1.3)]  # 1.3 times the rate, far from the peak
    assert [row.get("verdict") for row in rows_of(between)] == [None, None]


@pytest.mark.parametrize(
    "other", [{"precision": "fp32"}, {"world_size": 2}, {"sequence_length": 50}, {"model": "X"}]
)
def test_only_runs_that_differ_in_the_micro_batch_are_held_against_each_other(other):
    rows = rows_of([planted(1, 1.0, **other), planted(2, 1.0)])
    assert all("verdict" not in row for row in rows)


def test_the_scaling_efficiency_is_a_share_of_the_rate_of_one_rank():
    two = planted(2, 1.25, world_size=2)  # half of the sequences of each step on each rank
    one, other = planted(2, 2.0), planted(4, 1.0)
    assert [row.get("scaling efficiency") for row in rows_of([other, two, one])] == [
        None,
        None,
        pytest.approx(0.8),
    ]
    assert all("scaling efficiency" not in row for row in rows_of([two, other]))
