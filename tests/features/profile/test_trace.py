"""A trace of some steps: where it is, what it holds, and that it changes no bit."""

import json

from tests.conftest import Result, llmexp
from tests.tools import exact
from tests.train.test_train import SYNTHETIC, TWO


def traced(result: Result, step: int) -> list[dict]:
    return json.loads((result.folder / f"trace_step_{step:08d}.json").read_text())["traceEvents"]


def test_a_trace_holds_its_steps_and_changes_none(runs):
    quiet, three = runs(*SYNTHETIC), runs(*SYNTHETIC, "train.profile_start=2")
    assert exact(three) == exact(quiet)
    names = [str(event.get("name", "")) for event in traced(three, 2)]
    assert any("adamw" in name.lower() for name in names)
    assert len({name for name in names if name.startswith("ProfilerStep")}) == 3
    short = runs(*SYNTHETIC, "train.profile_start=11", "train.profile_steps=5")  # by the end
    assert traced(short, 11)


def test_ddp_reduces_once_a_step(runs):
    """The gradient all-reduces of two ranks, counted in rank 0's trace of two steps of four
    micro-batches each."""
    result = runs(
        *SYNTHETIC, *TWO, "train.max_steps=4", "batch.gradient_accumulation_steps=4",
        "batch.micro_batch_size=2", "train.profile_start=2", "train.profile_steps=2",
        "train.eval_every=null", "train.log_every=100",
    )  # fmt: skip
    events = [(event.get("name"), event.get("ph")) for event in traced(result, 2)]
    # Each step: target count, loss, the agreement on signals, and DDP's buckets: one for a model
    # this small, two in the first steps before DDP has rebuilt them.
    assert 4 * 2 <= events.count(("gloo:all_reduce", "X")) <= 5 * 2


def test_a_trace_of_steps_that_a_run_has_behind_it_is_refused(tmp_path, runs):
    steps = ["train.max_steps=4", "checkpoint.every=2"]  # a run of other tests, too
    runs.copy(tmp_path / "run", "data=synthetic", "data.n_tokens=5000", *steps, step=2)
    refused = llmexp("resume", "run", "train.profile_start=2", cwd=tmp_path)
    assert refused.code == 2
    assert "train.profile_start=2: " in refused.err
    assert "for example train.profile_start=3" in refused.err
    assert llmexp("resume", "run", "train.profile_start=3", cwd=tmp_path).code == 0
    assert (tmp_path / "run" / "trace_step_00000003.json").exists()
