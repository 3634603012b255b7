"""Sweeps at the command line: killed, resumed, widened, halved, in slots; their ledger."""

from __future__ import annotations

import json
import math
import shutil
import signal
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from llmexp.runs import ledger as ledgers
from llmexp.settings.values import ConfigError
from llmexp.sweep import running
from llmexp.sweep.running import halving_rungs
from llmexp.system import child
from tests.conftest import HANG_S, TINY, Result, llmexp, start, train
from tests.sweep.running import current_sweep, new_point, run_locally, stand_in
from tests.tools import amend, exact, same_state, session, wait_for

STEPS = 30
RUN = [
    *TINY, "data=synthetic", "data.n_tokens=5000", f"train.max_steps={STEPS}", "train.log_every=1",
    "train.eval_every=null", "train.eval_tokens=500", "checkpoint.every=10", "optimizer.lr=0.01",
    "model.dropout=0.1",
]  # fmt: skip
# What a point does is decided by its clip limit and its accumulation. A mark in the folder makes it
# happen once only.
OWN = """
import os, signal, time

def once(name):
    try:
        os.close(os.open(name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True

def hook(event, context):
    if event != "step_start":
        return
    limit, accumulation = context.optimizers[0].param_groups[0]["weight_decay"], context.run.gradient_accumulation_steps
    if (limit, accumulation) == (0.2, 2) and context.step == 12:
        raise RuntimeError("boom")
    if (limit, accumulation) == (0.1, 4) and context.step >= 15:  # or later, where it was stopped there
        from llmexp.system.child import STOP

        while not os.path.exists("armed") and not STOP.requested:
            time.sleep(0.02)
        if os.path.exists("armed") and once("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
    if (limit, accumulation) == (0.3, 2) and context.step == 7:
        while once("reached") or not os.path.exists("go"):
            time.sleep(0.02)

def hang_of_two(event, context):
    if event == "step_start" and context.step == 3 and os.environ["RANK"] == "1" and once("hung"):
        os.kill(os.getpid(), signal.SIGSTOP)

def fail_once(event, context):
    if event == "step_start" and context.step == 3 and once("failed"):
        raise RuntimeError("only once")

def leave_once(event, context):
    if event == "step_start" and context.step == 5 and once("left"):
        os._exit(0)

def lose_task(event, context):
    if event == "step_start" and context.step == 15 and context.optimizers[0].param_groups[0]["weight_decay"] == 0.3:
        if once("lost"):
            os.kill(os.getppid(), signal.SIGKILL)  # Ray's own process

def rest(event, context):
    if event == "step_start" and context.step == 4:
        once(f"rests {context.optimizers[0].param_groups[0]['weight_decay']}")
        from llmexp.system.child import STOP

        while not STOP.requested:
            time.sleep(0.02)

"""  # noqa: E501
HOOKED = ["--allow", "own", "hooks=[own.hook]"]


def sweep_json(folder: Path) -> dict:
    """The ledger, with what the runs' folders say of its points."""
    ledger = ledgers.read_ledger(folder)
    return {**vars(ledger), "points": [vars(entry) for entry in ledger.points]}


def written(folder: Path) -> dict:
    return json.loads((folder / "sweep.json").read_text())


def states(folder: Path) -> dict[str, str]:
    return {p["folder"]: p["state"] for p in sweep_json(folder)["points"]}


def alone(cwd: Path, name: str, *overrides: str) -> Result:
    return train(cwd, name, *RUN[len(TINY) :], "train.seed=1", *overrides)


def same_run(folder: Path, other: Result) -> None:
    assert exact(Result(0, "", "", folder)) == exact(other)
    last = f"step_{STEPS:08d}"
    same_state(folder / "checkpoints" / last, other.folder / "checkpoints" / last)


def test_a_grid_that_fails_is_killed_and_stopped_is_resumed_to_completion(tmp_path):
    """2 x 3 points: one raises, one is killed; Ctrl-C in the middle, the sweep is killed later; one
    command goes on. Beside a sweep that runs, another command is refused."""
    (tmp_path / "own.py").write_text(OWN)
    grid = ["batch.gradient_accumulation_steps=2,4", "optimizer.weight_decay=0.1,0.2,0.3"]
    arguments = [
        "-m",
        *RUN,
        *HOOKED,
        "train.seed=1",
        *grid,
        "hydra.sweep.dir=grid",
        "sweep.max_parallel=2",
    ]
    process = start("train", *arguments, cwd=tmp_path)
    raised = "1-gradient_accumulation_steps_2+weight_decay_0.2"
    wait_for(
        lambda: (tmp_path / "reached").exists() and states(tmp_path / "grid")[raised] == "failed",
        process,
    )
    other = llmexp("resume", "grid", "--allow", "own", cwd=tmp_path)
    assert other.code == 2
    assert "another process is running the sweep in this folder" in other.err
    process.send_signal(signal.SIGINT)
    (tmp_path / "go").touch()
    out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 75, err
    assert "Traceback" not in err
    wait_for(lambda: not session(process.pid))
    folder = tmp_path / "grid"
    found = states(folder)
    assert len(found) == 6
    assert sweep_json(folder)["state"] == "preempted"
    by_state = {
        state: [name for name, s in found.items() if s == state] for state in set(found.values())
    }
    assert "running" not in by_state
    assert by_state["failed"] == [raised]
    (left_out,) = [n for n in found if n.startswith("2-")]
    assert found[left_out] == "preempted"
    assert len(by_state["queued"]) >= 2
    assert out.splitlines()[-1] == "stopped; to go on: llmexp resume grid --allow own"

    before = {
        name: (folder / name / "status.json").read_bytes() for name in by_state.get("finished", ())
    }
    (tmp_path / "armed").touch()
    process = start("resume", "grid", "--allow", "own", cwd=tmp_path)
    wait_for(
        lambda: (tmp_path / "killed").exists() and "running" in states(folder).values(), process
    )
    process.kill()
    process.communicate()
    wait_for(lambda: not session(process.pid))
    done = llmexp("resume", "grid", "--allow", "own", cwd=tmp_path)
    assert done.code == 1, done.err
    found = states(folder)
    # The killed point was cut or had failed when the sweep was killed; either way it went on from
    # its checkpoint.
    assert [name for name, state in found.items() if state != "finished"] == [raised]
    assert "boom" in done.out
    entry = sweep_json(folder)["points"][1]
    assert entry["exit_code"] == 3
    assert "RuntimeError('boom')" in entry["error"]
    assert {name: (folder / name / "status.json").read_bytes() for name in before} == before
    for name, values in (
        (left_out, ("2", "0.3")),  # stopped by Ctrl-C
        (next(n for n in found if n.startswith("3-")), ("4", "0.1")),  # killed
    ):
        keys = ("batch.gradient_accumulation_steps", "optimizer.weight_decay")
        same_run(
            folder / name,
            alone(tmp_path, f"alone{name}", *map("=".join, zip(keys, values, strict=True))),
        )


# The warm-up is of one step; the last word is what is swept.
PAIR = [
    "train", "-m", *RUN, "schedule=constant", "schedule.warmup_ratio=0.5", "train.max_steps=2",
    "clip.max_norm=0.5,1.0",
]  # fmt: skip


@pytest.fixture(scope="module")
def trained_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("pair")
    done = llmexp(*PAIR, "sweep.negligible=0.5", "hydra.sweep.dir=s", cwd=where)
    assert done.code == 0, done.err
    return where / "s"


@pytest.fixture
def pair(trained_pair: Path, tmp_path: Path) -> Path:
    """A finished sweep of two points of two steps in the folder s."""
    return shutil.copytree(trained_pair, tmp_path / "s")


def test_a_widened_grid_runs_only_what_is_new_and_twins_are_refused(tmp_path, pair):
    base = PAIR[1:-1]
    before = {p: p.read_bytes() for p in pair.glob("[01]-*/*.json*")}
    again = llmexp(*PAIR, "hydra.sweep.dir=s", cwd=tmp_path)
    assert again.code == 2
    assert "holds a sweep already; to go on with it: sweep.resume=s" in again.err
    # Written in another way, with other names and intervals, and in another order: the same points.
    wider = [
        "clip.max_norm=1,2.0,0.50",
        "train.seed=1234",
        "name=other",
        "checkpoint.every=null",
        "sweep.resume=s",
    ]
    second = llmexp("train", *base, *wider, cwd=tmp_path)
    assert second.code == 0, second.err + second.out
    assert f"page   {Path('s') / 'compare.html'}" in second.out.replace(f"{tmp_path}/", "")
    compared = llmexp("compare", "s", cwd=tmp_path).out.splitlines()
    assert "\n".join(line.rstrip() for line in compared) in second.out
    assert (tmp_path / "s" / "plotly.min.js").stat().st_size > 1e6  # what the page names
    assert {p: p.read_bytes() for p in before} == before
    points = sweep_json(tmp_path / "s")["points"]
    assert [(p["number"], p["state"], p["attempts"]) for p in points] == [
        (i, "finished", 1) for i in range(3)
    ]
    assert sweep_json(tmp_path / "s")["swept"] == ["clip.max_norm"]
    assert (
        sweep_json(tmp_path / "s")["negligible"] == 0.5
    )  # what the sweep began with, as it is not given again
    assert "3 points, 1 of them new" in second.out
    # Another value of a key that all points share makes no point; beside the old one it does.
    shared = ["resume", "s", "clip.max_norm=0.5"]
    for other, says in (
        ("data.seed=3", "data.seed=3: all points of s have 0"),
        ("optimizer=sgd", "optimizer: all points of s share another one"),
        ("train.max_steps=1", "is 1 steps, and s/0-max_norm_0.5 is at step 2 already"),
        ("sweep.halving=0.5 train.max_steps=4", "sweep.halving=0.5: decides by shares of the old"),
    ):
        refused = llmexp(*shared, *other.split(), cwd=tmp_path)
        assert (refused.code, says in refused.err) == (2, True), refused.err
    third = llmexp(*shared, "data.seed=0,3", cwd=tmp_path)
    assert third.code == 0, third.err
    assert "2 points, 1 of them new" in third.out
    ledger = sweep_json(tmp_path / "s")
    assert ledger["points"][3]["folder"] == "3-max_norm_0.5+seed_3"
    assert ledger["swept"] == ["clip.max_norm", "data.seed"]
    for twins in (["tracker.notes=a,b"], ["batch.micro_batch_size=8,null"]):
        refused = llmexp("train", *base, *twins, "hydra.sweep.dir=twins", cwd=tmp_path)
        assert refused.code == 2
        assert "resolves to the same config as 0-" in refused.err
    assert not (tmp_path / "twins").exists()


def test_a_longer_budget_lengthens_every_point(tmp_path, pair):
    """They were finished; the warm-up, which was a share of the old budget, stays as it was."""
    done = llmexp("resume", "s", "train.max_steps=5", cwd=tmp_path)
    assert done.code == 0, done.err
    assert "2 points, none of them new, 2 with a longer budget" in done.out
    assert list(states(tmp_path / "s").values()) == ["finished"] * 2
    warm = ["schedule=constant", "schedule.warmup_steps=1", "train.max_steps=5"]
    whole = train(tmp_path, "whole", *RUN[len(TINY) :], *warm, "clip.max_norm=0.5")
    longer = Result(0, "", "", pair / "0-max_norm_0.5")
    for key in ("train/loss", "lr"):
        assert [r[key] for r in longer.rows()] == [r[key] for r in whole.rows()]
    again = llmexp("resume", "s", cwd=tmp_path)
    assert again.code == 0
    assert "2 points, none of them new\n" in again.out
    assert len(longer.rows()) == 5


def test_points_that_are_another_one_again_are_skipped_and_named(tmp_path):
    """Known as composed, or only as solved; a second command leaves them out again."""
    grid = ["tracker.notes=a,b", "batch.micro_batch_size=8,null", "train.max_steps=1"]
    command = ["train", "-m", *RUN, *grid, "sweep.on_infeasible=skip", "hydra.sweep.dir=s"]
    for arguments in (command, ["resume", "s"]):
        done = llmexp(*arguments, cwd=tmp_path)
        assert done.code == 0, done.err
        points = sweep_json(tmp_path / "s")["points"]
        assert [p["state"] for p in points] == ["finished", *["infeasible"] * 3]
        same = [point["error"].partition(";")[0].rpartition(" ")[2] for point in points[1:]]
        assert sorted(name[:2] for name in same) == ["0-", "0-", "1-"]
        assert done.out.count("infeasible: resolves to the same config") == 3


def test_infeasible_points_are_refused_or_skipped(tmp_path):
    grid = ["batch.real_batch_size=12", "batch.micro_batch_size=null",
    "batch.gradient_accumulation_steps=1,3,5",
            "clip.max_norm=1,-1"]  # fmt: skip
    command = ["train", "-m", *RUN, "train.max_steps=2", *grid, "hydra.sweep.dir=s"]
    refused = llmexp(*command, cwd=tmp_path)
    assert refused.code == 2
    assert not (tmp_path / "s").exists()
    skipped = llmexp(*command, "sweep.on_infeasible=skip", cwd=tmp_path)
    assert skipped.code == 0, skipped.err
    points = sweep_json(tmp_path / "s")["points"]
    assert [p["state"] for p in points] == ["finished"] * 2 + ["infeasible"] * 4
    assert all("clip.max_norm=-1" in p["error"] or "10 or 15" in p["error"] for p in points[2:])
    assert "10 or 15" in skipped.out
    assert llmexp("resume", "s", cwd=tmp_path).code == 0
    assert sweep_json(tmp_path / "s")["points"] == points


def test_a_retry_and_a_stop_on_failure(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    two = ["-m", *RUN, "--allow", "own", "batch.gradient_accumulation_steps=1,2",
           "sweep.max_parallel=2"]  # fmt: skip
    # One that failed, or left without a record of it, is started again at once; from the start, as
    # it had no checkpoint yet.
    twice = ["hooks=[own.fail_once,own.leave_once]", "sweep.max_retries=2", "hydra.sweep.dir=retry"]
    retried = llmexp("train", *two, *twice, cwd=tmp_path)
    assert retried.code == 0, retried.out
    assert sum(p["attempts"] for p in sweep_json(tmp_path / "retry")["points"]) == 4
    assert "failed: the process ended with exit code 0 before its last step" in retried.out
    (tmp_path / "failed").unlink()
    stopped = llmexp(
        "train", *two, "hooks=[own.fail_once]", "sweep.stop_on_failure=true",
        "sweep.max_parallel=1",
        "hydra.sweep.dir=stop", cwd=tmp_path,
    )  # fmt: skip
    assert stopped.code == 1
    assert [p["state"] for p in sweep_json(tmp_path / "stop")["points"]] == ["failed", "queued"]


@pytest.mark.slow
@pytest.mark.fresh
def test_a_hang_on_several_ranks_leaves_none_and_is_retried(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    two = [
        "parallelism=ddp",
        "parallelism.nproc_per_node=2",
        "sweep.silence_s=25",
        "sweep.max_retries=1",
    ]
    command = ["-m", *RUN, "--allow", "own", "hooks=[own.hang_of_two]", *two, "hydra.sweep.dir=s"]
    process = start("train", *command, cwd=tmp_path)
    out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 0, out + err
    assert "no sign of life for 25 s (sweep.silence_s); it was ended" in out
    assert [p["attempts"] for p in sweep_json(tmp_path / "s")["points"]] == [2]
    wait_for(lambda: not session(process.pid))


@pytest.mark.parametrize(
    ("first", "keep", "shares"),
    [(None, 0.5, []), (0.25, 0.5, [0.25, 0.5]), (0.5, 0.3, [0.5])],
)
def test_rungs(tmp_path, first, keep, shares):
    assert halving_rungs(current_sweep(tmp_path, halving=first, halving_keep=keep).knobs) == shares


def test_an_interrupted_halving_leaves_out_the_same_points(tmp_path, monkeypatch):
    """Stopped at any rung and resumed as often as it takes: who goes on is decided by the losses at
    the rungs alone."""
    losses = [0.5, 0.1, 0.7, 0.3, 0.2, 0.9, 0.4, 0.8]

    def race(folder: Path, stops_at: list[int]) -> list[float | None]:
        folder.mkdir()
        current = current_sweep(folder, halving=0.125)
        tasks = [new_point(current, f"{i}-x") for i in range(8)]
        calls = 0

        def run_points(current, tasks):
            nonlocal calls
            calls += 1
            for task in tasks:
                step = task.stop or 80
                if running.score(task.path, step) < math.inf:
                    continue  # it has been there before
                with open(task.path / "metrics.jsonl", "a") as f:
                    print(json.dumps({"step": step, "val/loss": losses[task.entry.number]}), file=f)
            current.signals[:] = [signal.SIGINT] if calls in stops_at else []

        monkeypatch.setattr(running, "run_points", run_points)
        running.run_rungs(current, tasks)
        while current.stopped:
            current.signals.clear()
            running.run_rungs(current, tasks)
        return [entry.rung for entry in current.ledger.points]

    whole = race(tmp_path / "whole", [])
    assert [i for i, rung in enumerate(whole) if rung is None] == [1]
    assert sorted(filter(None, whole)) == [0.125] * 4 + [0.25] * 2 + [0.5]
    for number, stops_at in enumerate(([2], [3], [2, 4, 7], [1, 3, 6])):
        assert race(tmp_path / str(number), stops_at) == whole


def test_halving_goes_on_with_the_best_and_resumes_for_real(tmp_path):
    """Of three points one goes on at step 8 of 30. It is bit-equal to the run alone, the rung's
    evaluation aside."""
    command = ["-m", *RUN, "train.seed=1", "optimizer.lr=1e-5,1e-2,1e-3", "sweep.halving=0.25",
               "sweep.halving_keep=0.2", "hydra.sweep.dir=s", "sweep.max_parallel=2"]  # fmt: skip
    done = llmexp("train", *command, cwd=tmp_path)
    assert done.code == 0, done.err + done.out
    points = sweep_json(tmp_path / "s")["points"]
    runs = [Result(0, "", "", tmp_path / "s" / p["folder"]) for p in points]
    ends = [max(row["step"] for row in run.rows()) for run in runs]
    assert ends == [30 if p["rung"] is None else 8 for p in points]
    assert sorted(ends) == [8, 8, 30]
    losses = [next(row["val/loss"] for row in run.rows() if row["step"] == 8) for run in runs]
    assert min(range(3), key=losses.__getitem__) == ends.index(30)
    best = points[ends.index(30)]
    assert best["state"] == "finished"
    reference = alone(
        tmp_path, "alone", [o for o in best["overrides"] if o.startswith("optimizer.lr=")][-1]
    )
    rows = exact(Result(0, "", "", tmp_path / "s" / best["folder"]))
    for key in ("weight_norm", "val/loss", "val/ppl", "val/bits_per_byte", "off_interval"):
        rows[7].pop(key, None)
    assert rows == exact(reference)
    # What was out goes on when halving is called off.
    again = llmexp("resume", "s", "sweep.halving=null", cwd=tmp_path)
    assert again.code == 0, again.err
    assert set(states(tmp_path / "s").values()) == {"finished"}


@pytest.mark.parametrize(
    ("per_run", "devices", "order"),
    [
        (2, ["4,GPU-x", "7,4"], ["a", "a ended", "b", "b ended"]),  # what came free is taken last
        (1, ["4", "GPU-x"], ["a", "b"]),
    ],
)
def test_each_run_has_its_own_devices(tmp_path, monkeypatch, per_run, devices, order):
    """Of three devices, two for each run: they take turns. One each: at the same time."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-x,7")
    stand_in(monkeypatch, f"echo $CUDA_VISIBLE_DEVICES >> {tmp_path}/devices; sleep 0.5")
    current = current_sweep(tmp_path, devices_per_run=per_run)
    seen: list[str] = []
    monkeypatch.setattr(current, "began", lambda entry: seen.append(entry.label))
    monkeypatch.setattr(current, "ended", lambda entry: seen.append(f"{entry.label} ended"))
    run_locally(current, [new_point(current, name, devices=3) for name in ("0-a", "1-b")])
    assert sorted((tmp_path / "devices").read_text().split()) == sorted(devices)
    assert seen[: len(order)] == order


def test_a_run_that_hangs_is_ended(tmp_path, monkeypatch):
    """It and what it has started, though it heeds no signal."""
    stand_in(monkeypatch, "trap '' TERM; sleep 1000 & echo $! > child; kill -STOP $$")
    monkeypatch.chdir(tmp_path)
    current = current_sweep(tmp_path, silence_s=0.5)
    run_locally(current, [new_point(current, "0-a")])
    (entry,) = current.ledger.points
    assert (entry.state, entry.error) == (
        "failed",
        "no sign of life for 0.5 s (sweep.silence_s); it was ended",
    )
    assert child.ended(int((tmp_path / "child").read_text()))


def test_what_cannot_be_a_sweep_is_refused(tmp_path):
    per_run = ["sweep.devices_per_run=1", "parallelism=ddp", "parallelism.nproc_per_node=2"]
    for arguments, text in (
        (["hydra/launcher=basic"], "BasicLauncher does not run here; it is one of local, slurm"),
        (["sweep.resume=nothing"], "sweep.resume=nothing: is no sweep"),
        (["sweep.max_parallel=0"], "sweep.max_parallel=0: must be at least 1"),
        (["sweep.halving=2"], "sweep.halving=2: must be at most 1"),
        (["sweep.halving_keep=0.25"], "sweep.halving_keep=0.25: does nothing without"),
        (["sweep.twins=1", "sweep.report=throughput"], "sweep.twins=1: measures losses"),
        (per_run, "gives each point fewer"),
        (["hydra.sweep.subdir=../out"], "must be inside the sweep's folder"),
    ):
        refused = llmexp(
            "train", "-m", *RUN, "train.seed=1,2", *arguments, "hydra.sweep.dir=s", cwd=tmp_path
        )
        assert refused.code == 2, arguments
        assert text in refused.err
        assert "Traceback" not in refused.err
    assert list(tmp_path.iterdir()) == []


# --- the ledger


def whole_ledger() -> dict:
    entry = {"number": 0, "label": "a", "folder": "0-a", "identity": "ab", "overrides": ["x=1"],
             "attempts": 1, "rung": 0.5, "refused": None}  # fmt: skip
    return {"format": 1, "name": "n", "group": "g", "launcher": "local", "arguments": ["-m"],
    "swept": ["x"],
            "created": 1.0, "state": "running", "negligible": 0.5, "updated": 2.0,
            "points": [entry, {**entry, "number": 1, "folder": "1-b"}]}  # fmt: skip


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=60)
@given(data=st.data())
def test_a_ledger_edited_by_hand_is_read_or_refused_in_words(tmp_path_factory, data):
    tree = whole_ledger()
    target = data.draw(st.sampled_from([tree, *tree["points"]]))
    key = data.draw(st.sampled_from(sorted(target)))
    if data.draw(st.booleans()):
        del target[key]
    else:
        target[key] = data.draw(ANY)
    folder = tmp_path_factory.mktemp("ledger")
    (folder / "sweep.json").write_text(json.dumps(tree))
    refusal, found = "", None
    try:
        found = ledgers.read_ledger(folder)
    except ConfigError as error:
        refusal = str(error)
    if found is None:
        assert "sweep.json" in refusal
        assert key in refusal or "is no number of JSON" in refusal
    else:
        found.save()
        assert ledgers.read_ledger(folder) == found


def test_a_change_of_a_point_among_1000_is_a_line(tmp_path):
    """Also after a kill at any byte; what was written by another process is never added to."""
    points = [
        ledgers.LedgerEntry(n, f"seed_{n}", f"{n}-seed_{n}", "ab" * 12, [f"train.seed={n}"] * 8)
        for n in range(1000)
    ]
    ledger = ledgers.Ledger(tmp_path, "n", "g", "local", ["-m"], ["train.seed"], points=points)
    ledger.save()
    whole = (tmp_path / "sweep.json").read_bytes()
    for number in range(200):
        ledger.update(points[number], attempts=1)
        ledger.update(points[number], attempts=1)  # which is no change
    ledger.update(points[7], attempts=3)
    text = (tmp_path / "sweep.jsonl").read_bytes()
    assert (tmp_path / "sweep.json").read_bytes() == whole
    assert text.count(b"\n") == 201
    assert len(text) < 201 * 80
    assert ledgers.read_ledger(tmp_path) == ledger
    for cut in (1, 40, len(text) - 40, len(text) - 1):
        (tmp_path / "sweep.jsonl").write_bytes(text[:cut])
        found = ledgers.read_ledger(tmp_path)
        assert found.points[7].attempts == (1 if cut > 2000 else 0)
    found.update(found.points[9], attempts=5)  # of a process that has not written it yet
    assert not (tmp_path / "sweep.jsonl").exists()
    assert ledgers.read_ledger(tmp_path).points[9].attempts == 5
    (tmp_path / "sweep.jsonl").write_bytes(text)  # as if it had been killed before it was removed
    assert ledgers.read_ledger(tmp_path) == found


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format": 2}', "\x00", "9" * 5000])
def test_a_file_that_is_no_ledger(tmp_path, text):
    (tmp_path / "sweep.json").write_text(text)
    with pytest.raises(ConfigError, match=r"sweep\.json"):
        ledgers.read_ledger(tmp_path)
    refused = llmexp("resume", str(tmp_path), cwd=tmp_path) if text == "{" else None
    assert refused is None or (refused.code == 2 and "Traceback" not in refused.err)


def test_points_are_known_by_their_folders_too(tmp_path, pair):
    """Points are known by the config in their folders too: nothing runs twice."""
    tree = written(pair)
    for point in tree["points"]:
        point["identity"] = None
    (tmp_path / "s" / "sweep.json").write_text(json.dumps(tree))
    assert llmexp("resume", "s", cwd=tmp_path).code == 0
    before = sweep_json(tmp_path / "s")["points"]
    assert [p["attempts"] for p in before] == [1, 1]

    (tmp_path / "s" / "sweep.json").unlink()
    lost = llmexp("resume", "s", cwd=tmp_path)
    assert (lost.code, "has runs but no sweep.json" in lost.err, "sweep.resume=s" in lost.err) == (
        2,
        True,
        True,
    ), lost.err
    wider = llmexp(*PAIR[:-1], "clip.max_norm=0.5,1.0,2.0", "sweep.resume=s", cwd=tmp_path)
    assert wider.code == 0, wider.err
    assert "sweep.json: is not there and is written anew, from 2 runs" in wider.out
    tree = sweep_json(tmp_path / "s")
    told = (
        "number",
        "label",
        "folder",
        "identity",
        "overrides",
        "state",
        "started",
        "ended",
        "exit_code",
    )
    points = [{k: p[k] for k in told} for p in tree["points"]]
    # What was composed again has its identity; the attempts of before are not known.
    assert [{**p, "identity": None} for p in points[:2]] == [
        {**{k: p[k] for k in told}, "identity": None} for p in before
    ]
    assert [p["attempts"] for p in tree["points"]] == [0, 0, 1]
    assert points[2]["label"] == "max_norm_2.0"
    assert tree["swept"] == ["clip.max_norm"]


def test_a_sweep_of_an_earlier_version_is_not_trained_again(tmp_path, pair):
    """Its files know fewer knobs, and its points by other hashes; a point that was cut goes on."""
    for path in pair.glob("*/config.yaml"):
        config = yaml.safe_load(path.read_text())
        del config["user"], config["train"]["twin"], config["tracker"]["entity"]
        del config["optimizer"]["rule"]
        path.write_text(yaml.safe_dump(config))
    tree = written(tmp_path / "s")
    del tree["negligible"]
    for point in tree["points"]:
        point["identity"] = "0" * 24
    (tmp_path / "s" / "sweep.json").write_text(json.dumps(tree))
    cut = tmp_path / "s" / tree["points"][1]["folder"] / "status.json"
    amend(cut, state="preempted")
    rows = {path: path.read_bytes() for path in (tmp_path / "s").glob("*/metrics.jsonl")}
    resumed = llmexp("resume", "s", cwd=tmp_path)
    assert resumed.code == 0, resumed.err + resumed.out
    assert {path: path.read_bytes() for path in (tmp_path / "s").glob("*/metrics.jsonl")} == rows
    points = sweep_json(tmp_path / "s")["points"]
    assert [(p["state"], p["attempts"]) for p in points] == [("finished", 1), ("finished", 2)]


# --- elsewhere


@pytest.mark.fresh
@pytest.mark.slow
def test_points_as_tasks_of_ray(tmp_path):
    """A real Ray on this machine, stopped by a signal for which Ray has a handler of its own. Then
    one point fails; one loses its task, which Ray repeats, and goes on with the run."""
    pytest.importorskip("ray")
    (tmp_path / "own.py").write_text(OWN)
    command = ["-m", *RUN, "--allow", "own", "hooks=[own.hook,own.rest,own.lose_task]",
               "batch.gradient_accumulation_steps=2", "optimizer.weight_decay=0.2,0.3",
               "hydra/launcher=ray",
               "+hydra.launcher.init.num_cpus=2", "hydra.sweep.dir=s", "train.seed=1"]  # fmt: skip
    (tmp_path / "go").touch()
    again = ["resume", "s", "--allow", "own", "+hydra.launcher.init.num_cpus=2"]
    process = start("train", *command, cwd=tmp_path)
    wait_for(lambda: all((tmp_path / f"rests {w}").exists() for w in (0.2, 0.3)), process)
    process.terminate()
    out, err = process.communicate(timeout=HANG_S)
    assert (process.returncode, "Traceback" in err) == (75, False), err
    assert "stopping: 2 under way save a checkpoint first" in out
    assert out.splitlines()[-1] == f"stopped; to go on: llmexp {' '.join(again)}"
    assert set(states(tmp_path / "s").values()) == {"preempted"}
    done = llmexp(*again, cwd=tmp_path)
    assert done.code == 1, done.err
    bad, good = sweep_json(tmp_path / "s")["points"]
    assert (bad["state"], good["state"]) == ("failed", "finished")
    assert "boom" in bad["error"]
    assert (tmp_path / "lost").exists()
    assert "resumed from step_" in (tmp_path / "s" / good["folder"] / "train.log").read_text()
    same_run(
        tmp_path / "s" / good["folder"],
        alone(
            tmp_path, "alone", "batch.gradient_accumulation_steps=2", "optimizer.weight_decay=0.3"
        ),
    )
