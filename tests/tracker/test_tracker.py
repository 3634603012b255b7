"""wandb runs for real here, each time in a process of its own, as in a run."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from llmexp.runs.rows import Rows
from llmexp.tracker.fields import (
    MirrorPosition,
    read_position,
    shorten,
    upload_is_pending,
    write_position,
)
from tests import forks
from tests.conftest import HANG_S, PATHS, ROOT, environment
from tests.tracker.fake_wandb import Behaviour, FakeWandb

FAKE_KEY = "0123456789abcdef0123456789abcdef01234567"

TRACKER: dict[str, Any] = {
    "kind": "wandb",
    "project": "a-project",
    "entity": None,
    "name": "lr=3e-4",
    "group": "a-sweep",
    "tags": ["gpt", shorten("t" * 80, 64)],
    "notes": "some notes",
    "mode": "auto",
    "start_timeout_s": 1,
    "finish_timeout_s": 60,  # of a busy machine; where a server is at fault a test has its own
}


@dataclass(frozen=True)
class Outcome:
    said: list[str]
    costs: dict[str, Any]  # empty if the process died
    code: int
    stderr: str
    exit_s: float  # from the end of finish to the end of the process
    slow: float  # how many processes waited for each core, at least one


def make_rows(first: int, last: int) -> list[dict[str, Any]]:
    generator = random.Random(0)
    rows = [
        {
            "step": step,
            "tokens_seen": step * 524_288,
            "epoch": step / 7,
            "train/loss": generator.gauss(3, 1),
            "lr": generator.random() * 10.0 ** -generator.randrange(3, 12),
            "skipped": step % 3 == 0,
            "amp": 1,
        }
        | ({"val/loss": generator.expovariate(1)} if step % 5 == 0 else {})
        for step in range(1, last + 1)
    ]
    return rows[first - 1 :]


def run_worker(
    run_dir: Path,
    rows: list[dict[str, Any]],
    server: str | None = None,
    *,
    env: dict[str, str] | None = None,
    pause: float = 0.0,
    kill_core_at: int | None = None,
    die_at: int | None = None,
    terminal: bool = False,
    exit_code: int = 0,
    **tracker: Any,
) -> Outcome:
    """Write `rows` as a run would, after those that its folder has up to there; `server`: the URL
    of one, to which there is a login."""
    run_dir.mkdir(exist_ok=True)
    spec = {
        "run_dir": str(run_dir),
        "rows": rows,
        "tracker": TRACKER | tracker,
        "config": {"optimizer": {"lr": 3e-4}},
        "pause": pause,
        "kill_core_at": kill_core_at,
        "die_at": die_at,
        "exit_code": exit_code,
    }
    # No login and no settings of whoever runs this test.
    home = run_dir.parent / "home"
    home.mkdir(exist_ok=True)
    clean = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_") and k != "NETRC"}
    clean |= {"HOME": str(home), "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"}
    if server:
        clean |= {"WANDB_BASE_URL": server, "WANDB_API_KEY": FAKE_KEY}
    master, slave = pty.openpty() if terminal else (None, None)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.tracker.worker", json.dumps(spec)],
        stdin=slave if terminal else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=forks.offered(clean) | (env or {}),
        cwd=run_dir.parent,
    )
    out, err = process.communicate(timeout=HANG_S)
    ended = time.time()
    for end in (master, slave):
        if end is not None:
            os.close(end)
    said, costs = [], {}
    for line in map(json.loads, out.splitlines()):  # anything else on stdout would be an error here
        if "said" in line:
            said.append(line["said"])
        else:
            costs = line
    slow = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    return Outcome(said, costs, process.returncode, err, ended - costs.get("at", ended), slow)


def records(run_dir: Path) -> list[dict[str, Any]]:
    """All records of all wandb logs under `run_dir`, the logs in the order in which they were
    started."""
    found = []
    for path in sorted(run_dir.glob("wandb/offline-run-*/*.wandb")):
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)]
        env = environment(PYTHONPATH=PATHS)
        out = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
        found += [json.loads(line) for line in out.splitlines()]
    return found


def history(run_dir: Path, log: list[dict[str, Any]] | None = None) -> list[dict[str, Any]]:
    """The rows in the wandb logs, without what wandb adds to them."""
    log = records(run_dir) if log is None else log
    return bare([record["history"]["item"] for record in log if record["type"] == "history"])


def bare(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in item.items() if not k.startswith("_")} for item in items]


def assert_cost_nothing(outcome: Outcome) -> None:
    assert outcome.code == 0, outcome.stderr
    assert outcome.stderr == ""
    assert outcome.costs["open"] < outcome.slow


def test_an_offline_run_has_every_row_and_value_and_needs_no_server(tmp_path: Path) -> None:
    run_dir = tmp_path / "a run, 实验"
    rows = make_rows(1, 200)
    with dead_server("closed port") as url:
        outcome = run_worker(run_dir, rows, url, env={"WANDB_MODE": "offline"})
    assert_cost_nothing(outcome)
    assert outcome.said == []
    assert outcome.exit_s < 8 * outcome.slow
    log = records(run_dir)
    assert history(run_dir, log) == rows  # every float bit for bit: JSON keeps doubles
    (run,) = [record["run"] for record in log if record["type"] == "run"]
    assert run["run_id"] == "run-1"
    assert run["project"] == "a-project"
    assert run["display_name"] == "lr=3e-4"
    assert run["run_group"] == "a-sweep"
    assert run["tags"] == TRACKER["tags"]
    assert run["notes"] == "some notes"
    assert run["config"]["update"]["optimizer"] == {"lr": 3e-4}
    metrics = [record["metric"] for record in log if record["type"] == "metric"]
    assert "tokens_seen" in {metric.get("name") for metric in metrics}
    globs = {(metric.get("glob_name"), metric.get("step_metric")) for metric in metrics}
    assert ("*", "tokens_seen") in globs
    summary: dict[str, Any] = {}
    for record in log:
        if record["type"] == "summary":
            summary |= record["summary"].get("update", {})
    assert summary["final/loss"] == 1.25
    assert summary["train/loss"] == rows[-1]["train/loss"]

    # wandb's files are in the run folder and nowhere else, and none of them has the key or the
    # command line.
    assert {path.name for path in run_dir.iterdir()} == {"wandb", "tracker.json", "metrics.jsonl"}
    assert {path.name for path in tmp_path.iterdir()} <= {run_dir.name, "home"}
    for path in tmp_path.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert FAKE_KEY.encode() not in data, path
            assert b"mirror.finish" not in data, path
    assert read_position(run_dir) == MirrorPosition("run-1", 200 * 524_288, 200)


def test_resume_sends_no_row_twice(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    rows = make_rows(1, 25)
    # Killed after step 20; resumed from a checkpoint at step 15.
    first = run_worker(run_dir, rows[:20] + rows[:1], die_at=20)
    assert first.code == -9
    second = run_worker(run_dir, rows[15:])
    assert second.said == []
    log = records(run_dir)
    assert history(run_dir, log) == rows
    assert [record["run"]["run_id"] for record in log if record["type"] == "run"] == ["run-1"] * 2
    # wandb's own counter goes on too, or a sync of the parts would lay them over each other.
    items = [record["history"]["item"] for record in log if record["type"] == "history"]
    assert [int(item["_step"]) for item in items] == [row["step"] for row in rows]


def test_online_rows_arrive(tmp_path: Path) -> None:
    rows = make_rows(1, 50)
    with FakeWandb() as server:
        outcome = run_worker(tmp_path / "run", rows, server.url, start_timeout_s=20)
    assert_cost_nothing(outcome)
    assert outcome.said == []
    assert bare(server.run.rows) == rows
    assert server.run.summary["final/loss"] == 1.25
    assert server.run.variables["jobType"] == "train"
    assert server.run.variables["groupName"] == "a-sweep"
    assert server.run.exit_code == 0
    position = read_position(tmp_path / "run")
    url = f"{server.url}/someone/a-project/runs/run-1"
    mark = {"project": "a-project", "step": 50, "exit_code": 0, "url": url}
    assert position == MirrorPosition("run-1", rows[-1]["tokens_seen"], 50, mark, "someone")
    assert not list((tmp_path / "run" / "wandb").glob("offline-*"))


DEAD_SERVERS = ("closed port", "silent", "rate limited")


@contextlib.contextmanager
def dead_server(kind: str) -> Iterator[str]:
    if kind == "rate limited":
        with FakeWandb("rate limited") as server:
            yield server.url
        return
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        if kind == "closed port":
            listener.close()
            yield url
            return
        listener.listen(64)
        taken: list[socket.socket] = []

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    taken.append(listener.accept()[0])

        threading.Thread(target=accept, daemon=True).start()
        yield url
        for connection in taken:
            connection.close()


@dataclass(frozen=True)
class DeadServerRun:
    url: str
    run_dir: Path
    outcome: Outcome
    history: list[dict[str, Any]]


@pytest.fixture(scope="module")
def dead_server_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, DeadServerRun]:
    """All kinds at once: most of their time is waiting."""

    def run(kind: str, where: Path) -> DeadServerRun:
        run_dir = where / "run"
        with dead_server(kind) as url:
            outcome = run_worker(run_dir, make_rows(1, 100), url, finish_timeout_s=15)
        return DeadServerRun(url, run_dir, outcome, history(run_dir))

    folders = [
        tmp_path_factory.mktemp("dead") for _ in DEAD_SERVERS
    ]  # in threads it would race with itself
    with ThreadPoolExecutor() as pool:
        return dict(zip(DEAD_SERVERS, pool.map(run, DEAD_SERVERS, folders), strict=True))


@pytest.mark.parametrize("kind", DEAD_SERVERS)
def test_a_dead_server_costs_seconds_and_no_row(
    dead_server_runs: dict[str, DeadServerRun], kind: str
) -> None:
    run = dead_server_runs[kind]
    assert_cost_nothing(run.outcome)
    (said,) = run.outcome.said
    assert "\n" not in said
    # about 3 s here on an idle machine, 11 s with the default start
    assert run.outcome.costs["finish"] < 15 + run.outcome.slow / 2
    assert (
        run.outcome.exit_s < 8 * run.outcome.slow
    )  # an exit hook of wandb would wait for 10 to 20 s
    if run.outcome.costs["finish"] > 15:  # on a busy machine wandb alone may need longer to start
        assert said.endswith(f"llmexp sync {run.run_dir}")
        assert upload_is_pending(run.run_dir)
    else:
        assert run.url in said
        assert "offline" in said
        assert run.history == make_rows(1, 100)
    for path in run.run_dir.rglob("*"):
        assert not path.is_file() or FAKE_KEY.encode() not in path.read_bytes()


@pytest.mark.parametrize(
    "before", [None, MirrorPosition("run-1", 3, 1, {"project": "a-project", "step": 1})]
)
def test_what_wandb_was_never_given_is_owed_too(
    tmp_path: Path, before: MirrorPosition | None
) -> None:
    """wandb takes longer to start than there is time at the end, in a new run and in one that goes
    on."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    if before:
        write_position(run_dir, before)
    with dead_server("silent") as url:
        late = {"start_timeout_s": 60, "finish_timeout_s": 1}
        outcome = run_worker(run_dir, make_rows(2, 5), url, **late)
    (said,) = outcome.said
    assert "not done after 1 s" in said
    assert said.endswith(f"llmexp sync {run_dir}")
    assert read_position(run_dir) == (
        replace(before, uploaded=None) if before else MirrorPosition("run-1")
    )
    assert upload_is_pending(run_dir)


@pytest.mark.parametrize(
    ("behaviour", "rows", "options", "says"),
    [
        ("hangs after start", 20, {"finish_timeout_s": 8}, ""),
        ("dies in the middle", 400, {"finish_timeout_s": 8, "pause": 0.01}, ""),
        # wandb's finish returns as if all were well when the server has refused the rows for good
        ("refuses rows", 20, {}, "0 of 20 rows"),
    ],
)
def test_a_server_that_fails_later_costs_the_finish_timeout(
    tmp_path: Path, behaviour: Behaviour, rows: int, options: dict[str, Any], says: str
) -> None:
    run_dir, options = tmp_path / "run", {"start_timeout_s": 20, **options}
    with FakeWandb(behaviour) as server:
        outcome = run_worker(run_dir, make_rows(1, rows), server.url, **options)
    assert_cost_nothing(outcome)
    assert outcome.costs["finish"] < options.get("finish_timeout_s", 60) + outcome.slow
    assert outcome.exit_s < 8 * outcome.slow
    (said,) = outcome.said
    assert says in said
    assert said.endswith(f"llmexp sync {run_dir}")
    assert upload_is_pending(run_dir)


def test_without_a_login_it_is_offline_and_never_asks(tmp_path: Path) -> None:
    rows = make_rows(1, 3)
    outcome = run_worker(tmp_path / "run", rows, mode="online", terminal=True)
    assert_cost_nothing(outcome)
    (said,) = outcome.said
    assert "WANDB_API_KEY" in said
    assert history(tmp_path / "run") == rows


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("raise ImportError('no wandb here')", "no wandb here"),
        ("raise RuntimeError('broken\\ninstallation')", "broken installation"),
        ("import time; time.sleep(60)", "not done after 1 s"),
    ],
    ids=["missing", "broken", "hangs"],
)
def test_a_bad_wandb_is_one_line(tmp_path: Path, module: str, expected: str) -> None:
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "wandb.py").write_text(module)
    env = {"PYTHONPATH": f"{tmp_path / 'path'}:{ROOT}"}
    outcome = run_worker(tmp_path / "run", make_rows(1, 50), env=env, finish_timeout_s=1)
    assert_cost_nothing(outcome)
    assert len(outcome.said) == 1
    assert expected in outcome.said[0]
    assert outcome.costs["finish"] < 1 + outcome.slow
    assert outcome.exit_s < 8 * outcome.slow


def test_an_unwritable_folder_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "wandb").touch()
    outcome = run_worker(tmp_path / "run", make_rows(1, 5))
    assert_cost_nothing(outcome)
    assert len(outcome.said) == 1
    assert outcome.exit_s < 8 * outcome.slow


FULL = """
import builtins

opened = builtins.open


def full(file, mode="r", *args, **more):
    if "tracker.json" in str(file) and mode == "xb":
        return opened("/dev/full", "wb", *args, **more)
    return opened(file, mode, *args, **more)


builtins.open = full
"""


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "sitecustomize.py").write_text(FULL)
    outcome = run_worker(
        tmp_path / "run", make_rows(1, 5), env={"PYTHONPATH": f"{tmp_path / 'path'}:{ROOT}"}
    )
    assert_cost_nothing(outcome)
    assert len(outcome.said) == 1
    assert "No space left" in outcome.said[0]
    assert not (tmp_path / "run" / "tracker.json").exists()


def test_training_goes_on_when_wandb_core_dies(tmp_path: Path) -> None:
    rows = make_rows(1, 60)
    outcome = run_worker(tmp_path / "run", rows, kill_core_at=40, pause=0.01)
    assert_cost_nothing(outcome)
    assert len(outcome.said) == 1
    assert outcome.costs["finish"] < 5 * outcome.slow
    assert outcome.exit_s < 8 * outcome.slow
    # What it had written before its end is on disk.
    assert history(tmp_path / "run") == rows[:40]


def test_what_the_server_lost_is_sent_by_the_resumed_run(tmp_path: Path) -> None:
    """Handed over is not arrived: tracker.json says step 30, the server has no row."""
    run_dir, rows = tmp_path / "run", make_rows(1, 40)
    run_dir.mkdir()
    before = Rows(run_dir / "metrics.jsonl", 0).open()
    for row in rows[:30]:
        before.add(row)
    before.close()
    write_position(run_dir, MirrorPosition("run-1", rows[29]["tokens_seen"], 30))
    with FakeWandb() as server:
        resumed = run_worker(run_dir, rows[25:], server.url, start_timeout_s=20)
    assert resumed.said == []
    assert bare(server.run.rows) == rows
    assert server.run.lines_sent == 40
    assert not upload_is_pending(run_dir)


def test_a_preempted_run_is_not_called_failed(tmp_path: Path) -> None:
    with FakeWandb() as server:
        run_worker(tmp_path / "run", make_rows(1, 3), server.url, start_timeout_s=20, exit_code=75)
    assert server.run.exit_code == 75
    assert server.run.preempting
