"""A user's own feature, named as a hook, does what the project's do: rows, state, knobs."""

import itertools

import pytest
import torch

from tests.conftest import llmexp
from tests.tiny import TINY
from tests.tools import weights
from tests.train.resumed import goes_on

RUN = [
    "data=synthetic", "data.n_tokens=5000", "train.max_steps=6", "train.log_every=1",
    "train.eval_every=null", "checkpoint.every=1", "checkpoint.keep=null", "precision=fp64",
    "checkpoint.save_initial=true", "--allow", "own",
]  # fmt: skip
COSINE = "hooks=[own.features.Cosine]"


def test_its_figure_is_that_of_the_checkpoints_and_its_state_is_in_them(runs, tmp_path):
    run = runs(*RUN, COSINE)
    flat = [torch.cat([t.flatten() for t in weights(run, step).values()]) for step in range(7)]
    updates = [after - before for before, after in itertools.pairwise(flat)]
    rows = run.rows()
    assert "mine/cosine" not in rows[0]
    for row, (one, other) in zip(rows[1:], itertools.pairwise(updates), strict=True):
        want = float(one @ other / (one.norm() * other.norm()))
        # fp64 sums of a thousand products of rounded differences
        torch.testing.assert_close(row["mine/cosine"], want, rtol=1e-9, atol=1e-9)
    goes_on(runs.copy(tmp_path / "cut", *RUN, COSINE, step=3), run, "--allow", "own")
    every = runs(*RUN, "hooks=[{_target_:own.features.Cosine,every:3}]")
    assert [row["step"] for row in every.rows() if "mine/cosine" in row] == [3, 6]


def test_it_starts_over_where_it_was_off(runs, tmp_path):
    whole = runs(*RUN, COSINE)
    cut = runs.copy(tmp_path / "cut", *RUN, COSINE, step=3)
    for hooks, every, stop, code in (("hooks=[]", "null", "4", 75), (COSINE, "1", "null", 0)):
        change = [hooks, f"metrics.noise_scale_every={every}", f"train.stop_step={stop}"]
        resumed = llmexp("resume", "cut", *change, "--allow", "own", cwd=tmp_path)
        assert resumed.code == code, resumed.err
        says = "noise starts over: it was off when the checkpoint was saved" in resumed.out
        assert says is (every != "null"), resumed.out
    states = [torch.load(cut.checkpoint(n) / "state.pt", weights_only=True) for n in (3, 4, 5)]
    assert ["own_cosine" in state for state in states] == [True, False, True]
    rows = zip(whole.rows(), cut.rows(), strict=True)
    found = {b["step"]: a["mine/cosine"] - b["mine/cosine"] for a, b in rows if "mine/cosine" in b}
    assert found == {2: 0.0, 3: 0.0, 6: 0.0}  # 5 has no update before it


def test_its_name_may_be_that_of_another_part_of_a_checkpoint(runs, tmp_path):
    hooks = "hooks=[own.features.Progress,own.features.Layers2]"
    cut = runs.copy(tmp_path / "cut", *RUN, hooks, step=3)
    names = {file.stem for file in cut.checkpoint(3).iterdir()}
    assert {"own_progress", "own_layers2"} < names
    goes_on(cut, runs(*RUN, hooks), "--allow", "own")


TWICE = "own.features.Cosine,{_target_:own.features.Cosine,every:3}"


@pytest.mark.parametrize(
    ("hooks", "code", "says"),
    [
        (TWICE, 2, "Cosine: has the name own_cosine in checkpoints, which another"),
        ("own.features.Spaced", 2, "has the name own_my feature in checkpoints, which no file can"),
        ("own.features.NoFeature", 2, "hooks=own.features.NoFeature: is a class, and no feature"),
        ("{_target_:own.features.Cosine,evry:3}", 2, "evry"),
        # a figure that the row has ends the run
        (
            "own.features.Rate",
            3,
            "returned lr, which the row of step 1 has already; choose another",
        ),
    ],
)
def test_a_class_that_cannot_be_used_is_refused(tmp_path, hooks, code, says):
    run = llmexp("train", *TINY, *RUN, f"hooks=[{hooks}]", "hydra.run.dir=r", cwd=tmp_path)
    assert (run.code, says in run.err) == (code, True), run.err
    assert (tmp_path / "r").exists() == (code == 3)


def test_a_plan_does_not_run_it(tmp_path):
    plans = [
        llmexp("plan", *TINY, *RUN, *hooks, "plan.device=h200", cwd=tmp_path)
        for hooks in ([], ["hooks=[own.features.Looking]"])
    ]
    assert [plan.code for plan in plans] == [0, 0], plans[1].err
    memory = [[x for x in plan.out.splitlines() if x.startswith("memory")] for plan in plans]
    assert memory[0] == memory[1] != []
