"""What limits a run, by its rates over the micro-batch: planted times of steps, of a device with
known limits."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmexp.compare.records import Record
from llmexp.compare.throughput import rows_of

LENGTH, FLOPS, PEAK = 100, 1e6, 1e12
LEAST = LENGTH * FLOPS / PEAK  # seconds for a sequence at the peak


def planted(micro: int, step_time: float, *, peak: float | None = PEAK, **facts: object) -> Record:
    """A run of which every step but the first one took `step_time` seconds."""
    times = np.array([9.0, step_time, step_time, step_time])
    rate = micro * LENGTH / times
    columns = {"step_time": times, "tokens_per_sec": rate, "tokens_per_sec_per_rank": rate}
    if peak is not None:
        columns["mfu"] = FLOPS * rate / peak
    known = {
        "model": "GPT2", "precision": "bf16", "world_size": 1, "micro_batch_size": micro,
        "parameters": 100, "gradient_accumulation_steps": 1, "sequence_length": LENGTH,
    } | facts  # fmt: skip
    return Record(Path("run"), "run", None, "finished", {}, known, {}, columns)


def column(title: str, *runs: Record) -> list[Any]:
    return [row.get(title) for row in rows_of(runs)]


@pytest.mark.parametrize(
    ("launch", "arithmetic", "memory", "micros", "peak", "expected"),
    [
        # as long for a larger micro-batch; half of the peak; a tenth of the peak; a device's whole
        # range; a device whose peak is not known
        (1.0, 2, 0, (1, 2, 4), PEAK, [None, "launch-bound", "launch-bound"]),
        (0, 2, 0, (1, 2, 4), PEAK, ["compute-bound"] * 3),
        (0, 1, 10, (4, 8), PEAK, [None, "memory-bound"]),
        (16 * LEAST, 2, 0, (1, 2, 4, 8, 16, 32), PEAK,
         [None, *["launch-bound"] * 3, *["compute-bound"] * 2]),
        (0, 1, 10, (4, 8), None, [None, None]),
    ],
)  # fmt: skip
def test_what_limits_a_device(launch, arithmetic, memory, micros, peak, expected):
    """A step takes the longest of: `launch` seconds whatever the batch; and for each sequence
    `arithmetic` and `memory` times what it takes at the peak."""
    times = {m: max(launch, m * arithmetic * LEAST, m * memory * LEAST) for m in micros}
    made = [planted(m, times[m], peak=peak) for m in reversed(micros)]
    assert column("verdict", *made) == expected


def test_what_is_between_the_limits_has_no_verdict():
    """1.3 times the rate, far from the peak."""
    assert column("verdict", planted(4, 1.0), planted(8, 2 / 1.3)) == [None, None]


@pytest.mark.parametrize(
    "other", [{"precision": "fp32"}, {"world_size": 2}, {"sequence_length": 50}, {"model": "X"}]
)
def test_only_runs_that_differ_in_the_micro_batch_are_held_against_each_other(other):
    assert column("verdict", planted(1, 1.0, **other), planted(2, 1.0)) == [None, None]


def test_the_scaling_efficiency_is_a_share_of_the_rate_of_one_rank():
    two = planted(2, 1.25, world_size=2)  # half of the sequences of each step on each rank
    one, other = planted(2, 2.0), planted(4, 1.0)
    found = column("scaling efficiency", other, two, one)
    assert found == [None, None, pytest.approx(0.8)]
    assert column("scaling efficiency", two, other) == [None, None]
