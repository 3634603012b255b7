"""Losses are compared only where all runs were evaluated at like tokens."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from llmexp.compare.comparing import compare
from llmexp.compare.figures import figures
from llmexp.compare.position import common_position, positions
from llmexp.compare.records import Record
from tests.compare.made import steps_of
from tests.compare.synthetic import make_run
from tests.conftest import TINY, Result, llmexp

TOKENS = 128  # of a sequence


def evaluated(batch: int, steps: int, every: int, last: bool) -> Record:
    step = np.arange(1.0, steps + 1)
    at = (step % every == 0) | (last & (step == steps))
    loss = np.where(at, step * batch, np.nan)  # tells where it was measured
    columns = {"step": step, "tokens_seen": step * batch * TOKENS, "val/loss": loss}
    facts = {"tokens_per_step": batch * TOKENS}
    return Record(Path(), "", None, "finished", {}, facts, {}, columns, steps=steps_of(columns))


RUN = st.builds(
    evaluated, st.integers(1, 40), st.integers(1, 60), st.integers(1, 25), st.booleans()
)


@given(st.lists(RUN, min_size=2, max_size=4))
def test_the_last_position_at_which_all_were_evaluated_to_a_step(runs):
    """By looking at the last evaluation of each run up to every one of all."""
    found = common_position(runs, "tokens", "val/loss")
    of_runs = []
    for r in runs:
        seen = np.isfinite(r.columns["val/loss"])
        of_runs.append([(t, r.facts["tokens_per_step"]) for t in r.columns["tokens_seen"][seen]])
    ends = [r.columns["tokens_seen"][-1] for r in runs]
    if not all(of_runs):
        most = min(end for end, of in zip(ends, of_runs, strict=True) if not of)
        of_runs = [[pair for pair in of if pair[0] <= most] for of in of_runs if of]
    alike = []
    for at in {t for of in of_runs for t, _ in of}:
        last = [max((pair for pair in of if pair[0] <= at), default=None) for of in of_runs]
        pairs = itertools.combinations(last, 2)
        if None not in last and all(abs(a - b) <= max(s, t) for (a, s), (b, t) in pairs):
            alike.append(at)
    evaluated = [np.isfinite(r.columns["val/loss"]).any() for r in runs]
    if not any(of_runs) or (not alike and not all(evaluated)):
        assert found is not None
        assert found.at == min(ends)
        return
    if not alike:
        assert found is None
        return
    assert found is not None
    assert found.at == max(alike)
    runs = list(itertools.compress(runs, evaluated))
    read = [figures(r, "tokens", found).get("val/loss") for r in runs]
    assert None not in read
    steps = [r.facts["tokens_per_step"] for r in runs]
    for (a, s), (b, t) in itertools.combinations(zip(read, steps, strict=True), 2):
        assert abs(a - b) * TOKENS <= max(s, t)  # the losses that are compared


def test_runs_that_end_within_a_step_are_compared_at_their_ends(tmp_path):
    make_run(tmp_path / "small", micro=8, steps=48, val_every=16)  # 384 sequences
    make_run(tmp_path / "large", micro=20, steps=20, val_every=20)  # 400
    c = compare([tmp_path])
    assert c.align_at == 400 * TOKENS
    assert {e.figures["val/loss"] == e.figures["final val/loss"] for e in c.settings} == {True}
    assert any("where the first run ends" in text for text in c.why)


def test_unlike_batches_are_ranked_only_where_their_evaluations_are_alike(tmp_path):
    """After 8 steps of 12 sequences the run has seen three quarters of what the other has at its
    end."""

    def sweep(name: str, *more: str) -> Result:
        done = llmexp(
            "train", "-m", *TINY, "data=synthetic", "data.n_tokens=20000", "train.max_steps=16",
            "batch.real_batch_size=8,12", "train.eval_every=8", f"hydra.sweep.dir={name}", *more,
            cwd=tmp_path,
        )  # fmt: skip
        assert done.code == 0, done.err
        return done

    done = sweep("steps")
    said = " ".join(done.err.split())
    assert "note: these points are evaluated every 768 to 1,152 tokens; for evaluations" in said
    said = " ".join(done.out.split())
    assert "No ranking, the budgets differ. Lowest val loss: batch=12 at its own end (" in said
    assert "At equal tokens not all have an evaluation." in said
    assert "train.eval_every_tokens=1152 evaluates runs of all batches at like tokens." in said
    done = sweep("tokens", "train.eval_every_tokens=500")
    assert "note: these points are evaluated" not in done.err
    c = compare([tmp_path / "tokens"])
    at = {}
    for r in c.runs:
        seen = np.isfinite(r.columns["val/loss"])
        at[r.facts["real_batch_size"]] = r.columns["tokens_seen"][seen].tolist()
    # 96 and 144 tokens a step: the first position at or past each 500 tokens, and the end
    assert at == {8: [576.0, 1056.0, 1536.0], 12: [576.0, 1008.0, 1584.0, 2016.0, 2304.0]}
    assert c.align_at == 1584.0
    said = "Losses are read at 1,584 tokens, where the first run ends."
    assert said in c.why


def test_positions_of_a_run_are_computed_once() -> None:
    """They are asked for with every key, and a run may have millions of steps."""
    run = evaluated(2, 50, 10, last=True)
    assert all(positions(run, axis) is positions(run, axis) for axis in ("tokens", "steps", "time"))
    later = replace(run, steps=steps_of({k: v[:30] for k, v in run.columns.items()}))
    assert len(positions(later, "steps")) == 30
