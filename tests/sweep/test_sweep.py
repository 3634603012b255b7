"""Sweeps at the command line: killed, resumed, widened, halved, in slots; their ledger.

What is refused is in tests/refusals/sweep.yaml.
"""

import json
import math
import signal
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from llmexp.config.values import ConfigError
from llmexp.folders import ledger as ledgers
from llmexp.sweep import running
from llmexp.system import child
from tests.conftest import HANG_S, TINY, Result, llmexp, start, train
from tests.sweep.running import PAIR, RUN, STEPS, current_sweep, new_point, run_locally, stand_in
from tests.tools import amend, exact, same_state, session, wait_for


def written(folder: Path) -> dict:
    return json.loads((folder / "sweep.json").read_text())


def points(folder: Path) -> list[ledgers.LedgerEntry]:
    """The points of the ledger, with what the runs' folders say of them."""
    return ledgers.read_ledger(folder).points


def states(folder: Path) -> dict[str, str]:
    return {p.folder: p.state for p in points(folder)}


def alone(cwd: Path, name: str, *overrides: str) -> Result:
    return train(cwd, name, *RUN, "train.seed=1", *overrides)


def same_run(folder: Path, other: Result) -> None:
    assert exact(Result(0, "", "", folder)) == exact(other)
    last = f"step_{STEPS:08d}"
    same_state(folder / "checkpoints" / last, other.folder / "checkpoints" / last)


def test_a_grid_that_fails_is_killed_and_stopped_is_resumed_to_completion(tmp_path):
    """2 x 3 points: one raises, one is killed; Ctrl-C in the middle, the sweep is killed later; one
    command goes on. Beside a sweep that runs, another command is refused."""
    grid = ["batch.gradient_accumulation_steps=2,4", "optimizer.weight_decay=0.1,0.2,0.3"]
    hook = ["hooks=[own.points.grid]", "--allow", "own"]
    more = [*grid, "train.seed=1", "hydra.sweep.dir=grid", "sweep.max_parallel=2"]
    process = start("train", "-m", *TINY, *RUN, *hook, *more, cwd=tmp_path)
    folder = tmp_path / "grid"
    raised = "1-gradient_accumulation_steps_2+weight_decay_0.2"
    reached = (tmp_path / "reached").exists
    wait_for(lambda: reached() and states(folder)[raised] == "failed", process)
    again = ["resume", "grid", "--allow", "own"]
    other = llmexp(*again, cwd=tmp_path)
    assert (other.code, "another process is running" in other.err) == (2, True)
    process.send_signal(signal.SIGINT)
    (tmp_path / "go").touch()
    out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 75, err
    assert "Traceback" not in err
    wait_for(lambda: not session(process.pid))
    found = states(folder)
    assert len(found) == 6
    assert written(folder)["state"] == "preempted"
    by_state = {state: [n for n, s in found.items() if s == state] for state in found.values()}
    assert "running" not in by_state
    assert by_state["failed"] == [raised]
    (left_out,) = [n for n in found if n.startswith("2-")]
    assert found[left_out] == "preempted"
    assert len(by_state["queued"]) >= 2
    assert out.splitlines()[-1].endswith("llmexp resume grid --allow own")

    ended = [folder / name / "status.json" for name in by_state.get("finished", ())]
    before = {path: path.read_bytes() for path in ended}
    (tmp_path / "armed").touch()
    process = start(*again, cwd=tmp_path)
    killed = (tmp_path / "killed").exists
    wait_for(lambda: killed() and "running" in states(folder).values(), process)
    process.kill()
    process.communicate()
    wait_for(lambda: not session(process.pid))
    done = llmexp(*again, cwd=tmp_path)
    assert done.code == 1, done.err
    # The killed point was cut or had failed when the sweep was killed; either way it went on from
    # its checkpoint.
    assert [n for n, state in states(folder).items() if state != "finished"] == [raised]
    assert "boom" in done.out
    entry = points(folder)[1]
    assert (entry.exit_code, "RuntimeError('boom')" in entry.error) == (3, True)
    assert {path: path.read_bytes() for path in before} == before
    killed_point = next(n for n in found if n.startswith("3-"))
    for name, (accumulation, decay) in {left_out: (2, 0.3), killed_point: (4, 0.1)}.items():
        words = (f"batch.gradient_accumulation_steps={accumulation}",)
        whole = alone(tmp_path, f"alone{name}", *words, f"optimizer.weight_decay={decay}")
        same_run(folder / name, whole)


@pytest.fixture
def pair(runs, tmp_path) -> Path:
    """A finished sweep of two points of two steps in the folder s."""
    return runs.copy(tmp_path / "s", "-m", *PAIR).folder


def test_a_widened_grid_runs_only_what_is_new(tmp_path, pair):
    def widened(*words: str, says: str) -> Result:
        done = llmexp(*words, cwd=tmp_path)
        assert done.code == 0, done.err + done.out
        assert says in done.out
        assert written(pair)["min_effect"] == 0.5
        return done

    again = ["train", "-m", *TINY, *PAIR, "sweep.resume=s"]
    before = {p: p.read_bytes() for p in pair.glob("[01]-*/*.json*")}
    # Written in another way, with other names and intervals, and in another order: the same points.
    wider = ["clip.max_norm=1,2.0,0.50", "train.seed=1234", "name=other", "checkpoint.every=null"]
    second = widened(*again, *wider, says="resuming 3 runs: 2 finished, 1 new")
    compared = llmexp("compare", "s", cwd=tmp_path).out.splitlines()
    assert "\n".join(line.rstrip() for line in compared) in second.out
    assert "compare.html" in second.out
    assert (pair / "plotly.min.js").stat().st_size > 1e6  # what the page names
    there = points(pair)
    assert [(p.number, p.state, p.attempts) for p in there] == [
        (i, "finished", 1) for i in range(3)
    ]
    assert written(pair)["swept"] == ["clip.max_norm"]

    # Without a ledger points are known by the configs in their folders; attempts are not.
    (pair / "sweep.json").unlink()
    rebuilt = "sweep.json: is missing and is rebuilt from 3 runs"
    widened(*again, "clip.max_norm=0.5,1.0,4.0", says=rebuilt)
    told = ("number", "label", "folder", "overrides", "state", "started", "ended", "exit_code")
    after = points(pair)
    for old, new in zip(there, after, strict=False):
        assert [getattr(old, key) for key in told] == [getattr(new, key) for key in told]
    assert [p.attempts for p in after] == [0, 0, 0, 1]
    assert after[3].label == "max_norm_4.0"
    assert written(pair)["swept"] == ["clip.max_norm"]

    # Another value of a key that all points share makes no point; beside the old one it does.
    words = ["resume", "s", "clip.max_norm=0.5", "data.seed=0,3"]
    widened(*words, says="resuming 2 runs: 1 finished, 1 new")
    assert points(pair)[4].folder == "4-max_norm_0.5+seed_3"
    assert written(pair)["swept"] == ["clip.max_norm", "data.seed"]
    assert {p: p.read_bytes() for p in before} == before


def test_a_sweep_of_an_earlier_version_goes_on_and_is_lengthened(tmp_path, pair):
    """Its files know fewer knobs, and its points by other hashes: what had finished is not trained
    again. A warm-up that was a share of the old budget stays as it was under a longer one."""
    for path in pair.glob("*/config.yaml"):
        config = yaml.safe_load(path.read_text())
        del config["user"], config["train"]["twin"], config["tracker"]["entity"]
        del config["optimizer"]["rule"]
        path.write_text(yaml.safe_dump(config))
    tree = written(pair)
    del tree["min_effect"]
    for point in tree["points"]:
        point["identity"] = "0" * 24
    (pair / "sweep.json").write_text(json.dumps(tree))
    amend(pair / tree["points"][1]["folder"] / "status.json", state="preempted")
    rows = {path: path.read_bytes() for path in pair.glob("*/metrics.jsonl")}
    resumed = llmexp("resume", "s", cwd=tmp_path)
    assert resumed.code == 0, resumed.err + resumed.out
    assert {path: path.read_bytes() for path in rows} == rows
    assert [(p.state, p.attempts) for p in points(pair)] == [("finished", 1), ("finished", 2)]

    done = llmexp("resume", "s", "train.max_steps=5", cwd=tmp_path)
    assert done.code == 0, done.err
    assert "resuming 2 runs: 2 with a longer budget" in done.out
    assert [*states(pair).values()] == ["finished"] * 2
    warm = ["schedule=constant", "schedule.warmup_steps=1", "train.max_steps=5"]
    whole = train(tmp_path, "whole", *RUN, *warm, "clip.max_norm=0.5")
    longer = Result(0, "", "", pair / "0-max_norm_0.5")
    for key in ("train/loss", "lr"):
        assert [r[key] for r in longer.rows()] == [r[key] for r in whole.rows()]
    assert llmexp("resume", "s", cwd=tmp_path).code == 0
    assert len(longer.rows()) == 5


def test_points_that_cannot_run_or_are_another_one_again_are_left_out_and_named(tmp_path):
    """Known as composed, or only as solved; later commands leave them out again, also one that
    lengthens the others by more epochs."""
    grid = ["batch.real_batch_size=12", "batch.gradient_accumulation_steps=1,5",
            "batch.micro_batch_size=12,null", "clip.max_norm=1,-1",
            "train.max_steps=null", "train.max_epochs=0.1", "train.tail=drop",
            "schedule=constant"]  # fmt: skip
    command = ["train", "-m", *TINY, *RUN, *grid, "hydra.sweep.dir=s"]
    refused = llmexp(*command, cwd=tmp_path)
    assert (refused.code, (tmp_path / "s").exists()) == (2, False)
    found, steps = [], []
    longer = ["resume", "s", "train.max_epochs=0.2"]
    for arguments in ([*command, "sweep.on_infeasible=skip"], ["resume", "s"], longer):
        done = llmexp(*arguments, cwd=tmp_path)
        assert done.code == 0, done.err
        found.append(points(tmp_path / "s"))
        run = Result(0, "", "", tmp_path / "s" / found[-1][0].folder)
        steps.append(run.rows()[-1]["step"])
        assert steps[-1] == run.json("run.json")["max_steps"]
    assert steps[0] == steps[1] < steps[2]
    first, *others = found[0]
    assert (first.state, len(others)) == ("finished", 7)
    for p in others:
        reason = "batch.real_batch_size=12: "
        if "steps_1+micro_batch_size_null" in p.label:
            reason = "resolves to the same config as "
        if "max_norm_-1" in p.label:
            reason = "clip.max_norm=-1: "
        assert (p.state, p.error[: len(reason)]) == ("infeasible", reason), p
    assert found[1] == found[0]
    left_out = [[(p.folder, p.state, p.error) for p in there[1:]] for there in found]
    assert left_out[2] == left_out[0]
    assert {p.state for p in found[2][1:]} == {"infeasible"}


def test_a_retry_and_a_stop_on_failure(tmp_path):
    two = ["-m", *TINY, *RUN, "--allow", "own", "batch.gradient_accumulation_steps=1,2",
           "hooks=[own.faults.act]"]  # fmt: skip
    # One that failed, or left without a record of it, is started again at once; from the start, as
    # it had no checkpoint yet.
    twice = ["sweep.max_retries=2", "sweep.max_parallel=2", "hydra.sweep.dir=retry"]
    plan = "step_start-3:raise once; step_start-5:exit 0 once"
    retried = llmexp("train", *two, *twice, cwd=tmp_path, FAULT_PLAN=plan)
    assert retried.code == 0, retried.out
    assert sum(p.attempts for p in points(tmp_path / "retry")) == 4
    assert "failed: the process ended with exit code 0 before its last step" in retried.out
    stop = ["sweep.stop_on_failure=true", "sweep.max_parallel=1", "hydra.sweep.dir=stop"]
    stopped = llmexp("train", *two, *stop, cwd=tmp_path, FAULT_PLAN="step_start-3:raise")
    assert stopped.code == 1
    assert [p.state for p in points(tmp_path / "stop")] == ["failed", "queued"]


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
    halving = ["sweep.halving=0.25", "sweep.halving_keep=0.2", "sweep.max_parallel=2"]
    rates = ["train.seed=1", "optimizer.lr=1e-5,1e-2,1e-3", "hydra.sweep.dir=s"]
    done = llmexp("train", "-m", *TINY, *RUN, *rates, *halving, cwd=tmp_path)
    assert done.code == 0, done.err + done.out
    entries = points(tmp_path / "s")
    rows = [exact(Result(0, "", "", tmp_path / "s" / p.folder)) for p in entries]
    ends = [len(found) for found in rows]
    assert ends == [30 if p.rung is None else 8 for p in entries]
    assert sorted(ends) == [8, 8, 30]
    best = min(range(3), key=lambda i: rows[i][7]["val/loss"])
    assert (ends[best], entries[best].state) == (30, "finished")
    reference = alone(tmp_path, "alone", f"optimizer.lr={(1e-5, 1e-2, 1e-3)[best]}")
    for key in ("weight_norm", "val/loss", "val/ppl", "val/bits_per_byte", "off_interval"):
        rows[best][7].pop(key, None)
    assert rows[best] == exact(reference)
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
    current = current_sweep(tmp_path, hang_timeout_s=0.5)
    run_locally(current, [new_point(current, "0-a")])
    (entry,) = current.ledger.points
    assert (entry.state, "sweep.hang_timeout_s" in entry.error) == ("failed", True)
    assert child.ended(int((tmp_path / "child").read_text()))


def whole_ledger() -> dict:
    entry = {"number": 0, "label": "a", "folder": "0-a", "identity": "ab", "overrides": ["x=1"],
             "attempts": 1, "rung": 0.5, "refused": None}  # fmt: skip
    return {"format": 1, "name": "n", "group": "g", "launcher": "local", "arguments": ["-m"],
            "swept": ["x"], "created": 1.0, "state": "running", "min_effect": 0.5, "updated": 2.0,
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
        found.save()
    except ConfigError as error:
        refusal = str(error)
    if found is None:
        assert "sweep.json" in refusal
        assert key in refusal or "is not a number of JSON" in refusal
    else:
        assert ledgers.read_ledger(folder) == found
        assert all((folder / p.folder).resolve().is_relative_to(folder) for p in found.points)


def test_a_change_of_a_point_among_1000_is_a_line(tmp_path):
    """Also after a kill at any byte; what was written by another process is never added to."""
    entries = [
        ledgers.LedgerEntry(n, f"seed_{n}", f"{n}-seed_{n}", "ab" * 12, [f"train.seed={n}"] * 8)
        for n in range(1000)
    ]
    ledger = ledgers.Ledger(tmp_path, "n", "g", "local", ["-m"], ["train.seed"], points=entries)
    ledger.save()
    whole = (tmp_path / "sweep.json").read_bytes()
    for number in range(200):
        ledger.update(entries[number], attempts=1)
        ledger.update(entries[number], attempts=1)  # which is no change
    ledger.update(entries[7], attempts=3)
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


@pytest.mark.fresh
@pytest.mark.slow
def test_points_as_tasks_of_ray(tmp_path):
    """A real Ray on this machine, stopped by a signal for which Ray has a handler of its own. Then
    one point fails; one loses its task, which Ray repeats, and goes on with the run."""
    pytest.importorskip("ray")
    hooks = ["--allow", "own", "hooks=[own.points.grid,own.points.rest,own.points.lose_task]"]
    grid = ["batch.gradient_accumulation_steps=2", "optimizer.weight_decay=0.2,0.3"]
    ray = ["hydra/launcher=ray", "+hydra.launcher.init.num_cpus=2"]
    command = ["-m", *TINY, *RUN, *hooks, *grid, *ray, "hydra.sweep.dir=s", "train.seed=1"]
    (tmp_path / "go").touch()
    again = ["resume", "s", "--allow", "own", ray[1]]
    process = start("train", *command, cwd=tmp_path)
    wait_for(lambda: all((tmp_path / f"rests {w}").exists() for w in (0.2, 0.3)), process)
    process.terminate()
    out, err = process.communicate(timeout=HANG_S)
    assert (process.returncode, "Traceback" in err) == (75, False), err
    assert {*again} <= {*out.splitlines()[-1].split()}
    assert set(states(tmp_path / "s").values()) == {"preempted"}
    done = llmexp(*again, cwd=tmp_path)
    assert done.code == 1, done.err
    bad, good = points(tmp_path / "s")
    assert (bad.state, good.state, "boom" in bad.error) == ("failed", "finished", True)
    assert bad.forked
    assert good.forked
    assert (tmp_path / "lost").exists()
    assert "resumed from step_" in (tmp_path / "s" / good.folder / "train.log").read_text()
    whole = alone(tmp_path, "alone", grid[0], "optimizer.weight_decay=0.3")
    same_run(tmp_path / "s" / good.folder, whole)
