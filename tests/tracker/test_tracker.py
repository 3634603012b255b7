"""wandb runs for real here, each time in a process of its own, as in a run."""

import contextlib
import json
import os
import pty
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmexp.folders.rows import Rows
from llmexp.tracker.fields import (
    MirrorPosition,
    read_position,
    shorten,
    upload_is_pending,
    write_position,
)
from tests import forks
from tests.conftest import HANG_S, PATHS, ROOT, environment, free_port
from tests.tracker.fake_wandb import Behaviour, FakeWandb

FAKE_KEY = "0123456789abcdef0123456789abcdef01234567"

TRACKER: dict[str, Any] = {
    "kind": "wandb", "project": "a-project", "entity": None, "name": "lr=3e-4",
    "group": "a-sweep", "tags": ["gpt", shorten("t" * 80, 64)], "notes": "some notes",
    "mode": "auto", "start_timeout_s": 1,
    "finish_timeout_s": 60,  # of a busy machine; where a server is at fault a test has its own
}  # fmt: skip


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
    rows = []
    for step in range(1, last + 1):
        row = {"step": step, "tokens_seen": step * 524_288, "epoch": step / 7}
        row["train/loss"] = generator.gauss(3, 1)
        row["lr"] = generator.random() * 10.0 ** -generator.randrange(3, 12)
        row |= {"skipped": step % 3 == 0, "amp": 1}
        rows.append(row | ({"val/loss": generator.expovariate(1)} if step % 5 == 0 else {}))
    return rows[first - 1 :]


def run_worker(
    run_dir: Path,
    rows: list[dict[str, Any]],
    server: str | None = None,
    *,
    env: dict[str, str] | None = None,
    terminal: bool = False,
    plan: dict[str, Any] | None = None,
    **tracker: Any,
) -> Outcome:
    """Write `rows` as a run would, after those that its folder has up to there; `server`: the URL
    of one, to which there is a login; `plan`: what else the worker does, as worker.py says."""
    run_dir.mkdir(exist_ok=True)
    spec = {"pause": 0.0, "kill_core_at": None, "die_at": None, "exit_code": 0} | (plan or {})
    spec |= {"run_dir": str(run_dir), "rows": rows, "tracker": TRACKER | tracker}
    spec["config"] = {"optimizer": {"lr": 3e-4}}
    # No login and no settings of whoever runs this test.
    home = run_dir.parent / "home"
    home.mkdir(exist_ok=True)
    clean = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_") and k != "NETRC"}
    clean |= {"HOME": str(home), "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"}
    if server:
        clean |= {"WANDB_BASE_URL": server, "WANDB_API_KEY": FAKE_KEY}
    ends = pty.openpty() if terminal else ()
    process = forks.start(
        "tests.tracker.worker", json.dumps(spec), cwd=run_dir.parent, env=clean | (env or {}),
        stdin=ends[1] if ends else subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    out, err = process.communicate(timeout=HANG_S)
    ended = time.time()
    for end in ends:
        os.close(end)
    lines = [json.loads(line) for line in out.splitlines()]  # anything else would be an error here
    said = [line["said"] for line in lines if "said" in line]
    costs = next((line for line in lines if "said" not in line), {})
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


def history(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of wandb logs, without what wandb adds to them."""
    return bare([record["history"]["item"] for record in log if record["type"] == "history"])


def bare(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in item.items() if not k.startswith("_")} for item in items]


def check_cost(outcome: Outcome, finish_s: float = HANG_S) -> None:
    """It has cost training no row and no error, and no more seconds than it may."""
    assert (outcome.code, outcome.stderr) == (0, "")
    assert outcome.costs["open"] < outcome.slow
    assert outcome.costs["finish"] < finish_s + outcome.slow
    assert outcome.exit_s < 8 * outcome.slow  # an exit hook of wandb would wait for 10 to 20 s


def test_an_offline_run_has_every_row_and_value_and_needs_no_server(tmp_path: Path) -> None:
    run_dir = tmp_path / "a run, 实验"
    rows = make_rows(1, 200)
    with dead_server("closed port") as server:
        outcome = run_worker(run_dir, rows, server.url, env={"WANDB_MODE": "offline"})
    check_cost(outcome)
    assert outcome.said == []
    log = records(run_dir)
    assert history(log) == rows  # every float bit for bit: JSON keeps doubles
    (run,) = [record["run"] for record in log if record["type"] == "run"]
    named = {"run_id": "run-1", "project": "a-project", "display_name": "lr=3e-4"}
    named |= {"run_group": "a-sweep", "tags": TRACKER["tags"], "notes": "some notes"}
    assert named.items() <= run.items()
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
        data = path.read_bytes() if path.is_file() else b""
        assert not [text for text in (FAKE_KEY.encode(), b"mirror.finish") if text in data], path
    assert read_position(run_dir) == MirrorPosition("run-1", 200 * 524_288, 200)


def test_resume_sends_no_row_twice(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    rows = make_rows(1, 25)
    # Killed after step 20; resumed from a checkpoint at step 15.
    first = run_worker(run_dir, rows[:20] + rows[:1], plan={"die_at": 20})
    assert first.code == -9
    second = run_worker(run_dir, rows[15:])
    assert second.said == []
    log = records(run_dir)
    assert history(log) == rows
    assert [record["run"]["run_id"] for record in log if record["type"] == "run"] == ["run-1"] * 2
    # wandb's own counter goes on too, or a sync of the parts would lay them over each other.
    items = [record["history"]["item"] for record in log if record["type"] == "history"]
    assert [int(item["_step"]) for item in items] == [row["step"] for row in rows]


@pytest.mark.parametrize("code", [0, 75])
def test_online_rows_arrive(tmp_path: Path, code: int) -> None:
    """Those of a finished run, and of a preempted one, which is not called failed."""
    rows, run_dir = make_rows(1, 50), tmp_path / "run"
    with FakeWandb() as server:
        outcome = run_worker(
            run_dir, rows, server.url, start_timeout_s=20, plan={"exit_code": code}
        )
    check_cost(outcome)
    assert outcome.said == []
    run = server.run
    assert bare(run.rows) == rows
    assert run.summary["final/loss"] == 1.25
    assert (run.variables["jobType"], run.variables["groupName"]) == ("train", "a-sweep")
    assert (run.exit_code, run.preempting) == (code, code == 75)
    url = f"{server.url}/someone/a-project/runs/run-1"
    mark = {"project": "a-project", "step": 50, "exit_code": code, "url": url}
    there = MirrorPosition("run-1", rows[-1]["tokens_seen"], 50, mark, "someone")
    assert read_position(run_dir) == there
    assert not list((run_dir / "wandb").glob("offline-*"))


DEAD_SERVERS: tuple[Any, ...] = ("closed port", "hangs", "rate limited")


def dead_server(kind: Any) -> contextlib.AbstractContextManager[Any]:
    closed = SimpleNamespace(url=f"http://127.0.0.1:{free_port()}")
    return contextlib.nullcontext(closed) if kind == "closed port" else FakeWandb(kind)


@pytest.fixture(scope="module")
def dead_server_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All kinds at once: most of their time is waiting."""

    def run(kind: str, run_dir: Path) -> tuple[str, Path, Outcome]:
        with dead_server(kind) as server:
            outcome = run_worker(run_dir, make_rows(1, 100), server.url, finish_timeout_s=15)
            return server.url, run_dir, outcome

    forks.template()  # which ends with the thread that starts it
    # in threads mktemp would race with itself
    folders = [tmp_path_factory.mktemp("dead") / "run" for _ in DEAD_SERVERS]
    with ThreadPoolExecutor() as pool:
        return dict(zip(DEAD_SERVERS, pool.map(run, DEAD_SERVERS, folders), strict=True))


@pytest.mark.parametrize("kind", DEAD_SERVERS)
def test_a_dead_server_costs_seconds_and_no_row(
    dead_server_runs: dict[str, Any], kind: str
) -> None:
    url, run_dir, outcome = dead_server_runs[kind]
    # about 3 s here on an idle machine, 11 s with the default start
    check_cost(outcome, finish_s=15)
    (said,) = outcome.said
    assert "\n" not in said
    if outcome.costs["finish"] > 15:  # on a busy machine wandb alone may need longer to start
        assert said.endswith(f"llmexp sync {run_dir}")
        assert upload_is_pending(run_dir)
    else:
        assert url in said
        assert "offline" in said
        assert history(records(run_dir)) == make_rows(1, 100)
    for path in run_dir.rglob("*"):
        assert not path.is_file() or FAKE_KEY.encode() not in path.read_bytes()


def test_what_wandb_was_never_given_is_owed_too(tmp_path: Path) -> None:
    """wandb takes longer to start than there is time at the end of a run that goes on."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    before = MirrorPosition("run-1", 3, 1, {"project": "a-project", "step": 1})
    write_position(run_dir, before)
    with dead_server("hangs") as server:
        late = {"start_timeout_s": 60, "finish_timeout_s": 1}
        outcome = run_worker(run_dir, make_rows(2, 5), server.url, **late)
    (said,) = outcome.said
    assert "not done after 1 s" in said
    assert said.endswith(f"llmexp sync {run_dir}")
    assert read_position(run_dir) == replace(before, uploaded=None)
    assert upload_is_pending(run_dir)


@pytest.mark.parametrize(
    ("behaviour", "rows", "limit_s", "says"),
    [
        ("hangs after start", 20, 8, ""),
        ("dies in the middle", 400, 8, ""),
        # wandb's finish returns as if all were well when the server has refused the rows for good
        ("refuses rows", 20, 60, "0 of 20 rows"),
    ],
)
def test_a_server_that_fails_later_costs_the_finish_timeout(
    tmp_path: Path, behaviour: Behaviour, rows: int, limit_s: int, says: str
) -> None:
    run_dir, times = tmp_path / "run", {"start_timeout_s": 20, "finish_timeout_s": limit_s}
    with FakeWandb(behaviour) as server:
        plan = {"pause": 0.01}
        outcome = run_worker(run_dir, make_rows(1, rows), server.url, plan=plan, **times)
    check_cost(outcome, limit_s)
    (said,) = outcome.said
    assert says in said
    assert said.endswith(f"llmexp sync {run_dir}")
    assert upload_is_pending(run_dir)


def test_without_a_login_it_is_offline_and_never_asks(tmp_path: Path) -> None:
    rows = make_rows(1, 3)
    outcome = run_worker(tmp_path / "run", rows, mode="online", terminal=True)
    check_cost(outcome)
    (said,) = outcome.said
    assert "WANDB_API_KEY" in said
    assert history(records(tmp_path / "run")) == rows


# A disk that is full for tracker.json alone.
FULL = """
import builtins

opened = builtins.open


def full(file, mode="r", *args, **more):
    if "tracker.json" in str(file) and mode == "xb":
        return opened("/dev/full", "wb", *args, **more)
    return opened(file, mode, *args, **more)


builtins.open = full
"""


@pytest.mark.fresh  # forks have imported wandb
@pytest.mark.parametrize(
    ("module", "text", "expected"),
    [
        ("wandb", "raise RuntimeError('broken\\ninstallation')", "broken installation"),
        ("wandb", "import time; time.sleep(60)", "not done after 1 s"),
        ("sitecustomize", FULL, "No space left"),
        ("", "", "Not a directory"),  # a file is in the place of wandb's folder
    ],
    ids=["broken", "hangs", "full", "unwritable"],
)
def test_a_bad_wandb_or_disk_is_one_line(
    tmp_path: Path, module: str, text: str, expected: str
) -> None:
    (tmp_path / "path").mkdir()
    (tmp_path / "run").mkdir()
    if module:
        (tmp_path / "path" / f"{module}.py").write_text(text)
    else:
        (tmp_path / "run" / "wandb").touch()
    env = {"PYTHONPATH": f"{tmp_path / 'path'}:{ROOT}"}
    limit_s = 1 if module == "wandb" else 60
    outcome = run_worker(tmp_path / "run", make_rows(1, 50), env=env, finish_timeout_s=limit_s)
    check_cost(outcome, limit_s)
    (said,) = outcome.said
    assert expected in said
    assert module != "sitecustomize" or not (tmp_path / "run" / "tracker.json").exists()


def test_training_goes_on_when_wandb_core_dies(tmp_path: Path) -> None:
    rows = make_rows(1, 60)
    outcome = run_worker(tmp_path / "run", rows, plan={"kill_core_at": 40, "pause": 0.01})
    check_cost(outcome, 5 * outcome.slow)
    assert len(outcome.said) == 1
    # What it had written before its end is on disk.
    assert history(records(tmp_path / "run")) == rows[:40]


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
