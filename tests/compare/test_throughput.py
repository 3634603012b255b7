"""What limits a run, by its rates over the micro-batch: planted times of steps, of a device with
known limits."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from llmexp.compare.records import Record
from llmexp.compare.throughput import rows_of
from tests.conftest import TINY, llmexp

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


GRID = [*TINY, "train.max_steps=6", "train.log_every=2", "data.n_tokens=20000"]


@pytest.fixture(scope="module")
def grid(tmp_path_factory) -> Path:
    where = tmp_path_factory.mktemp("scaling")
    sizes = [
        "batch.micro_batch_size=1,2",
        "batch.gradient_accumulation_steps=1",
        "batch.sequence_length=12",
    ]
    small = ["experiment=throughput_grid", *GRID, *sizes, "precision=fp32", "hydra.sweep.dir=grid"]
    done = llmexp("train", *small, cwd=where)
    assert done.code == 0, done.err + done.out
    return where


@pytest.mark.slow
def test_rows_of_two_ranks_carry_the_efficiency_against_the_grid(grid):
    titles, *rows = csv.reader((grid / "grid" / "throughput.csv").read_text().splitlines())
    (alone,) = [
        float(r[titles.index("tokens/s")]) for r in rows if r[titles.index("micro-batch")] == "2"
    ]
    settings = ["data=synthetic", "tracker=none", "batch.micro_batch_size=2", "parallelism=ddp",
                "parallelism.nproc_per_node=2", "train.eval_every=null",
                "checkpoint.every=null"]  # fmt: skip
    against = "metrics.single_rank_rates=grid"
    done = llmexp("train", *GRID, *settings, against, "hydra.run.dir=two", cwd=grid)
    assert done.code == 0, done.err
    for row in done.rows():
        assert row["scaling_efficiency"] == pytest.approx(row["tokens_per_sec"] / 2 / alone)
    assert f"against {alone:,.0f} tokens/s of one rank" in done.out
    assert done.json("run.json")["single_rank_rate"] == alone
    for other, said in (
        ("batch.micro_batch_size=4", "batch.micro_batch_size (1 there, 4 here)"),
        ("metrics.single_rank_rates=nowhere", "no finished run of one rank is there"),
    ):
        unknown = llmexp(
            "train", *GRID, *settings, against, other, f"hydra.run.dir={other[:9]}", cwd=grid
        )
        assert unknown.code == 0, unknown.err
        assert said in " ".join(unknown.out.split())
        assert all("scaling_efficiency" not in row for row in unknown.rows())
    alone_again = llmexp("train", *GRID, "data=synthetic", against, cwd=grid)
    assert alone_again.code == 2
    assert (
        "metrics.single_rank_rates=grid: a run with parallelism=single is not held against itself"
        in alone_again.err
    )
