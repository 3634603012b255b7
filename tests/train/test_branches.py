"""Branches of a run: forks, cooldowns, extensions. What they share with a run made in one go is the
same, bit for bit."""

import dataclasses
import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from llmexp.__main__ import run
from llmexp.cli.running import function_of
from llmexp.compare.comparing import compare
from llmexp.compare.curves import lineage
from llmexp.compare.figures import figures
from llmexp.compare.reading import read
from llmexp.compose.app import compose, hydra_app
from llmexp.compose.command_line import parse
from llmexp.compose.forking import with_steps
from llmexp.config.sections import Config
from llmexp.folders import rundir
from llmexp.folders.find import find
from llmexp.run import Parent
from llmexp.sweep.composer import Composer
from llmexp.sweep.main import section_of
from llmexp.sweep.points import expand, load_points
from llmexp.system.fileio import sha256
from llmexp.tracker.fields import run_fields
from llmexp.train.assembly.assemble import Parts, assemble
from tests import tools
from tests.conftest import TINY, Result, start, train
from tests.tools import amend, exact, same_state, wait_for, weights
from tests.train.resumed import ends, goes_on

# Dropout, so that random numbers count; an epoch of 50 sequences ends inside step 7.
SETTINGS = [
    "data=tokens", "data.val_ratio=0.1", "batch.micro_batch_size=4",
    "batch.gradient_accumulation_steps=2", "model.dropout=0.1", "train.log_every=1",
    "train.eval_every=4", "train.data_digest=true", "checkpoint.keep=null", "checkpoint.every=4",
    "optimizer.lr=0.01", "precision=fp64", "metrics.noise_scale_every=1",
    "data.train_files=[train.npy]",
]  # fmt: skip
CONSTANT = [*SETTINGS, "schedule=constant", "schedule.warmup_ratio=0"]


@pytest.fixture(scope="module")
def trunk(tmp_path_factory, tokens) -> Result:
    """Twelve steps at one rate."""
    cwd = tmp_path_factory.mktemp("branches")
    shutil.copy(tokens, cwd / "train.npy")
    return train(cwd, "trunk", *CONSTANT, "train.max_steps=12")


@pytest.fixture
def here(trunk, monkeypatch) -> Path:
    """The folder of the trunk, to be in."""
    monkeypatch.chdir(trunk.folder.parent)
    return trunk.folder.parent


def fork(trunk: Result, name: str, *overrides: str, step: int = 4) -> Result:
    """A fork of the trunk that has to succeed."""
    given = ["fork.run=trunk", f"fork.step={step}", f"hydra.run.dir={name}", *overrides]
    return ends(trunk.folder.parent, "train", *given)


def copy(trunk: Result, name: str, **changes: dict) -> Result:
    """A copy of the trunk, with other values in its config."""
    made = Result(0, "", "", trunk.folder.with_name(name))
    shutil.copytree(trunk.folder, made.folder)
    amend(made.folder / "config.yaml", **changes)
    return made


def composed(overrides: list[str]) -> Config:
    return tools.composed(*parse("train", function_of("train"), overrides).overrides)


def planned(overrides: list[str]) -> Parts:
    """What `llmexp plan` does, in this process."""
    return assemble(composed(overrides))


def test_a_fork_that_changes_nothing_is_its_parent(trunk):
    same = fork(trunk, "same")
    assert exact(same) == [row for row in exact(trunk) if row["step"] > 4]
    same_state(same.checkpoint(12), trunk.checkpoint(12))
    parent = same.json("run.json")["parent"]
    digest = sha256(trunk.checkpoint(4) / "manifest.json")
    assert (parent["folder"], parent["step"], parent["digest"]) == ("trunk", 4, digest)
    shown = run_fields(same.folder, rundir.read_config(same.folder), same.json("run.json"))
    assert f"fork:{parent['run_id']}@4" in shown.tags
    assert shown.config["run"]["parent"] == parent
    text = (same.folder / "lineage.jsonl").read_text()
    assert [json.loads(line) for line in text.splitlines()] == trunk.rows()[:4]
    both = read(find([trunk.folder, same.folder])[0])
    of_trunk, own = (figures(one, "tokens", None)["train/loss"] for one in both)
    expected = np.mean([row["train/loss"] for row in trunk.rows()[-10:]])  # it has 8 of these rows
    assert own == of_trunk == pytest.approx(expected, rel=1e-14)
    summary, rows = same.json("status.json")["summary"], trunk.rows()
    assert summary["tokens_seen"] == rows[-1]["tokens_seen"]
    assert summary["own tokens_seen"] == summary["tokens_seen"] - rows[3]["tokens_seen"]
    assert summary["train_time"] == pytest.approx(sum(row["step_time"] for row in same.rows()))
    # Killed before its first checkpoint it begins again where its parent was.
    again = Result(0, "", "", same.folder.with_name("again"))
    shutil.copytree(same.folder, again.folder)
    shutil.rmtree(again.folder / "checkpoints")
    (again.folder / "status.json").write_text('{"state": "running"}')
    assert "forked from trunk/checkpoints/step_00000004" in goes_on(again, same).out


@pytest.mark.parametrize(
    ("override", "outliers", "noise", "clipping"),
    [
        ("optimizer.lr=2e-3", 12, 12, 12),
        ("batch.real_batch_size=16", 8, 12, 12),
        ("data.ignore_id=3", 8, 12, 12),
        ("data.cache_dir=cache", 12, 12, 12),
        ("batch.sequence_length=24", 8, 8, 12),  # the sums of the noise scale are by sequences
        ("clip.max_norm=0.5", 12, 12, 8),
    ],
)
def test_what_is_measured_begins_anew_where_the_parents_is_of_something_else(
    trunk, override, outliers, noise, clipping
):
    """Losses and norms that were usual, the noise scale, shares that were clipped: in steps."""
    made = fork(trunk, override.partition("=")[0], override)
    state = torch.load(made.checkpoint(12) / "state.pt")
    status = made.json("status.json")
    found = len(state["outliers"]["window"]), status["noise"]["measurements"]
    assert (*found, status["clip"]["steps"]) == (outliers, noise, clipping)


def test_a_cooldown_from_a_trunk_is_one_run_with_that_schedule(trunk):
    by_interval = "train.eval_every=10"
    cold = fork(trunk, "cold", "schedule=cooldown", by_interval, step=8)
    assert cold.json("run.json")["max_steps"] == 10  # 8 / (1 - 0.2)
    own = ["schedule._target_=own.nets.trunk_then_cooldown", "+schedule.start=8", "--allow=own"]
    more = [*CONSTANT, "train.max_steps=10", by_interval, *own]
    whole = train(trunk.folder.parent, "whole", *more)
    assert exact(cold) == [row for row in exact(whole) if row["step"] > 8]
    same_state(cold.checkpoint(10), whole.checkpoint(10))


def test_a_sweep_over_branch_points_is_killed_and_resumed(trunk):
    """It ends in one comparison, in which the curve of each point begins with its parent's."""
    cwd = trunk.folder.parent
    swept = ["fork.run=trunk", "fork.step=4,8", "schedule=cooldown", "hydra.sweep.dir=swept"]
    process = start("train", "-m", *swept, cwd=cwd)
    first = Result(0, "", "", cwd / "swept" / "0-step_4")
    wait_for(lambda: rundir.read_status(first.folder).get("state") == "finished", process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    ends(cwd, "resume", "swept")
    assert (cwd / "swept" / "compare.html").exists()
    second = Result(0, "", "", cwd / "swept" / "1-step_8")
    assert [r.json("run.json")["max_steps"] for r in (first, second)] == [5, 10]
    compared = compare([cwd / "swept"])
    assert [entry.label for entry in compared.settings] == ["from=8", "from=4"]
    for entry, steps in zip(compared.settings, (8, 4), strict=True):
        drawn, rows = lineage(entry, "train/loss"), trunk.rows()[:steps]
        own = entry.runs[0].columns["train/loss"][0]
        assert drawn.y[0].tolist() == [*(row["train/loss"] for row in rows), own]
        assert drawn.x["tokens"].tolist() == [96.0 * (k + 1) for k in range(steps + 1)]
        time = sum(row["step_time"] for row in rows) + entry.figures["train_time"]
        assert entry.figures["line_time"] == pytest.approx(time)
        assert entry.figures["own_tokens"] == 96 * (1 if steps == 4 else 2)
        assert entry.figures["tokens_seen"] == entry.figures["own_tokens"] + 96 * steps


def test_the_data_go_on_by_sequences_or_begin_anew(trunk):
    """Another real batch reads on at the same sequence: 4 steps of 8 sequences are 8 of 4, so a run
    that has taken 4 sequences a step from the start reads the same windows."""
    small = fork(trunk, "small", "batch.real_batch_size=4", "train.max_steps=8")
    assert "continue at sequence 32, where the parent was" in " ".join(small.out.split())
    run = small.json("run.json")
    assert (run["total_sequences"], run["max_tokens"]) == (48, 48 * 12)
    four = ["train.max_steps=12", "batch.gradient_accumulation_steps=1"]
    other = train(trunk.folder.parent, "other", *SETTINGS, *four)
    digests = [row["data_digest"] for row in exact(other)][8:12]
    assert [row["data_digest"] for row in exact(small)] == digests
    assert small.rows()[-1]["epoch"] == other.rows()[-1]["epoch"]
    anew = fork(trunk, "anew", "train.seed=5", "fork.reset_optimizer=true", "train.max_tokens=480")
    assert "start again at sequence 0: train.seed differs" in " ".join(anew.out.split())
    assert [row["step"] for row in anew.rows()] == [5]
    assert anew.rows()[-1]["tokens_seen"] == 480


def test_twins_of_a_fork_move_the_weights_that_it_begins_with(trunk):
    """By a unit in the last place at most, the same on any layout; the rate is too low to move
    them any more. The best loss of a fork is its own."""
    more = ["train.max_steps=5", "optimizer.lr=1e-300", "train.twin=1", "train.ema=0.5"]
    more += ["model.dropout=0"]  # which ranks draw otherwise
    moved = fork(trunk, "moved", *more)
    split = fork(trunk, "split", *more, "parallelism=fsdp", "parallelism.nproc_per_node=2")
    before, after, again = (weights(r, s) for r, s in ((trunk, 4), (moved, 5), (split, 5)))
    assert all(torch.equal(after[name], again[name]) for name in before)
    (one,), (two,) = exact(moved), exact(split)  # the same window, but for the order of sums
    assert one["data_digest"] == two["data_digest"]
    assert one["train/loss"] == pytest.approx(two["train/loss"], rel=1e-12)
    assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=1e-9)
    for name, old in before.items():
        up, down = (torch.nextafter(old, old.new_tensor(s)) for s in (torch.inf, -torch.inf))
        new = after[name]
        assert ((new == up) | (new == old) | (new == down)).all()
        assert not torch.equal(new, old)
    average = load_file(moved.checkpoint(5) / "ema.safetensors")  # which begins with these, too
    assert all(torch.equal(average[name], after[name]) for name in average)
    worse = fork(trunk, "worse", "train.max_steps=13", "optimizer.lr=100", step=12)
    summary = worse.json("status.json")["summary"]
    assert summary["best val/loss"] == summary["final val/loss"] > trunk.rows()[11]["val/loss"]


def test_halving_over_forks_counts_their_own_steps(trunk):
    cwd = trunk.folder.parent
    swept = ["fork.run=trunk", "fork.step=8", "optimizer.lr=0.01,0.02", "sweep.halving=0.25"]
    ends(cwd, "train", "-m", *swept, "hydra.sweep.dir=halved")
    points = json.loads((cwd / "halved" / "sweep.json").read_text())["points"]
    reached = [(p["rung"] or 1, rundir.newest_step(cwd / "halved" / p["folder"])) for p in points]
    assert sorted(reached) == [(0.25, 9), (1, 12)]  # of four steps


def test_a_fork_command_that_is_given_again_means_the_same_fork(trunk, here):
    """Its folder knows the step, when the parent has gone on; of two parents the last counts."""
    asked = ["fork.run=trunk", "hydra.run.dir=kept", "model.dropout=0"]
    assert composed(asked).fork.step == 12
    Path("kept").mkdir()
    before = Parent("trunk", "t", 8, 64, 80, 72, "on", "0")
    Path("kept/run.json").write_text(json.dumps({"parent": dataclasses.asdict(before)}))
    assert composed(asked).fork.step == 8
    shutil.rmtree(copy(trunk, "of_step_8").checkpoint(12))
    twice = composed([*asked, "fork.run=of_step_8"]).fork
    assert (twice.run, twice.step) == ("of_step_8", 8)
    assert composed([*asked, "fork.run=null"]).fork.run is None
    assert composed(["fork.run=trunk@4"]).fork == composed(["fork.run=trunk", "fork.step=4"]).fork
    asked = [*asked, "fork.step=null"]
    assert with_steps(["-m", *asked], asked) == ["-m", *asked, "fork.step=12"]


def points_of(overrides: list[str]) -> list[Config]:
    """The configs of the points of a sweep; none may be refused."""
    with hydra_app(None, overrides) as hydra:
        cfg, _ = compose(hydra, overrides, True)
        found, refused = load_points(
            Composer(cfg), expand(cfg, overrides), 0, section_of(cfg)[0], Path("new")
        )
        assert not refused
        return [point.config for point in found]


def test_each_point_of_a_sweep_over_trunks_has_the_config_of_its_own(trunk, here):
    """Seed, schedule and steps are those of its parent, whatever stands before it in the sweep."""
    copy(trunk, "of seed 7", train={"seed": 7})
    other = copy(trunk, "linear", schedule={"_target_": "llmexp.optim.schedule.linear"})
    shutil.rmtree(other.checkpoint(12))
    both = ["fork.run=trunk,'of seed 7',linear", "optimizer.lr=0.1,0.2"]
    seeds = {"trunk": 1234, "of seed 7": 7, "linear": 1234}
    steps = {"trunk": 12, "of seed 7": 12, "linear": 8}
    found = points_of([*both, "fork.step=8"])
    pairs = [(name, lr) for name in seeds for lr in (0.1, 0.2)]
    assert [(c.fork.run, c.optimizer["lr"]) for c in found] == pairs
    for config in found:
        name = str(config.fork.run)
        assert config.train.seed == seeds[name]
        assert config.schedule["_target_"].endswith("linear") == (name == "linear")
    turned = ["optimizer.lr=0.2,0.1", "fork.run=linear,'of seed 7',trunk", "fork.step=8"]
    assert sorted(map(str, points_of(turned))) == sorted(map(str, found))
    fixed = with_steps(["-m", *both], both)
    assert fixed == ["-m", "fork.run=trunk@12,of seed 7@12,linear@8", "optimizer.lr=0.1,0.2"]
    wanted = [(name, steps[name]) for name in steps for _ in range(2)]
    assert [(c.fork.run, c.fork.step) for c in points_of(fixed[1:])] == wanted
    assert with_steps(fixed, fixed[1:]) == fixed
    assert with_steps(both[:1], ["fork.run=trunk,'of seed 7'"])[1:] == ["fork.step=12"]


def test_forks_of_trunks_that_differ_in_the_seed_are_one_setting(trunk, here, capsys):
    """Each has a trunk of its own, so nothing is said of one trunk; a trunk of another setting is
    another one, though the forks have the same settings themselves."""
    second = train(here, "second", *CONSTANT, "train.max_steps=12", "train.seed=2")
    copy(trunk, "faster", optimizer={"lr": 0.02})
    swept = ["fork.run=trunk,second,faster", "optimizer.lr=0.01", "fork.step=8"]
    ends(here, "train", "-m", *swept, "train.max_steps=9", "hydra.sweep.dir=trunks")
    for number, parent in ((0, trunk), (1, second)):
        (point,) = (here / "trunks").glob(f"{number}-*")
        (row,), own = Result(0, "", "", point).rows(), parent.rows()[8]
        assert (row["data_digest"], row["train/loss"]) == (own["data_digest"], own["train/loss"])
    compared = compare([here / "trunks"])
    groups = sorted(sorted(str(r.config["fork.run"]) for r in e.runs) for e in compared.settings)
    assert groups == [["faster"], ["second", "trunk"]]
    assert run(["compare", "trunks", "--why"]) == 0
    assert "one trunk" not in capsys.readouterr().out
    assert "resuming 3 runs: 3 finished" in ends(here, "resume", "trunks").out


def test_an_extended_run_is_the_longer_one(trunk):
    """Its warm-up stays as many updates; after its decay a fork is the way."""
    cwd = trunk.folder.parent
    whole = train(cwd, "sixteen", *CONSTANT, "train.max_steps=16")
    groups = ["schedule=constant", "tracker=none"]  # as it has them
    goes_on(copy(trunk, "longer"), whole, *groups, "train.max_steps=16")
    wsd = [*SETTINGS, "schedule=wsd"]
    share = ["schedule.warmup_ratio=0.17", "train.max_steps=12", "train.stop_step=8"]
    # its decay begins after step 10
    cut = ends(cwd, "train", *TINY, *wsd, *share, "hydra.run.dir=cut", code=75)
    whole = train(cwd, "whole16", *wsd, "schedule.warmup_steps=2", "train.max_tokens=1536")
    done = goes_on(cut, whole, "train.max_tokens=1536")
    assert "the warm-up stays 2 updates: schedule.warmup_steps=2" in done.out
    refused = ends(cwd, "resume", "cut", "train.max_steps=20", code=2)
    assert "llmexp train fork.run=cut fork.step=12 train.max_steps=20" in refused.err
    assert cut.json("run.json")["max_steps"] == 16
    assert cut.json("status.json")["state"] == "finished"


def test_data_that_a_parent_did_not_record_are_taken_for_the_same(trunk, here):
    begun = copy(trunk, "unrecorded").folder / "run.json"
    given = ["fork.run=unrecorded", "fork.step=8", "train.max_steps=20"]
    for value, order in (
        ({"files": 7}, "start again at sequence 0: the content"), (None, "continue at sequence 64"),
    ):  # fmt: skip
        recorded = json.loads(begun.read_text()) | {"data_fingerprint": value}
        begun.write_text(json.dumps({k: v for k, v in recorded.items() if v is not None}))
        assert planned(given).run.parent.order.startswith(order)


def test_a_fork_has_the_warm_up_of_its_parent_unless_another_one_is_given(trunk, here):
    """Three updates, a share of the parent's twelve or given as such."""
    shares = {"share": {"warmup_ratio": 0.25}, "steps": {"warmup_steps": 3}}
    for name, schedule in shares.items():
        amend(copy(trunk, name, schedule=schedule).folder / "run.json", warmup_updates=3)
    for name, more, steps, ratio in (
        ("share", ["schedule=constant", "train.max_steps=400"], 3, None),
        ("share", ["batch.real_batch_size=4", "train.max_tokens=4800"], 3, None),
        ("steps", ["schedule=cooldown"], 3, None),
        ("steps", ["schedule=wsd", "schedule.warmup_steps=2"], 2, 0.05),
        ("steps", ["schedule.warmup_ratio=0.1"], None, 0.1),
    ):
        found = composed([f"fork.run={name}", "fork.step=4", *more]).schedule
        assert (found["warmup_steps"], found["warmup_ratio"]) == (steps, ratio), more


@pytest.mark.parametrize(
    ("more", "late"),
    [
        ("schedule=cooldown schedule.decay_start=20", "schedule.decay_start=20"),
        ("schedule=cooldown schedule.decay_steps=13", "schedule.decay_steps=13"),
        ("schedule.warmup_steps=21", "the warm-up of 21 updates"),
        ("schedule=cooldown schedule.decay_start=19 schedule.decay_steps=1", ""),
    ],
)
def test_what_comes_after_the_end_of_the_run_is_said_before_it_starts(here, more, late):
    given = ["fork.run=trunk", "fork.step=8", "train.max_steps=20", *more.split()]
    found = [w for w in planned(given).run.warnings if "decay" in w or "warm-up" in w]
    assert [w[: len(late)] for w in found] == [late] * bool(late)


def test_the_plan_of_a_fork_is_of_its_own_part(here, capsys):
    given = ["fork.run=trunk", "fork.step=8", "train.max_steps=11", "--json"]
    assert run(["plan", "-m", "--measure", *given]) == 0
    found = json.loads(capsys.readouterr().out)
    (point,), total, tokens = found["points"], found["total"], 3 * 8 * 12
    assert point["max_tokens"] == 11 * 8 * 12
    assert total["tokens"] == tokens
    assert point["total_flops"] == total["flops"] == tokens * point["flops_per_token"]
    counts = {k: point["time"][f"{k}_count"] for k in ("step", "row", "evaluation", "save")}
    assert counts == {"step": 3, "row": 3, "evaluation": 1, "save": 1}
    assert point["time"]["timed_steps"] == 1
    assert run(["plan", *given, "hydra.run.dir=trunk", "checkpoint.resume=auto"]) == 0


def test_a_fork_without_any_update_is_no_success(trunk, here):
    np.save("masked.npy", np.full(2000, 7, np.uint16))
    masked = ["data.train_files=[masked.npy]", "data.ignore_id=7", "data.val_ratio=0"]
    given = ["fork.run=trunk", "fork.step=4", "hydra.run.dir=masked", *masked]
    result = ends(here, "train", *given, "train.max_steps=6", code=3)
    assert "none of the 2 steps applied an update" in result.err
