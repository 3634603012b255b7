"""A spike is found, recorded with its run-up layer by layer, and counted until the loss is back."""

import dataclasses
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest

from llmexp.features.outliers.limits import Limits
from llmexp.features.spikes.train import Spikes, rose_first, what_rose
from llmexp.train.step import Outcome
from tests.conftest import Result, llmexp
from tests.tools import equal, weights
from tests.train.resumed import goes_on

SETTINGS = [
    "data=synthetic", "data.n_tokens=9000", "batch.real_batch_size=4", "train.max_steps=64",
    "train.log_every=1", "train.eval_every=null", "checkpoint.every=30", "precision=fp64",
    "metrics.outlier_sigma=8", "optimizer=sgd", "optimizer.lr=0.1", "clip=none",
    "batch.micro_batch_size=2", "hooks=[own.hooks.plant]", "--allow=own",
]  # fmt: skip
ON = "metrics.spikes=true"
TWO = ["parallelism=fsdp", "parallelism.nproc_per_node=2", "batch.gradient_accumulation_steps=1"]


@pytest.fixture(scope="module")
def on(runs) -> Result:
    return runs(*SETTINGS, ON)


def records(result: Result) -> dict[int, dict]:
    files = (result.folder / "spikes").glob("*.json")
    return {int(file.stem): json.loads(file.read_text()) for file in files}


def steps_by_the_rule(result: Result) -> tuple[list[int], int]:
    """The steps at which a spike begins, and the targets until the loss is back: by the rows."""
    seen: list[tuple[float, float]] = []
    level, found, lost = None, [], 0
    for row in result.rows():
        loss, norm = row["train/loss"], row["grad_norm"]
        window = np.array(seen[-128:])
        above = False
        if len(window) >= 32:
            medians = np.median(window, 0)
            limits = medians + 8 * 1.4826 * np.median(abs(window - medians), 0)
            above = loss > limits[0] or norm > limits[1]
        if level is not None and loss <= level and not above:
            level = None
        elif level is None and above:
            level = medians[0]
            found.append(row["step"])
        if level is not None:
            lost += row["target_tokens"]
        seen.append((loss, norm))
    return found, lost


def test_a_spike_is_recorded_with_what_rose_first(on):
    found, (steps, lost) = records(on), steps_by_the_rule(on)
    assert sorted(found) == steps
    assert steps
    spike = found[steps[0]]
    assert spike["step"] == steps[0] > 46
    assert [s["step"] for s in spike["steps"]] == list(range(steps[0] - 10, steps[0] + 1))
    first = spike["rose_first"]
    assert (first["module"], first["step"]) == ("blocks.1.mlp.up_proj", 46)
    assert 2 < first["times"] < 8
    row = on.rows()[steps[0] - 1]
    assert (spike["loss"], spike["grad_norm"]) == (row["train/loss"], row["grad_norm"])
    assert spike["sequences"] == [4 * (steps[0] - 1), 4 * steps[0]]
    assert len(spike["first_tokens"]) == 4
    squares = [x**2 for x in spike["steps"][-1]["grad_norm"].values()]
    assert math.sqrt(sum(squares)) == pytest.approx(row["grad_norm"], rel=1e-12)
    status = on.json("status.json")
    summary = status["summary"]
    assert (summary["spikes"], summary["spike_tokens"]) == (len(steps), lost)
    assert status["spikes"]["rose_first"]["module"] == "blocks.1.mlp.up_proj"
    line = next(line for line in on.out.splitlines() if " is a spike: " in line)
    assert line.startswith(f"step {steps[0]} is a spike: loss {spike['loss']:.4g}")
    assert "; blocks.1.mlp.up_proj rose first, at step 46 (" in line


def test_recording_changes_nothing_and_two_ranks_record_the_same(runs, on):
    off = runs(*SETTINGS)
    assert not (off.folder / "spikes").exists()
    assert "spikes" not in off.json("status.json")
    assert equal(weights(off, 64), weights(on, 64))
    one, two = records(on), records(runs(*SETTINGS, ON, *TWO))
    assert one.keys() == two.keys()
    for step, spike in one.items():
        first, other = spike["rose_first"], two[step]["rose_first"]
        assert spike["first_tokens"] == two[step]["first_tokens"]
        assert first["module"] == other["module"]
        assert first["times"] == pytest.approx(other["times"], 1e-6)


def test_a_resumed_run_records_the_same_and_a_fork_counts_its_own(runs, on, tmp_path):
    """Spikes after the checkpoint are forgotten with their rows."""
    cut = runs.copy(tmp_path / "cut", *SETTINGS, ON, step=60)
    assert records(cut)
    goes_on(cut, on, "--allow=own")
    assert records(cut) == records(on)
    assert cut.json("status.json")["spikes"] == on.json("status.json")["spikes"]
    fork = [f"fork.run={cut.folder}", "fork.step=60", "--allow=own", "hydra.run.dir=fork"]
    forked = llmexp("train", *fork, cwd=tmp_path)
    assert forked.code == 0, forked.err
    assert forked.json("status.json")["summary"]["spikes"] == len(records(forked))


def test_what_rose_first_is_the_first_to_leave_its_level():
    def step(number: int, **norms: float) -> dict:
        return {"step": number, "grad_norm": norms, "update_norm": {"a": 1.0, "b": 0.0}}

    calm = [step(n, a=1.0 + 0.3 * (n % 2), b=0.5) for n in range(5)]
    assert rose_first([*calm, step(5, a=2.5, b=0.9)]) is None  # within twice the largest: 2.6
    found = rose_first([*calm, step(5, a=2.7, b=1.6), step(6, a=90.0, b=1.0)])
    assert found == {"module": "b", "figure": "grad_norm", "step": 5, "times": 3.2}
    assert rose_first(calm) is None
    few = "5 measured steps do not show which module rose first"  # the run was resumed there
    assert what_rose(calm, None) == few
    assert what_rose([*calm, step(5, a=2.5)], None) == "no module rose to 2 times its level before"


def test_an_overflow_counts_inside_a_spike_and_neither_begins_nor_ends_one():
    spikes = Spikes(SimpleNamespace(last=[]))  # type: ignore[arg-type]
    limits = Limits((1.0, 3.0), (0.0, 5.0))
    step = Outcome(48.0, True, 0.5, math.inf, math.inf, False, 1024.0)
    spikes.follow(step, limits)
    assert (spikes.spikes, spikes.spike_tokens, spikes.spike_level) == (0, 0, None)
    spikes.spike_level = 2.0
    spikes.follow(step, limits)
    assert (spikes.spike_tokens, spikes.spike_level) == (48, 2.0)
    back = dataclasses.replace(step, skipped=False, loss=1.5, grad_norm=1.0)
    spikes.follow(dataclasses.replace(back, loss=2.5), None)  # nothing known of new steps yet
    assert (spikes.spike_tokens, spikes.spike_level) == (96, 2.0)
    spikes.follow(back, None)
    assert (spikes.spike_tokens, spikes.spike_level) == (96, None)
