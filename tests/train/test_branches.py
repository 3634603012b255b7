"""Branches of a run: forks, cooldowns, extensions. What they share with a run made in one go is the
same, bit for bit."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from llmexp.__main__ import run
from llmexp.checkpoint.loading import read_checkpoint
from llmexp.compare.comparing import compare
from llmexp.compare.curves import lineage
from llmexp.compare.figures import figures
from llmexp.compare.reading import read
from llmexp.compose.app import compose, hydra_app
from llmexp.compose.command_line import parse
from llmexp.compose.forking import with_steps
from llmexp.run import Parent
from llmexp.runs import rundir
from llmexp.runs.find import find
from llmexp.runs.rows import read_rows
from llmexp.settings.config import Config
from llmexp.settings.convert import with_knobs
from llmexp.settings.values import ConfigError
from llmexp.sweep.main import section_of
from llmexp.sweep.points import expand, load_points
from llmexp.system.fileio import sha256
from llmexp.tracker.fields import run_fields
from llmexp.train.assembly import solving
from llmexp.train.assembly.assemble import Parts, assemble
from llmexp.train.beginning import _begun_anew
from llmexp.update.schedule import cooldown
from tests import tools
from tests.conftest import TINY, Result, llmexp, start, train
from tests.tools import amend, exact, run_here, same_state, wait_for, weights

# Dropout, so that random numbers count; an epoch of 50 sequences ends inside step 7.
SETTINGS = [
    "data=tokens", "data.val_ratio=0.1", "batch.micro_batch_size=4",
    "batch.gradient_accumulation_steps=2", "model.dropout=0.1", "train.log_every=1",
    "train.eval_every=4", "train.data_digest=true", "checkpoint.keep=null", "checkpoint.every=4",
    "optimizer.lr=0.01", "precision=fp64",
]  # fmt: skip
# A trunk and its cooldown in one go, as a function of one's own.
ONCE = """
def trunk_then_cooldown(update, total_updates, start, warmup_steps, warmup_ratio):
    if update < start:
        return 1.0
    return 1 - (update + 1 - start) / (total_updates - start)
"""


@pytest.fixture(scope="module")
def trunk(tmp_path_factory, tokens) -> Result:
    """Twelve steps at one rate."""
    cwd = tmp_path_factory.mktemp("branches")
    shutil.copy(tokens, cwd / "train.npy")
    more = ["data.train_files=[train.npy]", "schedule=constant", "train.max_steps=12"]
    return train(cwd, "trunk", *SETTINGS, *more, "schedule.warmup_ratio=0")


def fork(trunk: Result, name: str, *overrides: str, step: int = 4) -> Result:
    """A fork of the trunk that has to succeed."""
    cwd = trunk.folder.parent
    given = ["fork.run=trunk", f"fork.step={step}", f"hydra.run.dir={name}", *overrides]
    result = llmexp("train", *given, cwd=cwd)
    assert result.code == 0, result.err + result.out
    return result


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
    lineage = [json.loads(line) for line in text.splitlines()]
    assert lineage == trunk.rows()[:4]
    both = read(find([trunk.folder, same.folder])[0])
    of_trunk, own = (figures(one, "tokens", None)["train/loss"] for one in both)
    expected = np.mean([row["train/loss"] for row in trunk.rows()[-10:]])  # it has 8 of these rows
    assert own == of_trunk == pytest.approx(expected, rel=1e-14)
    summary = same.json("status.json")["summary"]
    assert summary["tokens_seen"] == trunk.rows()[-1]["tokens_seen"]
    assert summary["own tokens_seen"] == summary["tokens_seen"] - lineage[-1]["tokens_seen"]
    steps = [row["step_time"] for row in same.rows()]
    assert summary["train_time"] == pytest.approx(sum(steps))
    # Killed before its first checkpoint it begins again where its parent was.
    again = Result(0, "", "", same.folder.with_name("again"))
    shutil.copytree(same.folder, again.folder)
    for step in (8, 12):
        shutil.rmtree(again.checkpoint(step))
    (again.folder / "status.json").write_text('{"state": "running"}')
    resumed = llmexp("resume", "again", cwd=again.folder.parent)
    assert resumed.code == 0, resumed.err
    assert "forked from trunk/checkpoints/step_00000004" in resumed.out
    assert exact(again) == exact(same)


def test_outliers_are_judged_anew_where_batch_or_data_are_others(trunk):
    """Its first steps are not held to the losses and norms that were usual before."""
    for name, override, known in (
        ("rate", "optimizer.lr=2e-3", 12), ("batch", "batch.real_batch_size=16", 8),
        ("ignored", "data.ignore_id=3", 8), ("cache", "data.cache_dir=cache", 12),
    ):  # fmt: skip
        state = torch.load(fork(trunk, name, override).checkpoint(12) / "state.pt")
        assert len(state["outliers"]["window"]) == known, name


def test_the_noise_scale_is_measured_anew_where_sequences_are_longer(trunk):
    """Its sums are by sequences: those of the parent's are of another length."""
    tree, loaded = rundir.built_config(trunk.folder), read_checkpoint(trunk.checkpoint(4), ())
    assert [*_begun_anew(loaded, tree)] == []
    longer = with_knobs(tree, batch={"sequence_length": 24})
    assert "noise" in _begun_anew(loaded, longer)


def test_a_cooldown_from_a_trunk_is_one_run_with_that_schedule(trunk):
    by_interval = "train.eval_every=10"
    cold = fork(trunk, "cold", "schedule=cooldown", by_interval, step=8)
    assert cold.json("run.json")["max_steps"] == 10  # 8 / (1 - 0.2)
    cwd = trunk.folder.parent
    (cwd / "once.py").write_text(ONCE)
    more = ["data.train_files=[train.npy]", "train.max_steps=10", by_interval, "--allow", "once"]
    own = ["schedule=constant", "schedule._target_=once.trunk_then_cooldown", "+schedule.start=8"]
    whole = train(cwd, "whole", *SETTINGS, *more, *own)
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
    again = llmexp("resume", "swept", cwd=cwd)
    assert again.code == 0, again.err
    assert (cwd / "swept" / "compare.html").exists()
    second = Result(0, "", "", cwd / "swept" / "1-step_8")
    assert [r.json("run.json")["max_steps"] for r in (first, second)] == [5, 10]
    compared = compare([cwd / "swept"])
    assert [entry.label for entry in compared.settings] == ["from=8", "from=4"]
    for entry, steps in zip(compared.settings, (8, 4), strict=True):
        drawn = lineage(entry, "train/loss")
        losses = [row["train/loss"] for row in trunk.rows()[:steps]]
        assert drawn.y[0].tolist() == [*losses, entry.runs[0].columns["train/loss"][0]]
        assert drawn.x["tokens"].tolist() == [96.0 * (k + 1) for k in range(steps + 1)]
        time = [row["step_time"] for row in trunk.rows()[:steps]]
        own = entry.figures["train_time"]
        assert entry.figures["line_time"] == pytest.approx(sum(time) + own)
        assert entry.figures["own_tokens"] == 96 * (1 if steps == 4 else 2)
        assert entry.figures["tokens_seen"] == entry.figures["own_tokens"] + 96 * steps


def test_the_data_go_on_by_sequences_or_begin_anew_and_the_banner_says_so(trunk):
    """Another real batch reads on at the same sequence: 4 steps of 8 sequences are 8 of 4, so a run
    that has taken 4 sequences a step from the start reads the same windows."""
    small = fork(trunk, "small", "batch.real_batch_size=4", "train.max_steps=8")
    assert "go on at sequence 32, where the parent was" in " ".join(small.out.split())
    run = small.json("run.json")
    assert (run["total_sequences"], run["max_tokens"]) == (48, 48 * 12)
    cwd, more = trunk.folder.parent, ["data.train_files=[train.npy]", "train.max_steps=12"]
    four = ["batch.micro_batch_size=4", "batch.gradient_accumulation_steps=1"]
    other = train(cwd, "other", *SETTINGS, *more, *four)
    digests = [row["data_digest"] for row in exact(other)][8:12]
    assert [row["data_digest"] for row in exact(small)] == digests
    assert small.rows()[-1]["epoch"] == other.rows()[-1]["epoch"]
    anew = fork(trunk, "anew", "train.seed=5", "fork.moments=drop", "train.max_tokens=480")
    assert "begin anew at sequence 0: train.seed differs" in " ".join(anew.out.split())
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
    done = llmexp("train", "-m", *swept, "hydra.sweep.dir=halved", cwd=cwd)
    assert done.code == 0, done.err
    points = json.loads((cwd / "halved" / "sweep.json").read_text())["points"]
    ends = sorted(
        (p["rung"] or 1, rundir.newest_step(cwd / "halved" / p["folder"])) for p in points
    )
    assert ends == [(0.25, 9), (1, 12)]  # of four steps


def composed(overrides: list[str]) -> Config:
    return tools.composed(*parse("train", overrides).overrides)


def test_a_fork_command_that_is_given_again_means_the_same_fork(trunk, monkeypatch):
    """Its folder knows the step, when the parent has gone on; of two parents the last counts."""
    monkeypatch.chdir(trunk.folder.parent)
    asked = ["fork.run=trunk", "hydra.run.dir=kept", "model.dropout=0"]
    assert composed(asked).fork.step == 12
    Path("kept").mkdir()
    before = Parent("trunk", "t", 8, 64, 80, 72, "on", "0")
    Path("kept/run.json").write_text(json.dumps({"parent": dataclasses.asdict(before)}))
    assert composed(asked).fork.step == 8
    other = copy(trunk, "of_step_8")
    shutil.rmtree(other.checkpoint(12))
    twice = composed([*asked, "fork.run=of_step_8"]).fork
    assert (twice.run, twice.step) == ("of_step_8", 8)
    assert composed([*asked, "fork.run=null"]).fork.run is None
    asked = [*asked, "fork.step=null"]
    assert with_steps(["-m", *asked], asked) == ["-m", *asked, "fork.step=12"]


def changed(trunk: Result, name: str, old: str, new: str) -> Result:
    """A copy of the trunk with another word in its config."""
    made = copy(trunk, name)
    config = made.folder / "config.yaml"
    text = config.read_text()
    assert text.count(old) == 1
    config.write_text(text.replace(old, new))
    return made


def points_of(overrides: list[str]) -> list[Config]:
    """The configs of the points of a sweep; none may be refused."""
    with hydra_app(None, overrides) as hydra:
        cfg, _ = compose(hydra, overrides, True)
        grid = expand(cfg, overrides)
        knobs = section_of(cfg)[0]
        found, refused = load_points(cfg, grid, 0, knobs, Path("new"))
        assert not refused
        return [point.config for point in found]


def test_each_point_of_a_sweep_over_trunks_has_the_config_of_its_own(trunk, monkeypatch):
    """Seed, schedule and steps are those of its parent, whatever stands before it in the sweep."""
    monkeypatch.chdir(trunk.folder.parent)
    changed(trunk, "of seed 7", "seed: 1234", "seed: 7")
    other = changed(trunk, "linear", "schedule.constant", "schedule.linear")
    shutil.rmtree(other.checkpoint(12))
    both = ["fork.run=trunk,'of seed 7',linear", "optimizer.lr=0.1,0.2"]
    seeds = {"trunk": 1234, "of seed 7": 7, "linear": 1234}
    found = points_of([*both, "fork.step=8"])
    assert [(c.fork.run, c.optimizer["lr"]) for c in found] == [
        (name, lr) for name in seeds for lr in (0.1, 0.2)
    ]
    for config in found:
        name = str(config.fork.run)
        assert config.train.seed == seeds[name]
        assert config.schedule["_target_"].endswith("linear") == (name == "linear")
    backwards = points_of(
        ["optimizer.lr=0.2,0.1", "fork.run=linear,'of seed 7',trunk", "fork.step=8"]
    )
    assert sorted(map(str, backwards)) == sorted(map(str, found))
    fixed = with_steps(["-m", *both], both)
    assert fixed == ["-m", "fork.run=trunk@12,of seed 7@12,linear@8", "optimizer.lr=0.1,0.2"]
    steps = {"trunk": 12, "of seed 7": 12, "linear": 8}
    assert [(c.fork.run, c.fork.step) for c in points_of(fixed[1:])] == [
        (name, steps[name]) for name in steps for _ in range(2)
    ]
    assert with_steps(fixed, fixed[1:]) == fixed
    assert with_steps(both[:1], ["fork.run=trunk,'of seed 7'"])[1:] == ["fork.step=12"]
    assert composed(["fork.run=trunk@4"]).fork == composed(["fork.run=trunk", "fork.step=4"]).fork


def test_forks_of_trunks_that_differ_in_the_seed_are_one_setting(trunk, capsys):
    """Each has a trunk of its own, so nothing is said of one trunk; a trunk of another setting is
    another one, though the forks have the same settings themselves."""
    cwd = trunk.folder.parent
    more = ["data.train_files=[train.npy]", "schedule=constant", "schedule.warmup_ratio=0"]
    second = train(cwd, "second", *SETTINGS, *more, "train.max_steps=12", "train.seed=2")
    changed(trunk, "faster", "lr: 0.01", "lr: 0.02")
    swept = ["fork.run=trunk,second,faster", "optimizer.lr=0.01", "fork.step=8"]
    done = llmexp("train", "-m", *swept, "train.max_steps=9", "hydra.sweep.dir=trunks", cwd=cwd)
    assert done.code == 0, done.err
    for number, parent in ((0, trunk), (1, second)):
        (point,) = (cwd / "trunks").glob(f"{number}-*")
        (own,) = (row for row in parent.rows() if row["step"] == 9)
        (row,) = read_rows(point / "metrics.jsonl")
        assert row["data_digest"] == own["data_digest"]
        assert row["train/loss"] == own["train/loss"]
    compared = compare([cwd / "trunks"])
    groups = sorted(sorted(str(r.config["fork.run"]) for r in e.runs) for e in compared.settings)
    assert groups == [["faster"], ["second", "trunk"]]
    assert run(["compare", str(cwd / "trunks"), "--why"]) == 0
    assert "one trunk" not in capsys.readouterr().out
    again = llmexp("resume", "trunks", cwd=cwd)
    assert (again.code, "3 points, none of them new" in again.out) == (0, True), again.out


def copy(trunk: Result, name: str) -> Result:
    made = Result(0, "", "", trunk.folder.with_name(name))
    shutil.copytree(trunk.folder, made.folder)
    return made


def test_a_fork_of_an_older_run_goes_on_with_its_clip_table(trunk):
    """Its checkpoints know no knob of clipping but these three."""
    made = copy(trunk, "older")
    for file in made.folder.glob("checkpoints/*/manifest.json"):
        manifest = json.loads(file.read_text())
        three = {"clip.kind", "clip.max_norm", "clip.max_value"}
        old = {k: v for k, v in manifest["config"].items() if k[:5] != "clip." or k in three}
        file.write_text(json.dumps(manifest | {"config": old}))
    fork(trunk, "kept-table", "fork.run=older")
    assert rundir.read_status(trunk.folder.with_name("kept-table"))["clip"]["steps"] == 12
    fork(trunk, "other-limit", "fork.run=older", "clip.max_norm=0.5")
    assert rundir.read_status(trunk.folder.with_name("other-limit"))["clip"]["steps"] == 8


@pytest.mark.usefixtures("forking")
def test_an_extended_run_is_the_longer_one(trunk, monkeypatch, capfd):
    cwd = trunk.folder.parent
    monkeypatch.chdir(cwd)
    longer = copy(trunk, "longer")
    for group in ("schedule=linear", "optimizer=sgd"):
        refused = run_here(capfd, "resume", "longer", group, "train.max_steps=16")
        assert refused.code == 2
        section = group.partition("=")[0]
        assert f"{section}._target_ (llmexp." in refused.err
        assert "llmexp train fork.run=longer" in refused.err
    refused = run_here(capfd, "resume", "longer", "schedule=constnt", "train.max_steps=16")
    assert "Did you mean constant?" in refused.err
    groups = ["schedule=constant", "tracker=none"]  # as it has them
    result = llmexp("resume", "longer", *groups, "train.max_steps=16", cwd=cwd)
    assert result.code == 0, result.err
    more = ["data.train_files=[train.npy]", "schedule=constant", "train.max_steps=16"]
    refused = run_here(capfd, "resume", "longer", "train.max_steps=null")
    assert (refused.code, "is no budget" in refused.err) == (2, True), refused.err
    whole = train(cwd, "sixteen", *SETTINGS, *more, "schedule.warmup_ratio=0")
    assert exact(longer) == exact(whole)
    same_state(longer.checkpoint(16), whole.checkpoint(16))
    wsd_run = ["data.train_files=[train.npy]", "schedule=wsd", "schedule.warmup_steps=2"]
    share = [*wsd_run[:2], "schedule.warmup_ratio=0.17", "train.max_steps=12"]
    cut = train_to(cwd, "cut", 8, *share)  # its decay begins after step 10
    result = llmexp("resume", "cut", "train.max_tokens=1536", cwd=cwd)
    assert result.code == 0, result.err
    assert "the warm-up stays 2 updates: schedule.warmup_steps=2" in result.out
    whole = train(cwd, "whole16", *SETTINGS, *wsd_run, "train.max_tokens=1536")
    assert exact(cut) == exact(whole)
    same_state(cut.checkpoint(16), whole.checkpoint(16))
    # Now it has decayed: a fork from before that is the way.
    refused = run_here(capfd, "resume", "cut", "train.max_steps=20")
    assert refused.code == 2
    assert "llmexp train fork.run=cut fork.step=12 train.max_steps=20" in refused.err
    assert cut.json("run.json")["max_steps"] == 16
    assert cut.json("status.json")["state"] == "finished"


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("data_fingerprint", None, "go on at sequence 64, where the parent was"),
        ("data_fingerprint", {"files": 7}, "begin anew at sequence 0: the content of the data"),
        ("sequence_length", None, "trunk-2/run.json: has no 'sequence_length' of the run"),
        ("stages", [{"rate": 1.0}], "trunk-2/run.json: stages="),
    ],
)
def test_what_a_parent_did_not_record(trunk, monkeypatch, name, value, says):
    """Data that are not recorded are taken for the same, as at a resume of the run itself."""
    monkeypatch.chdir(trunk.folder.parent)
    file = copy(trunk, "trunk-2").folder / "run.json"
    recorded = json.loads(file.read_text()) | {name: value}
    file.write_text(json.dumps({k: v for k, v in recorded.items() if v is not None}))
    try:
        found = planned(["fork.run=trunk-2", "fork.step=8", "train.max_steps=20"]).run.parent.order
    except ConfigError as error:
        found = str(error)
    finally:
        shutil.rmtree("trunk-2")
    assert found.startswith(says)


def train_to(cwd: Path, name: str, stop: int, *overrides: str) -> Result:
    result = llmexp(
        "train", *TINY, *SETTINGS, *overrides, f"train.stop_step={stop}", f"hydra.run.dir={name}",
        cwd=cwd,
    )  # fmt: skip
    assert result.code == 75, result.err
    return result


def planned(overrides: list[str]) -> Parts:
    """What `llmexp plan` does, in this process."""
    return assemble(composed(overrides))


def test_a_fork_has_the_warm_up_of_its_parent_unless_another_one_is_given(trunk, monkeypatch):
    """Three updates, a share of the parent's twelve or given as such."""
    monkeypatch.chdir(trunk.folder.parent)
    ratio, steps = "warmup_ratio: 0", "warmup_steps: null"
    for name, old, new in (("share", ratio, f"{ratio}.25"), ("steps", steps, "warmup_steps: 3")):
        made = copy(trunk, name).folder
        text = (made / "config.yaml").read_text()
        assert old in text
        (made / "config.yaml").write_text(text.replace(old, new))
        amend(made / "run.json", warmup_updates=3)
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
    ("overrides", "words"),
    [
        (["fork.step=5"], ["fork.step=5: ", "keeps no checkpoint", "4, 8, 12", "fork.step=4"]),
        (["fork.run=nowhere"], ["fork.run=nowhere: is no run folder"]),
        (
            ["model.n_layers=1"],
            [
                "model.n_layers=1: a fork has the model of its parent, and trunk has 2; leave it "
                "out, or begin a new run with what fits: model.init_from=trunk@12",
            ],
        ),
        (
            ["model.n_layers=1", "model.d_model=8"],
            ["model.n_layers=1, model.d_model=8: a fork has"],
        ),
        (["fork.run=."], ["fork.run=.: is no run folder", "name a run in it: "]),
        (["schedule=nope"], ["schedule=nope: there is no such option. Known: constant, "]),
        (["schedule.power=2"], ["schedule.power: there is no such key"]),
        (["fork.run=trunk@5"], ["there is no checkpoint of step 5", "those of 4, 8, 12"]),
        (["fork.run=trunk@8", "fork.step=4"], ["fork.step=4: fork.run=trunk@8 names a step too"]),
        (["fork.run=trunk,null"], ["a run without a parent has none of its settings"]),
        (["fork.run=trunk@4,trunk@8"], ["several values are a sweep, which needs -m"]),
        (["optimizer=muon"], ["fork.moments=keep: ", "fork.moments=drop"]),
        (
            ["optimizer.name=Lion"],
            ["run folder has takes no such knob; these have it: library; for example optimizer="],
        ),
        (["data.train_files=[gone.npy]"], ["gone.npy"]),
        (["train.max_steps=12"], ["train.max_steps=12: counts the parent's part too", "=15"]),
        (["fork.moments=some"], ["fork.moments=some: must be one of keep, drop"]),
        (["schedule=cooldown", "schedule.decay_ratio=1"], ["schedule.decay_ratio=1: "]),
        (["model.init_from=trunk"], ["model.init_from=trunk: a fork begins with"]),
        (["fork.step=8", "train.stop_step=8"], ["train.stop_step=8: ", "train.stop_step=9"]),
        (["fork.step=8", "train.profile_start=3"], ["train.profile_start=3: "]),
    ],
)
def test_what_cannot_be_forked_is_refused(trunk, overrides, words, monkeypatch):
    monkeypatch.chdir(trunk.folder.parent)
    if not overrides[0].startswith("fork.run"):
        overrides = ["fork.run=trunk", *overrides]
    with pytest.raises(ConfigError) as refused:
        planned(overrides)
    for text in words:
        assert text in str(refused.value)


def test_resume_from_a_step_names_the_fork(trunk, tmp_path, monkeypatch, capsys):
    (tmp_path / "a trunk").symlink_to(trunk.folder)
    monkeypatch.chdir(tmp_path)
    assert run(["resume", "a trunk@8", "train.max_steps=20", "fork.step=4"]) == 2
    *_, command = capsys.readouterr().err.partition("from step 8 a fork does: llmexp ")
    assert shlex.split(command) == ["train", "fork.run=a trunk@8", "train.max_steps=20"]
    monkeypatch.setenv("LLMEXP_ALLOW", "json")
    for words, more in (("a trunk@8", ""), ("a trunk", " train.max_steps=24")):  # its end
        assert run(["resume", words, "optimizer.lr=1"]) == 2
        assert capsys.readouterr().err.endswith(f" optimizer.lr=1{more} --allow json\n")
    assert run(["resume", "a trunk@5"]) == 2
    said = capsys.readouterr().err
    assert "there is no checkpoint of step 5; there are those of 4, 8" in said
    assert shlex.split(said.partition("for example ")[2]) == ["a trunk@12"]


def test_runs_that_a_folder_holds_are_named_in_their_order_and_quoted(tmp_path, capsys):
    for number in (10, 9, 0, 1, 2, 11):
        inner = tmp_path / "my sweep" / f"{number}-lr"
        inner.mkdir(parents=True)
        (inner / "config.yaml").write_text("")
    folder = tmp_path / "my sweep"
    for command in (["train", f"fork.run={folder}"], ["average", str(folder)]):
        assert run(command) == 2
        first = ", ".join(f"'{folder}/{number}-lr'" for number in (0, 1, 2, 9))
        assert f"name a run in it: {first} and 2 more" in capsys.readouterr().err


def test_what_comes_after_the_end_of_the_run_is_said_before_it_starts(trunk, monkeypatch):
    monkeypatch.chdir(trunk.folder.parent)
    fork = ["fork.run=trunk", "fork.step=8", "train.max_steps=20"]
    for more, words in (
        (["schedule=cooldown", "schedule.decay_start=20"], "schedule.decay_start=20: the run ends"),
        (["schedule.warmup_steps=21"], "the warm-up of 21 updates is longer than the run of 20"),
        (
            ["schedule=cooldown", "schedule.decay_steps=13"],
            "schedule.decay_steps=13: the decay",
        ),
    ):
        assert any(text.startswith(words) for text in planned([*fork, *more]).run.warnings)
    near = planned(
        [*fork, "schedule=cooldown", "schedule.decay_start=19", "schedule.decay_steps=1"]
    )
    assert not any("decay" in text for text in near.run.warnings)
    config = dataclasses.replace(
        near.config, data={"stages": [{"from_tokens": 1920}, {"from_tokens": 1919}]}
    )
    (late,) = solving._too_late(config, near.run)
    assert late.startswith("data.stages: that from 1,920 tokens on never begins")


@pytest.mark.usefixtures("forking")
def test_the_plan_of_a_fork_is_of_its_own_part(trunk, monkeypatch, capsys):
    monkeypatch.chdir(trunk.folder.parent)
    given = ["fork.run=trunk", "fork.step=8", "train.max_steps=11"]
    assert run(["plan", "-m", "--measure", "--json", *given]) == 0
    found = json.loads(capsys.readouterr().out)
    (point,), total = found["points"], found["total"]
    tokens = 3 * 8 * 12  # steps, sequences, length
    assert point["max_tokens"] == 11 * 8 * 12
    assert total["tokens"] == tokens
    assert point["total_flops"] == total["flops"] == tokens * point["flops_per_token"]
    counts = {k: point["time"][f"{k}_count"] for k in ("step", "row", "evaluation", "save")}
    assert counts == {"step": 3, "row": 3, "evaluation": 1, "save": 1}
    assert point["time"]["timed_steps"] == 1


def test_a_fork_into_a_used_folder_leaves_it(trunk, monkeypatch, capsys):
    cwd = trunk.folder.parent
    before = {path: path.stat().st_mtime_ns for path in cwd.rglob("*")}
    given = ["fork.run=trunk", "train.max_steps=20", "hydra.run.dir=trunk"]
    result = llmexp("train", *given, cwd=cwd)
    assert result.code == 2
    refusal = "hydra.run.dir=trunk: holds a run already"
    assert refusal in result.err
    monkeypatch.chdir(cwd)
    assert run(["plan", *given]) == 2
    assert refusal in capsys.readouterr().err
    assert run(["plan", *given, "checkpoint.resume=auto"]) == 0
    assert {path: path.stat().st_mtime_ns for path in cwd.rglob("*")} == before


def test_a_run_does_not_go_into_the_folder_of_a_sweep(tmp_path, monkeypatch, capsys):
    (tmp_path / "swept").mkdir()
    (tmp_path / "swept" / "sweep.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    for command in ("train", "plan"):
        assert run([command, *SETTINGS, "data=synthetic", "hydra.run.dir=swept"]) == 2
        assert "hydra.run.dir=swept: holds a sweep; a run needs" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "swept").iterdir()] == ["sweep.json"]


@pytest.mark.usefixtures("forking")
def test_an_extension_whose_schedule_has_ended_names_the_fork(trunk, monkeypatch, capfd):
    monkeypatch.chdir(trunk.folder.parent)
    made = copy(trunk, "short")
    config = made.folder / "config.yaml"
    text = config.read_text().replace("schedule.constant", "schedule.linear")
    config.write_text(text.replace("warmup_ratio: 0", "warmup_ratio: 0.1"))
    for name in made.folder.glob("checkpoints/*/manifest.json"):
        name.write_text(name.read_text().replace("schedule.constant", "schedule.linear"))
    result = run_here(capfd, "resume", "short", "train.max_steps=24")
    assert result.code == 2
    assert "(linear, over 12 updates)" in result.err
    assert "no checkpoint from before that is kept" in result.err
    assert "of the longer schedule: llmexp train fork.run=short train.max_steps=24\n" in result.err
    assert "warm-up" not in result.out  # nothing goes on


def test_a_fork_without_any_update_is_no_success(trunk):
    cwd = trunk.folder.parent
    np.save(cwd / "masked.npy", np.full(2000, 7, np.uint16))
    masked = ["data.train_files=[masked.npy]", "data.ignore_id=7", "data.val_ratio=0"]
    given = ["fork.run=trunk", "fork.step=4", "hydra.run.dir=masked", *masked]
    result = llmexp("train", *given, "train.max_steps=6", cwd=cwd)
    assert result.code == 3, result.out
    assert "none of the 2 steps applied an update" in result.err


def test_a_cooldown_is_a_line_from_its_start_to_the_end_value():
    line = [cooldown(u, 20, decay_start=8, decay_steps=4, end_ratio=0.2) for u in range(20)]
    assert np.allclose(line, [1.0] * 8 + [0.8, 0.6, 0.4] + [0.2] * 9, rtol=1e-15)
    with pytest.raises(ValueError, match="reaches into the decay"):
        cooldown(0, 20, warmup_steps=9, decay_start=8)
