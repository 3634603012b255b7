"""Losses are compared only where all runs were evaluated at like tokens."""

import itertools
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import llmexp
from llmexp.compare.figures import figures
from llmexp.compare.position import common_position, common_rows
from llmexp.compare.reading import elapsed
from llmexp.compare.records import Record
from tests.compare.made import steps_of
from tests.compare.synthetic import make_run

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
    evaluated = [bool(of) for of in of_runs]
    if not all(evaluated):
        most = min(end for end, of in zip(ends, of_runs, strict=True) if not of)
        of_runs = [[pair for pair in of if pair[0] <= most] for of in of_runs if of]
    alike = []
    for at in {t for of in of_runs for t, _ in of}:
        last = [max((pair for pair in of if pair[0] <= at), default=None) for of in of_runs]
        pairs = itertools.combinations(last, 2)
        if None not in last and all(abs(a - b) <= max(s, t) for (a, s), (b, t) in pairs):
            alike.append(at)
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


@given(st.lists(RUN, min_size=2, max_size=4))
def test_no_run_that_was_evaluated_lacks_its_lowest_loss(runs):
    """It is at rows that count for all, and at its own where none of them does."""
    found = common_position(runs, "tokens", "val/loss")
    for r, counted in common_rows(runs, "tokens", ["val/loss"]).items():
        own, read = (figures(r, "tokens", found, (), rows) for rows in (None, counted))
        assert read.keys() == own.keys()
        assert read.get("best val/loss", 0.0) >= own.get("best val/loss", 0.0)


def test_runs_that_end_within_a_step_are_compared_at_their_ends(tmp_path):
    make_run(tmp_path / "small", micro=8, steps=48, val_every=16)  # 384 sequences
    make_run(tmp_path / "large", micro=20, steps=20, val_every=20)  # 400
    found = llmexp.compare(tmp_path).data
    assert found["align_at"] == 400 * TOKENS
    assert all(run["final val/loss"] in (None, run["val/loss"]) for run in found["runs"])


def test_unlike_batches_are_ranked_only_where_their_evaluations_are_alike(runs, words):
    """After 8 steps of 12 sequences the run has seen three quarters of what the other has at its
    end."""
    asked = ["-m", "data=synthetic", "data.n_tokens=20000", "train.max_steps=16",
             "batch.real_batch_size=8,12", "train.eval_every=8"]  # fmt: skip
    unlike, alike = runs(*asked), runs(*asked, "train.eval_every_tokens=500")
    noted = [" ".join(of.err.split()) for of in (unlike, alike)]
    start = "note: these runs are evaluated every 768 to 1,152 tokens; for evaluations"
    assert [start in text for text in noted] == [True, False]
    found = llmexp.compare(unlike.folder).data
    assert (found["align_at"], found["runs"][0]["mark"]) == (None, "lowest")
    assert found["runs"][1]["mark"] == "not comparable"
    every = "Evaluations of all batches at like tokens: train.eval_every_tokens=1152."
    assert every in found["notes"]
    answer = llmexp.compare(alike.folder)
    at = {}
    for r in answer.comparison.runs:
        seen = np.isfinite(r.columns["val/loss"])
        at[r.facts["real_batch_size"]] = r.columns["tokens_seen"][seen].tolist()
    # 96 and 144 tokens a step: the first position at or past each 500 tokens, and the end
    assert at == {8: [576.0, 1056.0, 1536.0], 12: [576.0, 1008.0, 1584.0, 2016.0, 2304.0]}
    assert answer.data["align_at"] == 1584.0


def test_time_is_the_sum_of_the_steps_it_took():
    columns = {"step": np.array([10.0, 20.0, 50.0]), "step_time": np.array([1.0, np.nan, 0.5])}
    assert elapsed(columns).tolist() == [10.0, 10.0, 25.0]
    assert len(elapsed({"step": np.array([1.0])})) == 0
