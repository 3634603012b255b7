"""wandb runs for real here, each time in a process of its own, as in a run."""

import contextlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmexp.tracker.fields import (
    MirrorPosition,
    read_position,
    upload_is_pending,
    write_position,
)
from tests.conftest import HANG_S, PATHS, ROOT, environment, free_port
from tests.tracker.fake_wandb import FakeWandb
from tests.tracker.made import KEY, TRACKER, Outcome, bare, make_rows, run_worker, write_rows


def records(run_dir: Path) -> list[dict[str, Any]]:
    """All records of all wandb logs under `run_dir`, in the order in which they were started."""
    found = []
    for path in sorted(run_dir.glob("wandb/offline-run-*/*.wandb")):
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)]
        env = environment(PYTHONPATH=PATHS)
        out = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
        found += [json.loads(line) for line in out.splitlines()]
    return found


def of_kind(kind: str, log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record[kind] for record in log if record["type"] == kind]


def history(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return bare([record["item"] for record in of_kind("history", log)])


def check_cost(outcome: Outcome, finish_s: float = HANG_S) -> None:
    """It has cost training no row and no error, and no more seconds than it may."""
    assert (outcome.code, outcome.stderr) == (0, "")
    assert outcome.costs["open"] < outcome.slow
    assert outcome.costs["finish"] < finish_s + outcome.slow
    assert outcome.exit_s < 8 * outcome.slow  # an exit hook of wandb would wait for 10 to 20 s


def test_an_offline_run_has_every_row_and_value_and_needs_no_server(tmp_path):
    run_dir = tmp_path / "a run, 实验"
    rows = make_rows(1, 200)
    closed = f"http://127.0.0.1:{free_port()}"
    outcome = run_worker(run_dir, rows, closed, env={"WANDB_MODE": "offline"})
    check_cost(outcome)
    assert outcome.said == []
    log = records(run_dir)
    assert history(log) == rows  # every float bit for bit: JSON keeps doubles
    (run,) = of_kind("run", log)
    named = {"run_id": "run-1", "project": "a-project", "display_name": "lr=3e-4"}
    named |= {"run_group": "a-sweep", "tags": TRACKER["tags"], "notes": "some notes"}
    assert named.items() <= run.items()
    assert run["config"]["update"]["optimizer"] == {"lr": 3e-4}
    metrics = of_kind("metric", log)
    assert "tokens_seen" in {metric.get("name") for metric in metrics}
    globs = {(metric.get("glob_name"), metric.get("step_metric")) for metric in metrics}
    assert ("*", "tokens_seen") in globs
    summary: dict[str, Any] = {}
    for record in of_kind("summary", log):
        summary |= record.get("update", {})
    assert summary["final/loss"] == 1.25
    assert summary["train/loss"] == rows[-1]["train/loss"]
    # wandb's files are in the run folder and nowhere else, and none of them has the key or the
    # command line.
    assert {path.name for path in run_dir.iterdir()} == {"wandb", "tracker.json", "metrics.jsonl"}
    assert {path.name for path in tmp_path.iterdir()} <= {run_dir.name, "home"}
    for path in tmp_path.rglob("*"):
        data = path.read_bytes() if path.is_file() else b""
        assert not [text for text in (KEY.encode(), b"mirror.finish") if text in data], path
    assert read_position(run_dir) == MirrorPosition("run-1", 200 * 524_288, 200)


def test_resume_sends_no_row_twice(tmp_path):
    run_dir, rows = tmp_path / "run", make_rows(1, 25)
    # Killed after step 20; resumed from a checkpoint at step 15.
    assert run_worker(run_dir, rows[:20], plan={"die_at": 20}).code == -9
    assert run_worker(run_dir, rows[15:]).said == []
    log = records(run_dir)
    assert history(log) == rows
    assert [run["run_id"] for run in of_kind("run", log)] == ["run-1"] * 2
    # wandb's own counter goes on too, or a sync of the parts would lay them over each other.
    steps = [int(record["item"]["_step"]) for record in of_kind("history", log)]
    assert steps == [row["step"] for row in rows]


@pytest.mark.parametrize(("code", "before"), [(75, 0), (0, 30)])
def test_online_rows_arrive(tmp_path, code: int, before: int):
    """Of a preempted run, which is not called failed; and of a resumed one. Handed over is not
    arrived: tracker.json says step 30, and the server has no row."""
    rows, run_dir = make_rows(1, 40), tmp_path / "run"
    run_dir.mkdir()
    write_rows(run_dir / "metrics.jsonl", rows[:before])
    if before:
        write_position(run_dir, MirrorPosition("run-1", rows[29]["tokens_seen"], before))
    with FakeWandb() as server:
        plan = {"exit_code": code}
        outcome = run_worker(run_dir, rows[max(before - 5, 0) :], server.url, plan=plan)
    check_cost(outcome)
    assert outcome.said == []
    run = server.run
    assert (bare(run.rows), run.lines_sent) == (rows, 40)
    assert run.summary["final/loss"] == 1.25
    assert (run.variables["jobType"], run.variables["groupName"]) == ("train", "a-sweep")
    assert (run.exit_code, run.preempting) == (code, code == 75)
    url = f"{server.url}/someone/a-project/runs/run-1"
    mark = {"project": "a-project", "step": 40, "exit_code": code, "url": url}
    there = MirrorPosition("run-1", rows[-1]["tokens_seen"], 40, mark, "someone")
    assert read_position(run_dir) == there
    assert not list((run_dir / "wandb").glob("offline-*"))


def bad_server(kind: Any) -> contextlib.AbstractContextManager[Any]:
    closed = SimpleNamespace(url=f"http://127.0.0.1:{free_port()}")
    return contextlib.nullcontext(closed) if kind == "closed port" else FakeWandb(kind)


@pytest.mark.parametrize(
    ("kind", "last", "start_s", "finish_s", "says"),
    [
        # about 3 s here on an idle machine, 11 s with the default start
        ("closed port", 100, 1, 15, "offline"),
        ("hangs", 100, 1, 15, "offline"),
        ("rate limited", 100, 1, 15, "offline"),
        # wandb takes longer to start than there is time at the end: it was never given a row
        ("hangs", 5, 60, 1, "not done after 1 s"),
        ("hangs after start", 20, 20, 8, ""),
        ("dies in the middle", 400, 20, 8, ""),
        # wandb's finish returns as if all were well when the server has refused the rows for good
        ("refuses rows", 20, 20, 60, "0 of 19 rows"),
    ],
)
def test_a_bad_server_costs_seconds_and_no_row(
    tmp_path, kind: str, last: int, start_s: int, finish_s: int, says: str
):
    run_dir, rows = tmp_path / "run", make_rows(2, last)
    run_dir.mkdir()
    before = MirrorPosition("run-1", 3, 1, {"project": "a-project", "step": 1})
    write_position(run_dir, before)
    limits = {"start_timeout_s": start_s, "finish_timeout_s": finish_s}
    with bad_server(kind) as server:
        plan = {"pause": 0.0 if says == "offline" else 0.01}
        outcome = run_worker(run_dir, rows, server.url, plan=plan, **limits)
    check_cost(outcome, finish_s)
    (said,) = outcome.said
    assert "\n" not in said
    # on a busy machine wandb alone may need longer to start
    if says == "offline" and outcome.costs["finish"] <= finish_s:
        assert server.url in said
        assert "offline" in said
        assert history(records(run_dir)) == rows
    else:
        assert says == "offline" or says in said
        assert said.endswith(f"llmexp sync {run_dir}")
    assert upload_is_pending(run_dir)
    if says.startswith("not done"):
        assert read_position(run_dir) == replace(before, uploaded=None)
    for path in run_dir.rglob("*"):
        assert not path.is_file() or KEY.encode() not in path.read_bytes()


def test_without_a_login_it_is_offline_and_never_asks(tmp_path):
    rows = make_rows(1, 3)
    outcome = run_worker(tmp_path / "run", rows, mode="online", terminal=True)
    check_cost(outcome)
    (said,) = outcome.said
    assert "WANDB_API_KEY" in said
    assert history(records(tmp_path / "run")) == rows


@pytest.mark.fresh  # forks have imported wandb
@pytest.mark.parametrize(
    ("place", "text", "expected"),
    [
        ("path/wandb.py", "raise RuntimeError('broken\\ninstallation')", "broken installation"),
        ("path/wandb.py", "import time; time.sleep(60)", "not done after 1 s"),
        ("run/tracker.json/file", "", "Is a directory"),
        ("run/wandb", "", "Not a directory"),
    ],
    ids=["broken", "hangs", "no position", "unwritable"],
)
def test_a_bad_wandb_or_disk_is_one_line(tmp_path, place: str, text: str, expected: str):
    (tmp_path / place).parent.mkdir(parents=True)
    (tmp_path / place).write_text(text)
    limit_s = 1 if text else 60
    env = {"PYTHONPATH": f"{tmp_path / 'path'}:{ROOT}"}
    outcome = run_worker(tmp_path / "run", make_rows(1, 50), env=env, finish_timeout_s=limit_s)
    check_cost(outcome, limit_s)
    (said,) = outcome.said
    assert expected in said


def test_training_goes_on_when_wandb_core_dies(tmp_path):
    rows = make_rows(1, 60)
    outcome = run_worker(tmp_path / "run", rows, plan={"kill_core_at": 40, "pause": 0.01})
    check_cost(outcome, 5 * outcome.slow)
    assert len(outcome.said) == 1
    # What it had written before its end is on disk.
    assert history(records(tmp_path / "run")) == rows[:40]
