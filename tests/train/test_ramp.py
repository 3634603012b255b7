"""A batch ramp: each step has the sequences of its stage, as a plain loop with big batches has
them, however windows are cut. Budgets are exact; a kill or a fork inside a ramp changes no bit."""

import itertools
import math
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmexp.config.sections import Train
from llmexp.config.values import ConfigError
from llmexp.run import Run
from llmexp.run.budget import TokenCost, solve_budget
from llmexp.run.stages import Begin, stage_at, stages_of, step_after
from tests import reference
from tests.conftest import TINY, Result
from tests.test_run import BASE
from tests.tools import agree, exact, printed, same_state, weights
from tests.train.resumed import ends, goes_on

# 50 sequences of 12 tokens, 65 in all: 5 steps of 4 sequences (tokens 0, 48, ..., 192), 3 of 8
# (240, 336, 432), 1 of 16 (528), and the 5 that are left. The epoch ends inside step 9.
RAMP = "batch.ramp={0: 4, 200: 8, 500: 16}"
SIZES = [4] * 5 + [8] * 3 + [16, 5]
LIMIT = 1.5
SETTINGS = [
    "data=tokens", "data.ignore_id=10", "data.val_ratio=0", "train.max_epochs=1.3", RAMP,
    "train.log_every=1", "train.eval_every=null", "optimizer.rule=sqrt",
    "optimizer.reference={lr: 0.02, B: 48}", "schedule.warmup_steps=2", f"clip.max_norm={LIMIT}",
    "train.data_digest=true", "checkpoint.save_initial=true", "checkpoint.keep=null",
    "checkpoint.every=2", "precision=fp64",
]  # fmt: skip
CUTS = {
    "2x1": (2, "single"),
    "4x1": (4, "single"),
    "1x2 ddp": (1, "ddp", "nproc_per_node=2"),
    "2x2 fsdp": (2, "fsdp", "nproc_per_node=2"),
}


@pytest.fixture(scope="module")
def made(runs, tokens) -> Callable[[str], Result]:
    def run(name: str) -> Result:
        micro, kind, *more = CUTS[name]
        layout = [f"parallelism={kind}", *(f"parallelism.{m}" for m in more)]
        cut = [f"batch.micro_batch_size={micro}", f"data.train_files=[{tokens}]"]
        return runs(*SETTINGS, "data.shuffle=false", "metrics.noise_scale_every=1", *cut, *layout)

    return run


@pytest.mark.parametrize("cut", CUTS)
def test_float64_equals_big_batches_in_one_go(made, tokens, cut):
    """Losses, norms, rates and final parameters of a loop that has no stage, no micro-batch and no
    rank; the rate is 0.02 x sqrt(batch / 4), with the warm-up and the cosine over 10 updates."""
    result = made(cut)
    full = [4] * 5 + [8] * 3 + [16] * 2  # the last window is short, and its rate that of its stage
    want = reference.train(
        weights(result, 0), np.load(tokens), real_batch=SIZES, length=12, total_sequences=65,
        lr=0.02, lrs=[0.02 * math.sqrt(size / 4) for size in full], warmup=2, end_ratio=0.1,
        max_norm=LIMIT, ignore_id=10, n_layers=2, n_heads=2,
    )  # fmt: skip
    rows = result.rows()
    assert [r["step"] for r in rows] == list(range(1, 11))
    assert [r["real_batch_size"] for r in rows] == SIZES
    assert [r["target_tokens"] for r in rows] == want.counts
    np.testing.assert_allclose([r["lr"] for r in rows], want.rates, rtol=1e-14)
    agree(result, want)
    assert 0 < sum(norm > LIMIT for norm in want.norms) < len(want.norms)


def test_a_run_records_its_stages_and_judges_by_them(made):
    told = made("2x2 fsdp").json("run.json")
    assert (told["max_steps"], told["total_sequences"], told["tail_sequences"]) == (10, 65, 5)
    assert (told["real_batch_size"], told["gradient_accumulation_steps"]) == (16, 4)
    keys = ("from_tokens", "first_step", "first_sequence", "real_batch_size", "rate")
    keys += ("gradient_accumulation_steps",)
    found = [tuple(stage[key] for key in keys) for stage in told["stages"]]
    rate = math.sqrt(1 / 2)
    assert found == [(0, 0, 0, 4, 0.5, 1), (200, 5, 20, 8, rate, 2), (500, 8, 44, 16, 1.0, 4)]
    run = made("2x1")
    # the limits of outliers are those of steps of the stage that the next step belongs to
    states = (
        torch.load(run.checkpoint(n) / "state.pt", weights_only=True) for n in range(2, 11, 2)
    )
    assert [len(state["outliers"]["window"]) for state in states] == [2, 4, 1, 0, 2]
    text = run.json("status.json")["noise"]["verdict"]  # of the last stage, in masked targets
    share = f"{16 * run.rows()[-1]['tokens_seen'] / (65 * 12):.3g}"
    assert f"real_batch_size 16 (the targets of {share} whole sequences)" in text
    folders = [str(made(name).folder) for name in ("2x1", "4x1")]
    found = printed("compare", ends(run.folder.parent, "compare", *folders, "--json").out)
    assert found["batch"] == "iso-batch"
    same = "real_batch_size 4 to 16; only the micro-batch layout"
    assert any(same in line for line in found["why"])


def test_killed_inside_a_stage_it_goes_on_bit_for_bit(runs, tmp_path, tokens):
    """As by `kill -9`, in the middle of the second stage; shuffled, with dropout: what is drawn
    depends on the step alone."""
    more = [f"data.train_files=[{tokens}]", "batch.micro_batch_size=2", "model.dropout=0.1"]
    whole = runs.copy(tmp_path / "whole", *SETTINGS, *more)
    given = [*TINY, *SETTINGS, *more, "--allow=own", "hooks=[own.faults.act]"]
    more = ["hydra.run.dir=killed"]
    killed = ends(tmp_path, "train", *given, *more, code=3, FAULT_PLAN="backward_end-8:kill")
    assert exact(killed)
    goes_on(killed, whole, "hooks=[]")

    def fork(name: str, step: int, *overrides: str) -> Result:
        given = ["fork.run=whole", f"fork.step={step}", f"hydra.run.dir={name}"]
        return ends(tmp_path, "train", *given, *overrides)

    for step in (6, 8):  # a fork inside a stage, and one where a stage begins
        made = fork(f"fork{step}", step)
        assert exact(made) == [row for row in exact(whole) if row["step"] > step]
        same_state(made.checkpoint(10), whole.checkpoint(10))
    # another ramp from there on: tokens count the parent's, too
    other = fork("other", 6, "batch.ramp={0: 4, 400: 2}", "train.max_epochs=1")
    # 28 sequences before; 336 and 384 tokens lie before 400, then 14 sequences are left
    assert [row["real_batch_size"] for row in other.rows()] == [4, 4] + [2] * 7
    assert other.rows()[-1]["epoch"] == 1.0


ramps = st.dictionaries(st.integers(1, 3000), st.integers(1, 12), max_size=4)


def plain_windows(ramp: dict[int, int], length: int, total: int, begin=(0, 0, 0)) -> list[tuple]:
    """(step, first sequence, sequences) of each window, one after the other."""
    step, at, tokens = begin
    found = []
    while at < total:
        size = ramp[max(t for t in ramp if t <= tokens)]
        found.append((step, at, size))
        step, at, tokens = step + 1, at + size, tokens + size * length
    return found


@given(ramps, st.integers(1, 12), st.integers(1, 20), st.integers(1, 400), st.booleans())
def test_budgets_are_exact_and_windows_follow_from_the_step(ramp, first, length, total, tail):
    ramp = dict(sorted(({0: first} | ramp).items()))
    windows = plain_windows(ramp, length, total)
    stages = stages_of(ramp, length, 1, Begin())
    for step, at, size in windows:
        assert stage_at(stages, step).sequences_at(step) == at
        assert stage_at(stages, step).real_batch_size == size
    last, at, size = windows[-1]
    full = at + size == total
    keep = "keep" if tail else "drop"

    def solved(**budget):
        chosen = Train(**BASE | {"tail": keep} | budget)
        return solve_budget(chosen, stages, length, 100, Begin(), TokenCost())

    if not full and not tail and len(windows) == 1:
        with pytest.raises(ConfigError, match="no step of"):
            solved(max_tokens=total * length)
        return
    for budget in ({"max_tokens": total * length + length - 1}, {"max_epochs": total / 100}):
        found = solved(**budget)
        assert found.max_steps == last + (full or tail)
        assert found.total_sequences == (total if full or tail else at)
        assert found.tail_sequences == (0 if full or not tail else total - at)
        assert found.dropped_sequences == (0 if full or tail else total - at)
    steps = solved(max_steps=len(windows))
    assert (steps.max_steps, steps.total_sequences) == (len(windows), at + size)
    # a fork at any step goes on as the run does
    for step, place, _ in windows[:: max(1, len(windows) // 5)]:
        begin = (step, place, place * length)
        branch = stages_of(ramp, length, 1, Begin(*begin))
        for window in plain_windows(ramp, length, total, begin):
            assert stage_at(branch, window[0]).sequences_at(window[0]) == window[1]


@given(ramps, st.integers(1, 12), st.integers(1, 5000), st.integers(1, 400))
def test_evaluations_and_shares_of_a_run_are_those_of_its_steps(ramp, first, every, total):
    ramp = dict(sorted(({0: first} | ramp).items()))
    ends = [0, *(min(total, at + size) for _, at, size in plain_windows(ramp, 12, total))]
    stages = stages_of(ramp, 12, 1, Begin())
    of_run = SimpleNamespace(stages=stages, tokens_at=lambda step: 12 * ends[step])
    chosen = Train(**BASE | {"eval_every_tokens": every})
    full = len(ends) - 2  # the last window may be a short one
    crossed = [12 * b // every > 12 * a // every for a, b in itertools.pairwise(ends)]
    for begin in (0, full // 2):
        assert Run.evaluations(of_run, chosen, begin, full) == sum(crossed[begin:full])
    for n in (1, total, max(1, total // 3)):
        assert step_after(stages, n) == min(s for s in range(len(ends)) if ends[s] >= n)


def test_a_stage_that_the_run_does_not_reach_may_be_larger_than_the_data(tmp_path, tokens):
    words = [*TINY, "data=tokens", f"data.train_files=[{tokens}]", "batch.ramp={0: 4, 200: 1000}"]
    never = ends(tmp_path, "plan", *words, "train.max_steps=5")
    assert "the stage from 200 tokens on never begins" in never.out
