"""`llmexp sync` with the real wandb client, against a server that records what arrives."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmexp.cli.running import run_command
from llmexp.folders import rundir
from llmexp.folders.rows import rows_up_to
from llmexp.system import fileio
from llmexp.tracker.fields import MirrorPosition, read_position, write_position
from llmexp.tracker.sync import find_runs, summary_of_rows, upload_command
from tests.conftest import HANG_S
from tests.conftest import llmexp as run_llmexp
from tests.tools import amend
from tests.tracker.fake_wandb import FakeRun, FakeWandb

KEY = "0123456789abcdef0123456789abcdef01234567"


def make_rows(steps: int) -> list[dict[str, Any]]:
    rows = []
    for s in range(1, steps + 1):
        row = {"step": s, "tokens_seen": 64 * s, "epoch": s / 7, "train/loss": 3 + 1 / s}
        more = {} if s % 10 else {"val/loss": 4 - s / 1000}
        rows.append(row | {"skipped": False} | more)
    return rows


def make_run(
    path: Path, steps: int, state: str = "finished", code: int | None = 0, **status: Any
) -> Path:
    """The records of a run, as training leaves them."""
    path.mkdir(parents=True)
    tracker = {"kind": "wandb", "project": "proj", "tags": ["mine"]}
    tracker |= dict.fromkeys(("name", "group", "notes"))
    config = {"tracker": tracker, "clip": {"max_norm": 0.5}}
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    label = f"seed={path.name[0]}"
    recorded = {"label": label, "group": str(path.parent), "overrides": ["model=gpt2", label]}
    fileio.write_json(path / "run.json", recorded | {"swept": ["seed"], "max_steps": steps})
    fileio.write_json(path / "status.json", {"state": state, "exit_code": code} | status)
    write_rows(path, make_rows(steps))
    return path


def write_rows(run: Path, rows: list[dict[str, Any]]) -> None:
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def llmexp(
    tmp_path: Path, *arguments: Any, server: str | None = None
) -> tuple[int, list[str], str]:
    home = tmp_path / "home"
    home.mkdir(exist_ok=True)
    env = {"HOME": str(home), "WANDB_MODE": "online"}
    env |= {"WANDB_BASE_URL": server, "WANDB_API_KEY": KEY} if server else {}
    done = run_llmexp(*map(str, arguments), cwd=tmp_path, timeout=HANG_S, **env)
    return done.code, done.out.splitlines(), done.err


def dry_run(run: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = run_command("sync", ["--dry-run", str(run)])
    (line,) = capsys.readouterr().out.splitlines()
    return code, line


def rows_of(run: FakeRun) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.startswith("_")} for row in run.rows]


def test_a_sweep_arrives_complete_and_once(tmp_path: Path) -> None:
    """One run finished offline, one failed, one was killed, one preempted, one trains, one has not
    begun."""
    sweep = tmp_path / "gpt" / "2030-01-01"
    summary = {"final val/loss": 3.97, "best val/loss": 3.96, "clip_fraction": 0.25}
    runs = [
        make_run(sweep / "0-seed=0", 30, summary=summary),
        # of an earlier part
        make_run(sweep / "1-seed=1", 12, "failed", 3, summary={"steps": 5, "best val/loss": 9.0}),
        make_run(sweep / "2-seed=2", 25, "running", None),
        make_run(sweep / "3-seed=3", 10, "preempted", 75, summary={"latest train/loss": 3.1}),
        make_run(sweep / "4-seed=4", 10, "running", None),
        make_run(sweep / "10-seed=1", 0, "queued", None),
    ]
    with open(runs[2] / "metrics.jsonl", "a") as f:
        f.write('{"step": 26, "tok')  # cut by the kill
    write_rows(runs[1], make_rows(12)[4:])  # a fork at step 4
    lineage = "".join(json.dumps(row) + "\n" for row in make_rows(4))
    (runs[1] / "lineage.jsonl").write_text(lineage)
    assert find_runs([str(sweep)]) == runs
    with FakeWandb() as server, rundir.locked(runs[4]):
        code, lines, errors = llmexp(tmp_path, "sync", sweep, server=server.url)
        assert (code, errors) == (0, "")
        said = ["30 of 30 rows sent, finished", "12 of 12 rows sent, failed",
                "25 of 25 rows sent, crashed", "10 of 10 rows sent, ",
                "left out: it is in training",
                "left out: it has no rows yet (queued)"]  # fmt: skip
        for run, text, line in zip(runs, said, lines, strict=True):
            assert line.startswith(f"{run.name}: {text}")

        assert len(server.runs) == 4
        arrived = [server.runs[read_position(run).run_id] for run in runs[:4]]  # type: ignore[union-attr]
        for run, got in zip(runs, arrived, strict=False):
            assert rows_of(got) == rows_up_to(run, 30)
            assert [row["_step"] for row in got.rows] == [row["step"] for row in rows_of(got)]
            assert got.lines_sent == len(got.rows)
            label = f"seed={run.name[0]}"
            shown = {"groupName": "gpt/2030-01-01", "jobType": "train", "displayName": label}
            assert (shown | {"tags": ["mine", label]}).items() <= got.variables.items()
            assert got.config["clip"]["value"] == {"max_norm": 0.5}
            recorded = json.loads((run / "run.json").read_text())
            assert got.config["run"]["value"]["max_steps"] == recorded["max_steps"]
        assert [got.exit_code for got in arrived] == [0, 3, 1, 75]
        assert [got.preempting for got in arrived] == [False, False, False, True]
        assert summary.items() <= arrived[0].summary.items()
        assert arrived[1].summary["best val/loss"] == make_rows(12)[9]["val/loss"]
        assert arrived[2].summary["latest train/loss"] == make_rows(25)[-1]["train/loss"]

        # Again: the four are known to be there; the one that trained is over, and a killed one has
        # gone on.
        rundir.write_status(runs[2], "finished", exit_code=0, summary={"final val/loss": 1.0})
        write_rows(runs[2], make_rows(40))
        before = server.requests
        assert llmexp(tmp_path, "sync", "--dry-run", sweep, server=server.url)[0] == 0
        assert server.requests == before
        code, lines, errors = llmexp(tmp_path, "sync", sweep, server=server.url)
        assert (code, errors) == (0, "")
        assert ["nothing to send" in line for line in lines[:4]] == [True, True, False, True]
        assert "15 of 40 rows sent, finished" in lines[2]
        assert rows_of(arrived[2]) == make_rows(40)
        assert (arrived[2].lines_sent, arrived[2].exit_code) == (40, 0)
    assert upload_command(sweep) is None
    assert not list(sweep.glob("*/wandb"))


def test_a_partly_online_run_in_a_moved_folder(tmp_path: Path) -> None:
    """tracker.json says that all 30 rows were handed over; the server got 12 before the process was
    killed."""
    run = make_run(tmp_path / "old" / "0-seed=0", 12, "running", None)
    with FakeWandb() as server:
        assert llmexp(tmp_path, "sync", run, server=server.url)[0] == 0
        (run_id,) = server.runs
        write_rows(run, make_rows(30))
        write_position(run, MirrorPosition(run_id, 64 * 30, 30))
        shutil.move(tmp_path / "old", tmp_path / "new")
        moved = tmp_path / "new" / "0-seed=0"
        assert upload_command(moved) == f"llmexp sync {moved}"
        code, (line,), _ = llmexp(tmp_path, "sync", "new/*", server=server.url)
        assert (code, "18 of 30 rows sent" in line) == (0, True)
        assert rows_of(server.run) == make_rows(30)
        assert server.run.lines_sent == 30


@pytest.mark.slow
def test_a_history_that_differs_is_reported_and_sent_anew(tmp_path: Path) -> None:
    """wandb takes rows at the end alone: neither a hole nor a row too many can be mended in
    place."""
    run = make_run(tmp_path / "0-seed=0", 20)
    with FakeWandb() as server:
        assert llmexp(tmp_path, "sync", run, server=server.url)[0] == 0
        (run_id,) = server.runs
        del server.run.rows[3:8]
        write_position(run, MirrorPosition(run_id, 0, 0))
        code, lines, _ = llmexp(tmp_path, "sync", run, server=server.url)
        assert code == 1
        for text in ("0 of 20 rows sent", "5 earlier rows are missing there", "--new"):
            assert text in lines[0]
        assert upload_command(run) is not None
        code, (line,), _ = llmexp(tmp_path, "sync", "--new", run, server=server.url)
        assert (code, line.endswith(f"/proj/runs/{run_id}-2")) == (0, True)
        assert rows_of(server.runs[f"{run_id}-2"]) == make_rows(20)

        write_rows(run, make_rows(15))
        amend(run / "run.json", max_steps=15)
        code, (line,), _ = llmexp(tmp_path, "sync", run, server=server.url)
        assert (code, "5 rows that the run does not have" in line) == (0, True)
        assert server.runs[f"{run_id}-2"].lines_sent == 20


def test_a_server_that_limits_refuses_or_has_gone(tmp_path: Path) -> None:
    run = make_run(tmp_path / "0-seed=0", 20)
    with FakeWandb("refuses rows") as server:
        code, lines, _ = llmexp(tmp_path, "sync", run, server=server.url)
        assert (code, "the server has 0 of 20 rows" in lines[0]) == (1, True)
        assert upload_command(run) is not None
        server.behaviour = "rate limited at first"
        code, (line,), _ = llmexp(tmp_path, "sync", run, server=server.url)
        assert (code, "20 of 20 rows sent" in line) == (0, True)
        assert rows_of(server.run) == make_rows(20)


def test_without_a_login_nothing_is_uploaded_and_how_to_is_reported(tmp_path: Path) -> None:
    run = make_run(tmp_path / "0-seed=0", 3)
    code, lines, error = llmexp(tmp_path, "sync", run)
    assert (code, lines) == (2, [])
    assert len(error.splitlines()) == 1
    for text in ("nothing could be uploaded: no login", "wandb login", "WANDB_API_KEY"):
        assert text in error
    assert read_position(run) is None


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("metrics.jsonl", "not a row\n", "line 1 is not a row"),
        ("metrics.jsonl", '{"step": 2}\n{"step": 2}\n', "line 2 is not a row"),
        ("metrics.jsonl", '{"step": "a"}\n', "line 1 is not a row"),
        ("metrics.jsonl", '{"step": NaN}\n', "line 1 is not a row"),
        ("run.json", "{", "run.json: cannot be read"),
        ("config.yaml", "[1]", "holds no config"),
        ("config.yaml", "tracker: 3", "is not that of a run"),
        ("config.yaml", "{}", "is not that of a run"),
        ("run.json", "[]", "run.json: holds no object"),
    ],
)
def test_damaged_records_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, expected: str
) -> None:
    bad, good = make_run(tmp_path / "0-bad", 3), make_run(tmp_path / "1-good", 3)
    (bad / name).write_text(text)
    assert run_command("sync", ["--dry-run", str(bad), str(good)]) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("0-bad: cannot be uploaded: ")
    assert expected in first
    assert second.startswith("1-good: 3 rows, finished (project proj")


def test_damaged_status_is_no_obstacle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "0-bad", 3)
    for text in ("{", "[1]", "3"):
        (run / "status.json").write_text(text)
        code, line = dry_run(run, capsys)
        assert (code, "3 rows, unknown" in line) == (0, True)


def test_figures_of_a_run_that_could_not_write_its_own() -> None:
    rows: list[dict[str, Any]] = [
        {"step": 1, "tokens_seen": 8, "train/loss": 3.0, "val/loss": 2.0},
        {"step": 2, "tokens_seen": 16, "train/loss": 2.5, "val/loss": 2.25},
        {"step": 3, "tokens_seen": 24},
    ]
    latest = {"latest train/loss": 2.5, "latest val/loss": 2.25, "best val/loss": 2.0}
    assert summary_of_rows(rows) == {"steps": 3, "tokens_seen": 24, **latest}


def test_a_run_that_may_train_on_another_host_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whose locks may not be seen here; after half an hour without a sign of life it is as one that
    was cut."""
    run = make_run(tmp_path / "0-seed=0", 30, state="running", code=None, host="another")
    assert "left out: it is in training" in dry_run(run, capsys)[1]
    for file in run.iterdir():
        os.utime(file, (0, 0))
    assert "30 rows, crashed" in dry_run(run, capsys)[1]


def test_a_run_that_lost_its_last_rows_is_never_complete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "0-seed=0", 30, summary={"steps": 30, "final val/loss": 3.97})
    write_rows(run, make_rows(4))
    with FakeWandb() as server:
        lost = "not complete: it says finished at step 30, but its rows end at 4"
        code, line = dry_run(run, capsys)
        assert (code, lost in line) == (1, True)
        code, (line, total), _ = llmexp(tmp_path, "sync", run, server=server.url)
        assert (code, lost in line) == (1, True)
        assert "finished: " not in line
        assert "1 of 1 run is not complete in the tracker; the same command tries" in total
        assert server.run.exit_code == 1
        assert "final val/loss" not in server.run.summary
        assert upload_command(run) is not None
        # Found again, they follow; lost after that, what is there is left as it is.
        write_rows(run, make_rows(30))
        code, (line,), _ = llmexp(tmp_path, "sync", run, server=server.url)
        assert (code, "26 of 30 rows sent, finished" in line) == (0, True)
        assert (server.run.exit_code, rows_of(server.run)) == (0, make_rows(30))
        write_rows(run, make_rows(4))
        code, lines, _ = llmexp(tmp_path, "sync", run, server=server.url)
        assert (code, "the tracker has later rows" in lines[0]) == (1, True)
        assert (server.run.exit_code, server.run.lines_sent) == (0, 30)
