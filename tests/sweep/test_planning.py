"""What a sweep says before it starts: its points, composed once for what they share."""

import shlex
from argparse import Namespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from llmexp.__main__ import run
from llmexp.compare import budgets
from llmexp.compose import app
from llmexp.config.sections import plain
from llmexp.config.values import typed
from llmexp.folders import rundir
from llmexp.sweep import check
from llmexp.sweep.composer import Composer
from llmexp.sweep.local import Local
from llmexp.sweep.points import expand
from llmexp.sweep.section import build_sweep
from tests.conftest import TINY, llmexp
from tests.sweep.running import DEFAULTS
from tests.tools import composed

# Plain values, and each way in which an override does more than put one value in the place of
# another one.
GRIDS = [
    ["train.seed=1,2", "optimizer.lr=1e-3,2e-3", "model.dropout=0.1"],
    ["optimizer=adamw,sgd", "optimizer.lr=0.1,0.2", "train.compile=true,false"],
    ["model.n_layers=2,'${model.n_heads}'", "model.n_heads=2,4"],
    ["data.val_ratio=0.1,0.2", "+data.extra={a:1},{b:2}", "+data.extra.c=3,4"],
    ["clip={max_norm:0.5},{max_norm:1.0}", "train.eval_every=10,null"],
    ["schedule.warmup_steps=1,2", "~schedule.warmup_ratio",
     "hydra.job.config.override_dirname.item_sep=_"],
    ["tracker.notes='a, b','c=d'", "tracker.tags=[x],[y]", "train.max_steps=10,20"],
]  # fmt: skip


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_points_are_what_hydra_composes(grid):
    with app.hydra_app(None) as hydra:
        cfg, _ = app.compose(hydra, grid, True)
        loader = hydra.config_loader
        composer = Composer(cfg)
        points = expand(cfg, grid)
        assert len(points) > 1
        for overrides in reversed(points):  # in another order than they are listed in
            composer(overrides, "x")
        for overrides in points:
            ours, theirs = composer(overrides, "x"), loader.load_sweep_config(cfg, list(overrides))
            theirs.hydra.job.name = "x"
            assert OmegaConf.to_container(ours) == OmegaConf.to_container(theirs)
            known = [key for key in ours if key not in ("hydra", "sweep", "plan")]
            ours, theirs = (OmegaConf.masked_copy(cfg, known) for cfg in (ours, theirs))
            assert OmegaConf.to_container(ours, resolve=True) == OmegaConf.to_container(
                theirs, resolve=True
            )


SYNTHETIC = [*TINY, "data=synthetic", "data.n_tokens=9000", "train.max_steps=8",
             "batch.micro_batch_size=2"]  # fmt: skip
GRID = ["batch.gradient_accumulation_steps=1,2,4", "clip.max_norm=0.5,1.0"]


def test_a_point_is_assembled_once_before_it_is_queued(tmp_path, monkeypatch):
    """A run that is there already is assembled anew, and so is one whose config is another now."""
    config = plain(composed(*SYNTHETIC, "checkpoint.resume=auto"))
    path, assemble, times, waiting = tmp_path / "0-a", check.assemble, [], {}
    request = {"config": config, "folder": str(path), "fixed": True}
    monkeypatch.setattr(check, "assemble", lambda *a, **k: times.append(1) or assemble(*a, **k))
    facts = check.answer("check", request, None, waiting)
    assert check.answer("queue", request, None, waiting) == facts
    assert rundir.read_status(path)["state"] == "queued"
    assert (len(times), waiting) == (1, {})
    check.answer("queue", request, None, waiting)
    assert len(times) == 2
    check.answer("check", request, None, waiting)
    stopped = {**request, "config": {**config, "train": {**config["train"], "stop_step": 1}}}
    check.answer("queue", stopped, None, waiting)  # a rung of halving: nothing is left behind
    assert (len(times), waiting) == (4, {})


def test_unequal_budgets_are_reported_before_anything_is_spent(tmp_path, capsys, monkeypatch):
    """The grid of `train --help`: the warning has a command that, pasted, has equal budgets."""
    monkeypatch.chdir(tmp_path)

    def planned(*words: str) -> tuple[str, str]:
        assert run(["plan", *words]) == 0
        return capsys.readouterr()

    told = planned("-m", *SYNTHETIC, *GRID)[1].splitlines()
    assert told[0].startswith("warning: ")
    assert "accum=1: 192, accum=2: 384, accum=4: 768" in told[0]
    command = shlex.split(told[-1])
    assert command[:3] == ["llmexp", "train", "-m"]
    assert "train.max_steps=8" not in command
    assert command[-1] == "train.max_tokens=192"
    out, err = planned(*command[2:])
    assert err == ""
    assert {line.split()[4] for line in out.splitlines()[1:7]} == {"8", "4", "2"}  # steps

    two = ["batch.gradient_accumulation_steps=1,2", "train.max_steps=2"]
    started = llmexp("train", "-m", *SYNTHETIC, *two, cwd=tmp_path)
    assert started.code == 0, started.err
    assert "accum=1: 48, " in started.err
    for quiet in ("experiment=accumulation_scaling", GRID[1], "experiment=throughput_grid"):
        assert "tokens" not in planned("-m", *TINY, quiet, "data=synthetic")[1]
    on_purpose = planned("-m", *SYNTHETIC, "train.max_steps=8,16")[1]
    assert on_purpose.startswith("note: the budget is swept, from 192 to 384 tokens")


def test_a_sweep_without_several_values_says_that_it_is_one_run(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = "no key has several values, so this sweep is one run; train.seed=1,2 would make two"
    one = ["-m", *SYNTHETIC, "train.max_steps=2"]
    for more, says in (([], True), (["train.seed=1,2"], False)):
        assert run(["plan", *one, *more]) == 0
        assert (told in " ".join(capsys.readouterr().out.split())) == says
    started = llmexp("train", *one, cwd=tmp_path)
    assert started.code == 0
    assert told in " ".join((started.out + started.err).split())


POINTS = st.tuples(st.sampled_from([1, 2, 3, 4]), st.sampled_from([0.5, 1.0]), st.integers(1, 50))


@given(st.lists(POINTS, min_size=2, max_size=9))
def test_the_common_budget_is_within_reach_of_all(points):
    spent = [
        budgets.Spent({"a": accum, "c": clip}, 96 * accum * steps, steps)
        for accum, clip, steps in points
    ]
    total = budgets.common(spent)
    smallest = min(s.tokens for s in spent)
    assert 0.9 * smallest <= total <= smallest
    lines = budgets.warning(spent, lambda pair: f"train {typed(*pair)}")
    assert bool(lines) == (not budgets.equal(s.tokens for s in spent))
    if lines:
        assert lines[-1] == f"  train train.max_tokens={total}"
        assert set(budgets.by_cause(spent).values()) <= {s.tokens for s in spent}


def test_a_plan_fits_a_terminal(capsys, tmp_path, monkeypatch):
    """Every line, whatever is swept, is no longer than the terminal is wide."""
    monkeypatch.chdir(tmp_path)
    keys = ["batch.gradient_accumulation_steps=1,2", "clip.max_norm=0.5,1.0",
            "optimizer=adamw,muon", "schedule.warmup_steps=1,2"]  # fmt: skip
    assert run(["plan", "-m", *SYNTHETIC, *keys, "train.seed=1,2"]) == 0
    out, _ = capsys.readouterr()
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) == 1 + 32 + 1
    assert lines[-1].startswith("32 runs; all with ")
    assert "muon" in out


@pytest.mark.parametrize(
    ("given", "devices", "needs", "expected"),
    [
        ({}, 8, [4, 4, 4], 2),
        ({"devices_per_run": 2}, 8, [2, 2], 4),
        ({"max_parallel": 4}, 8, [4] * 6, 2),
        ({"max_parallel": 1}, 8, [4] * 6, 1),
        ({}, 8, [1, 7], 2),
        ({}, 2, [4], 1),
        ({}, 0, [0, 0], 1),
        ({"max_parallel": 3}, 0, [0, 0], 3),
    ],
)
def test_points_at_once_follow_from_the_devices_that_each_takes(
    monkeypatch, given, devices, needs, expected
):
    assert build_sweep(DEFAULTS | given).at_once(devices, needs) == expected
    # as a forecast has them
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(devices))) or "none")
    tasks = [Namespace(facts=Namespace(devices=devices, ranks=n), cuda=True) for n in needs]
    assert Local(Namespace(knobs=build_sweep(DEFAULTS | given)), tasks).slots == expected
