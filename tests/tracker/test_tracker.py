"""wandb runs for real here, each time in a process of its own, as in a run."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import random
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from llmexp.tracker import NoTracker, open_tracker
from llmexp.tracker.calls import has_login
from llmexp.tracker.local import (
    Position,
    cut,
    cut_tags,
    given_run_id,
    next_id,
    read_position,
    run_fields,
    safe_id,
    upload_is_pending,
    with_environment,
    write_position,
)
from tests.tracker.fake_wandb import FakeWandb

ROOT = Path(__file__).resolve().parents[2]
FAKE_KEY = "0123456789abcdef0123456789abcdef01234567"

# What a worker does with its tracker. Prints JSON lines: what was said, and what things cost.
WORKER = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
from llmexp.tracker import open_tracker

spec = json.loads(sys.argv[1])
run_dir = Path(spec["run_dir"])
say = lambda text: print(json.dumps({"said": text}), flush=True)
start = time.perf_counter()
tracker = open_tracker("wandb", run_dir=run_dir, say=say, **spec["options"])
opened = time.perf_counter() - start
slowest = 0.0
for number, row in enumerate(spec["rows"]):
    if number in (spec["kill_core_at"], spec["die_at"]):
        position = run_dir / "tracker.json"
        while not (position.exists() and json.loads(position.read_text())["step"] == number):
            time.sleep(0.05)
        # And wandb-core has written what it got.
        newest = f'{spec["rows"][number - 1]["tokens_seen"]}'.encode()
        until = time.monotonic() + 20
        while not any(newest in log.read_bytes() for log in run_dir.glob("wandb/offline-run-*/*.wandb")):
            assert time.monotonic() < until
            time.sleep(0.05)
        command = ["pgrep", "-P", str(os.getpid()), "wandb-core"]
        cores = subprocess.run(command, capture_output=True, text=True).stdout.split()
        assert len(cores) == 1, cores
        os.kill(os.getpid() if number == spec["die_at"] else int(cores[0]), signal.SIGKILL)
    start = time.perf_counter()
    tracker.log(row)
    slowest = max(slowest, time.perf_counter() - start)
    time.sleep(spec["pause"])
start = time.perf_counter()
tracker.finish({"final/loss": 1.25}, spec["exit_code"])
finish = time.perf_counter() - start
print(json.dumps({"open": opened, "log": slowest, "finish": finish, "at": time.time(),
                  "where": tracker.url_or_path}), flush=True)
"""  # noqa: E501


@dataclass(frozen=True)
class Outcome:
    said: list[str]
    costs: dict[str, Any]  # empty if the process died
    code: int
    stderr: str
    exit_s: float  # from the end of finish to the end of the process


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
    *,
    env: dict[str, str] | None = None,
    pause: float = 0.0,
    kill_core_at: int | None = None,
    die_at: int | None = None,
    terminal: bool = False,
    exit_code: int = 0,
    **options: Any,
) -> Outcome:
    run_dir.mkdir(exist_ok=True)
    defaults: dict[str, Any] = {
        "project": "a-project",
        "name": "lr=3e-4",
        "group": "a-sweep",
        "tags": ["gpt", "t" * 80],
        "notes": "some notes",
        "config": {"optimizer": {"lr": 3e-4}},
        "run_id": "run-1",
        "mode": "auto",
        "start_timeout_s": 1,
    }
    spec = {
        "run_dir": str(run_dir),
        "rows": rows,
        "options": defaults | options,
        "pause": pause,
        "kill_core_at": kill_core_at,
        "die_at": die_at,
        "exit_code": exit_code,
    }
    # No login and no settings of whoever runs this test.
    home = run_dir.parent / "home"
    home.mkdir(exist_ok=True)
    clean = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_") and k != "NETRC"}
    clean |= {"HOME": str(home), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    master, slave = pty.openpty() if terminal else (None, None)
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, json.dumps(spec)],
        stdin=slave if terminal else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean | (env or {}),
        cwd=run_dir.parent,
    )
    out, err = process.communicate(timeout=60)
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
    return Outcome(said, costs, process.returncode, err, ended - costs.get("at", ended))


def records(run_dir: Path) -> list[dict[str, Any]]:
    """All records of all wandb logs under `run_dir`, the logs in the order in which they were
    started."""
    found = []
    for path in sorted(run_dir.glob("wandb/offline-run-*/*.wandb")):
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
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
    assert outcome.costs["open"] < 1
    assert (
        outcome.costs["log"] < 1
    )  # the slowest; one that waited for wandb to start would take longer


def test_offline_run_has_every_row_and_value(tmp_path: Path) -> None:
    run_dir = tmp_path / "a run, 实验"
    rows = make_rows(1, 200)
    outcome = run_worker(run_dir, rows, env={"WANDB_API_KEY": FAKE_KEY}, mode="offline")
    assert_cost_nothing(outcome)
    assert outcome.said == []
    assert outcome.exit_s < 8
    log = records(run_dir)
    assert history(run_dir, log) == rows  # every float bit for bit: JSON keeps doubles
    (run,) = [record["run"] for record in log if record["type"] == "run"]
    assert run["run_id"] == "run-1"
    assert run["project"] == "a-project"
    assert run["display_name"] == "lr=3e-4"
    assert run["run_group"] == "a-sweep"
    assert run["tags"] == ["gpt", cut("t" * 80, 64)]
    assert run["notes"] == "some notes"
    assert run["config"]["update"]["optimizer"] == {"lr": 3e-4}
    metrics = [record["metric"] for record in log if record["type"] == "metric"]
    assert {"tokens_seen"} <= {metric.get("name") for metric in metrics}
    assert {("*", "tokens_seen")} <= {
        (metric.get("glob_name"), metric.get("step_metric")) for metric in metrics
    }
    summary: dict[str, Any] = {}
    for record in log:
        if record["type"] == "summary":
            summary |= record["summary"].get("update", {})
    assert summary["final/loss"] == 1.25
    assert summary["train/loss"] == rows[-1]["train/loss"]

    # wandb's files are in the run folder and nowhere else, and none of them has the key or the
    # command line.
    assert outcome.costs["where"].startswith(str(run_dir / "wandb"))
    assert {path.name for path in run_dir.iterdir()} == {"wandb", "tracker.json"}
    assert {path.name for path in tmp_path.iterdir()} <= {run_dir.name, "home"}
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) >= 3
    for path in written:
        data = path.read_bytes()
        assert FAKE_KEY.encode() not in data, path
        assert b"open_tracker" not in data, path
    position = json.loads((run_dir / "tracker.json").read_text())
    assert position == {"run_id": "run-1", "tokens_seen": 200 * 524_288, "step": 200}


def test_resume_sends_no_row_twice(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    rows = make_rows(1, 30)
    # Killed after step 20; resumed from a checkpoint at step 15, then once more from the end.
    first = run_worker(run_dir, rows[:20] + rows[:1], die_at=20)
    assert first.code == -9
    second = run_worker(run_dir, rows[15:25])
    third = run_worker(run_dir, rows[20:])
    assert second.said == third.said == []
    log = records(run_dir)
    assert history(run_dir, log) == rows
    assert [record["run"]["run_id"] for record in log if record["type"] == "run"] == ["run-1"] * 3
    # wandb's own counter goes on too, or a sync of the parts would lay them over each other.
    steps = [
        int(record["history"]["item"]["_step"]) for record in log if record["type"] == "history"
    ]
    assert steps == [row["step"] for row in rows]


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "null", '{"run_id": "r"}', '{"run_id": "r", "tokens_seen": "x", "step": 1}',
        '{"run_id": "r", "tokens_seen": 1, "step": '
        'Infinity}', '{"run_id": 3, "tokens_seen": 1, "step": 1}',
        '{"run_id": "a/b", "tokens_seen": 1, "step": 1}', "\udcff",
    ],
)  # fmt: skip
def test_a_damaged_position_is_none(tmp_path: Path, text: str) -> None:
    assert read_position(tmp_path) is None
    (tmp_path / "tracker.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert read_position(tmp_path) is None
    assert not upload_is_pending(tmp_path)


def test_a_position_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_position(tmp_path, Position("r", 5, 2))
    assert read_position(tmp_path) == Position("r", 5, 2)
    assert upload_is_pending(tmp_path)
    write_position(tmp_path, Position("r", 5, 2, {"step": 2}))
    assert read_position(tmp_path) == Position("r", 5, 2, {"step": 2})
    assert not upload_is_pending(tmp_path)


def test_the_position_belongs_to_one_run_id(tmp_path: Path) -> None:
    write_position(tmp_path, Position("another", 10**9, 10**9))
    rows = make_rows(1, 3)
    run_worker(tmp_path, rows)
    assert history(tmp_path) == rows


def test_online_rows_arrive(tmp_path: Path) -> None:
    rows = make_rows(1, 50)
    with FakeWandb() as server:
        env = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": FAKE_KEY}
        outcome = run_worker(tmp_path / "run", rows, env=env, start_timeout_s=20)
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
    assert position == Position("run-1", rows[-1]["tokens_seen"], 50, mark, "someone")
    assert outcome.costs["where"] == f"{server.url}/someone/a-project/runs/run-1"
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
            env = {"WANDB_BASE_URL": url, "WANDB_API_KEY": FAKE_KEY}
            outcome = run_worker(run_dir, make_rows(1, 100), env=env)
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
    assert (
        run.outcome.costs["finish"] < 15.5
    )  # about 3 s here on an idle machine, 11 s with the default start
    assert run.outcome.exit_s < 8  # an exit hook of wandb would wait for 10 to 20 s
    if run.outcome.costs["finish"] > 15:  # on a busy machine wandb alone may need longer to start
        assert said.endswith(f"llmexp sync {run.run_dir}")
        assert upload_is_pending(run.run_dir)
    else:
        assert run.url in said
        assert "offline" in said
        assert run.history == make_rows(1, 100)
        assert run.outcome.costs["where"].startswith(str(run.run_dir))
    for path in run.run_dir.rglob("*"):
        assert not path.is_file() or FAKE_KEY.encode() not in path.read_bytes()


@pytest.mark.parametrize(
    "before", [None, Position("run-1", 3, 1, {"project": "a-project", "step": 1})]
)
def test_what_wandb_was_never_given_is_owed_too(tmp_path: Path, before: Position | None) -> None:
    """wandb takes longer to start than there is time at the end, in a new run and in one that goes
    on."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    if before:
        write_position(run_dir, before)
    with dead_server("silent") as url:
        env = {"WANDB_BASE_URL": url, "WANDB_API_KEY": FAKE_KEY}
        outcome = run_worker(
            run_dir, make_rows(2, 5), env=env, start_timeout_s=60, finish_timeout_s=1
        )
    (said,) = outcome.said
    assert "not done after 1 s" in said
    assert said.endswith(f"llmexp sync {run_dir}")
    assert read_position(run_dir) == (
        replace(before, uploaded=None) if before else Position("run-1")
    )
    assert upload_is_pending(run_dir)


def test_a_server_that_goes_silent_costs_the_finish_timeout(tmp_path: Path) -> None:
    with FakeWandb("hangs after start") as server:
        env = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": FAKE_KEY}
        outcome = run_worker(
            tmp_path / "run", make_rows(1, 20), env=env, start_timeout_s=20, finish_timeout_s=12
        )
    assert_cost_nothing(outcome)
    assert (
        outcome.costs["finish"] < 12 + 1
    )  # on a busy machine wandb alone needs some seconds to start
    assert outcome.exit_s < 8
    (said,) = outcome.said
    assert said.endswith(f"llmexp sync {tmp_path / 'run'}")
    assert upload_is_pending(tmp_path / "run")


@pytest.mark.parametrize(("mode", "lines"), [("auto", 0), ("online", 1)])
def test_without_a_login_it_is_offline_and_never_asks(
    tmp_path: Path, mode: str, lines: int
) -> None:
    rows = make_rows(1, 3)
    outcome = run_worker(tmp_path / "run", rows, mode=mode, terminal=True)
    assert_cost_nothing(outcome)
    assert len(outcome.said) == lines
    assert all("WANDB_API_KEY" in text for text in outcome.said)
    assert history(tmp_path / "run") == rows


def test_wandb_mode_disabled_leaves_nothing(tmp_path: Path) -> None:
    outcome = run_worker(
        tmp_path / "run", make_rows(1, 3), env={"WANDB_MODE": "disabled", "WANDB_API_KEY": FAKE_KEY}
    )
    assert_cost_nothing(outcome)
    assert outcome.said == []
    assert list((tmp_path / "run").iterdir()) == []


def test_wandb_mode_offline_needs_no_server(tmp_path: Path) -> None:
    with dead_server("closed port") as url:
        env = {"WANDB_MODE": "offline", "WANDB_BASE_URL": url, "WANDB_API_KEY": FAKE_KEY}
        outcome = run_worker(tmp_path / "run", make_rows(1, 3), env=env)
    assert_cost_nothing(outcome)
    assert outcome.said == []
    assert history(tmp_path / "run") == make_rows(1, 3)


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
    assert outcome.costs["finish"] < 2
    assert outcome.exit_s < 8


def test_an_unwritable_folder_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "wandb").touch()
    outcome = run_worker(tmp_path / "run", make_rows(1, 5))
    assert_cost_nothing(outcome)
    assert len(outcome.said) == 1
    assert outcome.exit_s < 8


FULL = """
import builtins

opened = builtins.open


def full(file, mode="r", *args, **more):
    if "tracker.json" in str(file) and mode == "x":
        return opened("/dev/full", "w", *args, **more)
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
    assert outcome.costs["finish"] < 5
    assert outcome.exit_s < 8
    # What it had written before its end is on disk.
    assert history(tmp_path / "run") == rows[:40]


def test_a_position_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    write_position(tmp_path, Position("r", 3, 1))
    assert read_position(tmp_path) == Position("r", 3, 1)
    (tmp_path / "tracker.json").write_text("[" * 200_000)
    assert read_position(tmp_path) is None
    assert not upload_is_pending(tmp_path)


def test_finish_twice_and_log_after_it(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "wandb").touch()
    tracker = open_tracker(
        "none",
        run_dir=tmp_path,
        project="p",
        name="n",
        group=None,
        tags=[],
        notes=None,
        config={},
        run_id="r",
        mode="auto",
        say=said.append,
    )
    assert isinstance(tracker, NoTracker)
    tracker.log({"step": 1})
    tracker.finish({}, 0)
    tracker.finish({}, 0)
    assert tracker.url_or_path is None
    assert said == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "mlflow"}, "tracker.kind='mlflow'.*wandb or none"),
        ({"mode": "on"}, "tracker.mode='on'.*offline"),
    ],
)
def test_unknown_kind_and_mode_are_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    arguments: dict[str, Any] = {
        "kind": "none",
        "run_dir": tmp_path,
        "project": "p",
        "name": "n",
        "group": None,
        "tags": [],
        "notes": None,
        "config": {},
        "run_id": "r",
        "mode": "auto",
        "say": print,
    }
    with pytest.raises(ValueError, match=message):
        open_tracker(**(arguments | change))


@pytest.mark.parametrize(
    ("env", "netrc", "settings_key", "expected"),
    [
        ({}, None, None, False),
        ({"WANDB_API_KEY": FAKE_KEY}, None, None, True),
        ({"WANDB_API_KEY": ""}, None, None, False),
        ({"WANDB_IDENTITY_TOKEN_FILE": "/token"}, None, None, True),
        ({}, None, FAKE_KEY, True),
        ({}, f"machine api.wandb.ai\n  login user\n  password {FAKE_KEY}\n", None, True),
        ({}, f"machine other.host\n  login user\n  password {FAKE_KEY}\n", None, False),
        ({}, "machine api.wandb.ai\n  login user\n", None, False),
        ({}, "not a netrc file", None, False),
    ],
)
def test_where_a_login_is_found(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    env: dict[str, str],
    netrc: str | None,
    settings_key: str | None,
    expected: bool,
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOME", str(tmp_path))
    if netrc is not None:
        (tmp_path / ".netrc").write_text(netrc)
    settings = SimpleNamespace(base_url="https://api.wandb.ai", api_key=settings_key)
    assert has_login(settings) is expected


@given(st.text(max_size=200), st.text(max_size=200))
def test_run_ids_are_safe_and_stay_distinct(a: str, b: str) -> None:
    safe_a, safe_b = safe_id(a), safe_id(b)
    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", safe_a)
    assert safe_id(safe_a) == safe_a
    assert (safe_a == safe_b) == (a == b) or safe_a == b or safe_b == a


def test_ordinary_run_ids_are_kept() -> None:
    assert safe_id("llmexp-0f3a") == "llmexp-0f3a"
    assert safe_id("A/B") != safe_id("a-b")


def test_importing_costs_no_heavy_library() -> None:
    code = (
        "import sys, llmexp.tracker, llmexp.metrics.console, llmexp.metrics.plot\n"
        "print(sorted({'torch', 'wandb', 'rich', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_both_configs_have_the_names_of_a_run() -> None:
    texts = {
        kind: (ROOT / "conf/tracker" / f"{kind}.yaml").read_text() for kind in ("wandb", "none")
    }
    configs = {kind: yaml.safe_load(text) for kind, text in texts.items()}
    assert {kind: config.pop("kind") for kind, config in configs.items()} == {
        "wandb": "wandb",
        "none": "none",
    }
    names = {"project", "entity", "name", "group", "tags", "notes"}  # that a later upload uses
    assert configs["none"] == {key: configs["wandb"][key] for key in names}
    for text in texts.values():
        for line in text.splitlines()[1:]:
            assert re.fullmatch(r"\w+: .*\S +# .+", line), f"a key without its comment: {line}"


def test_what_the_server_lost_is_sent_by_the_resumed_run(tmp_path: Path) -> None:
    """Handed over is not arrived: tracker.json says step 30, the server has fewer rows, or none."""
    run_dir, rows = tmp_path / "run", make_rows(1, 40)
    assert run_worker(run_dir, rows[:30], mode="offline").said == []
    with FakeWandb() as server:
        env = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": FAKE_KEY}
        resumed = run_worker(run_dir, rows[25:40], env=env, start_timeout_s=20, earlier=rows[:25])
    assert resumed.said == []
    assert bare(server.run.rows) == rows
    assert server.run.lines_sent == 40
    assert not upload_is_pending(run_dir)


def test_a_server_that_refuses_rows_or_dies_is_said(tmp_path: Path) -> None:
    """wandb's finish returns as if all were well when the server has refused the rows for good."""
    with FakeWandb("refuses rows") as server:
        env = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": FAKE_KEY}
        outcome = run_worker(tmp_path / "run", make_rows(1, 20), env=env, start_timeout_s=20)
    (said,) = outcome.said
    assert "0 of 20 rows" in said
    assert said.endswith(f"llmexp sync {tmp_path / 'run'}")
    assert outcome.costs["finish"] < 15.5
    assert upload_is_pending(tmp_path / "run")


def test_a_server_that_dies_in_the_middle_costs_the_finish_timeout(tmp_path: Path) -> None:
    with FakeWandb("dies in the middle") as server:
        env = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": FAKE_KEY}
        options = {"start_timeout_s": 20, "finish_timeout_s": 8}
        outcome = run_worker(tmp_path / "run", make_rows(1, 400), env=env, pause=0.01, **options)
    assert len(outcome.said) == 1
    assert outcome.costs["finish"] < 8 + 1
    assert outcome.exit_s < 8
    assert upload_is_pending(tmp_path / "run")


def test_a_preempted_run_is_not_called_failed(tmp_path: Path) -> None:
    with FakeWandb() as server:
        env = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": FAKE_KEY}
        run_worker(tmp_path / "run", make_rows(1, 3), env=env, start_timeout_s=20, exit_code=75)
    assert server.run.exit_code == 75
    assert server.run.preempting


@given(st.lists(st.text(max_size=100), max_size=8))
def test_tags_are_cut_and_stay_distinct(tags: list[str]) -> None:
    kept = cut_tags(tags)
    assert all(1 <= len(tag) <= 64 for tag in kept)
    assert len(kept) == len(set(tags) - {""})
    assert [tag for tag in tags if len(tag) <= 64 and tag not in kept] in (
        [],
        [""] * tags.count(""),
    )


def test_long_tags_with_one_beginning_stay_distinct() -> None:
    tags = [f"model.a_long_key_of_a_model.another_one.and_a_third={'x' * 30}{n}" for n in range(3)]
    assert len({tag[:60] for tag in tags}) == 1
    assert len(set(cut_tags(tags))) == 3
    assert cut("a" * 64, 64) == "a" * 64


def tree(**tracker: Any) -> dict[str, Any]:
    chosen = {"project": "p", "name": None, "group": None, "tags": ["mine"], "notes": None}
    return {"tracker": chosen | tracker, "clip": {"max_norm": 0.5}}


def test_fields_of_a_run_of_a_sweep(tmp_path: Path) -> None:
    recorded = {
        "label": "clip.max_norm=0.5,seed=1",
        "group": "/data/outputs/gpt/2030-01-01_12-00-00",
        "overrides": ["model=gpt2", "clip.max_norm=0.5", "+extra.key=3", "seed=1"],
        "swept": ["clip.max_norm", "+extra.key", "seed"],
        "max_steps": 7,
        "data_fingerprint": {"a": 1},
    }
    fields = run_fields(tmp_path, tree(), recorded)
    assert fields["group"] == "gpt/2030-01-01_12-00-00"
    assert fields["name"] == "clip.max_norm=0.5,seed=1"
    assert fields["tags"] == ["mine", "clip.max_norm=0.5", "extra.key=3", "seed=1"]
    assert fields["config"]["clip"] == {"max_norm": 0.5}
    assert fields["config"]["run"]["max_steps"] == 7
    assert "data_fingerprint" not in fields["config"]["run"]
    chosen = run_fields(tmp_path, tree(group="g", name="n"), recorded)
    assert (chosen["group"], chosen["name"]) == (
        "g",
        "n clip.max_norm=0.5,seed=1",
    )  # else all points would share it
    assert run_fields(tmp_path, tree(name="n"), {})["name"] == "n"


def test_fields_of_a_single_run(tmp_path: Path) -> None:
    recorded = {
        "label": None,
        "group": None,
        "overrides": ["a=1", "b=2"],
    }  # an older run.json has no swept
    fields = run_fields(tmp_path, tree(), recorded)
    assert (fields["group"], fields["name"], fields["tags"]) == (None, "a=1,b=2", ["mine"])
    assert run_fields(tmp_path, tree(), recorded | {"overrides": []})["name"] == tmp_path.name


ENV = {
    "WANDB_PROJECT": "theirs", "WANDB_ENTITY": "team", "WANDB_NAME": "a name",
    "WANDB_RUN_GROUP": "g",
    "WANDB_NOTES": "why", "WANDB_TAGS": "one, two,", "WANDB_MODE": "offline",
}  # fmt: skip
EMPTY: dict[str, Any] = {
    **dict.fromkeys(("project", "entity", "name", "group", "notes")),
    "tags": [],
    "mode": "auto",
}


def test_the_environment_fills_in_and_what_is_not_used_is_said() -> None:
    filled, unused = with_environment({"kind": "wandb", **EMPTY}, ENV)
    assert unused == []
    assert filled == {
        "kind": "wandb", "project": "theirs", "entity": "team", "name": "a name", "group": "g",
        "notes": "why",
        "tags": ["one", "two"], "mode": "auto",
    }  # fmt: skip
    assert with_environment(filled, ENV) == (filled, [])
    assert with_environment({"kind": "wandb", **EMPTY}, {})[0]["project"] == "llmexp"
    mine = {
        "project": "p",
        "entity": "e",
        "name": "n",
        "group": "h",
        "notes": "x",
        "tags": ["t"],
        "mode": "online",
    }
    kept, unused = with_environment({"kind": "wandb", **mine}, {**ENV, "WANDB_RESUME": "must"})
    assert kept == {"kind": "wandb", **mine}
    assert [text.partition("=")[0].partition(" ")[0] for text in unused] == [*ENV, "WANDB_RESUME"]
    assert unused[0] == "WANDB_PROJECT=theirs is not used: tracker.project=p goes before it"
    kept, unused = with_environment({"kind": "wandb", **mine}, {**ENV, "WANDB_SWEEP_ID": "s"})
    assert (kept["project"], kept["entity"], kept["name"]) == ("theirs", "team", "n")
    assert (
        unused[0]
        == "tracker.project=p is not used: the run is wandb's agent's, of the project theirs"
    )
    assert with_environment({"kind": "none", **EMPTY}, ENV) == ({"kind": "none", **EMPTY}, [])


@pytest.mark.parametrize(
    "env", [{"WANDB_MODE": "on"}, {"WANDB_RUN_ID": "a/b"}, {"WANDB_RUN_ID": "x" * 65}]
)
def test_what_wandb_would_not_take_is_refused(env: dict[str, str]) -> None:
    (variable,) = env
    with pytest.raises(ValueError, match=f"{variable}=.*for example"):
        with_environment({"kind": "wandb", **EMPTY}, env)


def test_whose_run_id_it_is(tmp_path: Path) -> None:
    given = {"WANDB_RUN_ID": "Theirs_1"}
    assert given_run_id(tmp_path, "own", False, {}) == ("own", "")
    assert given_run_id(tmp_path, "own", False, given) == ("Theirs_1", "")
    assert "one of a sweep" in given_run_id(tmp_path, "own", True, given)[1]
    write_position(tmp_path, Position("own", 3, 1))
    assert given_run_id(tmp_path, "own", False, given)[0] == "own"
    assert "has the id own" in given_run_id(tmp_path, "own", False, given)[1]
    assert given_run_id(tmp_path, "own", False, {**given, "WANDB_SWEEP_ID": "s"}) == (
        "Theirs_1",
        "",
    )


def test_the_run_id_stays_when_the_folder_moves(tmp_path: Path) -> None:
    first = run_fields(tmp_path, tree(), {})["run_id"]
    assert run_fields(tmp_path / "other", tree(), {})["run_id"] != first
    (tmp_path / "other").mkdir()
    write_position(tmp_path / "other", Position(first))
    assert run_fields(tmp_path / "other", tree(), {})["run_id"] == first


@given(st.text(max_size=80))
def test_the_next_run_id_is_another_safe_one(text: str) -> None:
    ids = [safe_id(text)]
    for _ in range(3):
        ids.append(next_id(ids[-1]))
    assert len(set(ids)) == 4
    assert all(safe_id(run_id) == run_id for run_id in ids)
