"""`llmexp sync` with the real wandb client, against a server that records what arrives."""

import json
import os
import shutil
from pathlib import Path

import pytest

from llmexp.cli.running import run_command
from llmexp.folders import rundir
from llmexp.folders.rows import rows_up_to
from llmexp.tracker.fields import MirrorPosition, read_position, write_position
from llmexp.tracker.sync import find_runs, upload_command
from tests.tools import amend
from tests.tracker.fake_wandb import FakeWandb
from tests.tracker.made import KEY as KEY
from tests.tracker.made import bare, llmexp, make_rows, make_run, write_rows


def dry_run(capsys: pytest.CaptureFixture[str], *runs: Path) -> tuple[int, list[str]]:
    code = run_command("sync", ["--dry-run", *map(str, runs)])
    return code, capsys.readouterr().out.splitlines()


def test_a_sweep_arrives_complete_and_once(tmp_path):
    """One run finished offline, one failed, one was killed, one preempted, one trains, one has not
    begun."""
    sweep = tmp_path / "gpt" / "2030-01-01"
    summary = {"final val/loss": 3.97, "best val/loss": 3.96, "clip_fraction": 0.25}
    runs = [
        make_run(sweep / "0-seed=0", 30, summary=summary),
        # of an earlier part
        make_run(sweep / "1-seed=1", 12, "failed", 3, summary={"steps": 5, "best val/loss": 9.0}),
        make_run(sweep / "2-seed=2", 24, "running", None),
        make_run(sweep / "3-seed=3", 10, "preempted", 75, summary={"latest train/loss": 3.1}),
        make_run(sweep / "4-seed=4", 10, "running", None),
        make_run(sweep / "10-seed=1", 0, "queued", None),
    ]
    with open(runs[2] / "metrics.jsonl", "a") as f:
        f.write('{"step": 25, "tok')  # cut by the kill
    write_rows(runs[1] / "metrics.jsonl", make_rows(5, 12))  # a fork at step 4
    write_rows(runs[1] / "lineage.jsonl", make_rows(1, 4))
    assert find_runs([str(sweep)]) == runs
    with FakeWandb() as server, rundir.locked(runs[4]):
        done = llmexp(tmp_path, server, "sync", sweep)
        assert (done.code, done.err) == (0, "")
        said = ["30 of 30 rows sent, finished", "12 of 12 rows sent, failed",
                "24 of 24 rows sent, crashed", "10 of 10 rows sent, ",
                "left out: it is in training",
                "left out: it has no rows yet (queued)"]  # fmt: skip
        for run, text, line in zip(runs, said, done.out.splitlines(), strict=True):
            assert line.startswith(f"{run.name}: {text}")

        assert len(server.runs) == 4
        arrived = [server.runs[read_position(run).run_id] for run in runs[:4]]  # type: ignore[union-attr]
        for run, got in zip(runs, arrived, strict=False):
            assert bare(got.rows) == rows_up_to(run, 30)
            assert [row["_step"] for row in got.rows] == [row["step"] for row in got.rows]
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
        assert arrived[3].summary["latest train/loss"] == 3.1
        for got in arrived[1:3]:  # figures of runs that could not write their own, or not the last
            last, losses = got.rows[-1], [r["val/loss"] for r in got.rows if "val/loss" in r]
            known = {"steps": last["step"], "tokens_seen": last["tokens_seen"]}
            known |= {"latest train/loss": last["train/loss"], "latest val/loss": losses[-1]}
            assert (known | {"best val/loss": min(losses)}).items() <= got.summary.items()

        # Again: the four are known to be there; the one that trained is over, and a killed one has
        # gone on.
        rundir.write_status(runs[2], "finished", exit_code=0, summary={"final val/loss": 1.0})
        write_rows(runs[2] / "metrics.jsonl", make_rows(1, 40))
        before = server.requests
        assert llmexp(tmp_path, server, "sync", "--dry-run", sweep).code == 0
        assert server.requests == before
        done = llmexp(tmp_path, server, "sync", sweep)
        assert (done.code, done.err) == (0, "")
        lines = done.out.splitlines()
        assert ["nothing to send" in line for line in lines[:4]] == [True, True, False, True]
        assert "16 of 40 rows sent, finished" in lines[2]
        assert bare(arrived[2].rows) == make_rows(1, 40)
        assert (arrived[2].lines_sent, arrived[2].exit_code) == (40, 0)
    assert upload_command(sweep) is None
    assert not list(sweep.glob("*/wandb"))


def test_a_run_is_completed_without_a_login_by_bad_servers_and_in_a_moved_folder(tmp_path):
    run = make_run(tmp_path / "old" / "0-seed=0", 12, "running", None)
    done = llmexp(tmp_path, None, "sync", run)
    (line,) = done.err.splitlines()
    assert (done.code, done.out, "no login" in line, "WANDB_API_KEY" in line) == (2, "", True, True)
    assert read_position(run) is None
    with FakeWandb("refuses rows") as server:
        done = llmexp(tmp_path, server, "sync", run)
        assert (done.code, "the server has 0 of 12 rows" in done.out) == (1, True)
        assert upload_command(run) is not None
        server.behaviour = "rate limited at first"
        done = llmexp(tmp_path, server, "sync", run)
        assert (done.code, "12 of 12 rows sent" in done.out) == (0, True)
        # tracker.json says that all 30 rows were handed over; the process was killed before.
        (run_id,) = server.runs
        write_rows(run / "metrics.jsonl", rows := make_rows(1, 30))
        write_position(run, MirrorPosition(run_id, rows[-1]["tokens_seen"], 30))
        shutil.move(tmp_path / "old", tmp_path / "new")
        moved = tmp_path / "new" / "0-seed=0"
        assert upload_command(moved) == f"llmexp sync {moved}"
        done = llmexp(tmp_path, server, "sync", "new/*")
        assert (done.code, "18 of 30 rows sent" in done.out) == (0, True)
        assert (bare(server.run.rows), server.run.lines_sent) == (rows, 30)


@pytest.mark.slow
def test_a_history_that_differs_is_reported_and_sent_anew(tmp_path):
    """wandb takes rows at the end alone: neither a hole nor a row too many can be mended in
    place."""
    run = make_run(tmp_path / "0-seed=0", 20)
    with FakeWandb() as server:
        assert llmexp(tmp_path, server, "sync", run).code == 0
        (run_id,) = server.runs
        del server.run.rows[3:8]
        write_position(run, MirrorPosition(run_id, 0, 0))
        done = llmexp(tmp_path, server, "sync", run)
        assert done.code == 1
        for text in ("0 of 20 rows sent", "5 earlier rows are missing there", "--new"):
            assert text in done.out
        assert upload_command(run) is not None
        done = llmexp(tmp_path, server, "sync", "--new", run)
        assert (done.code, done.out.endswith(f"/proj/runs/{run_id}-2\n")) == (0, True)
        assert bare(server.runs[f"{run_id}-2"].rows) == make_rows(1, 20)

        write_rows(run / "metrics.jsonl", make_rows(1, 15))
        amend(run / "run.json", max_steps=15)
        done = llmexp(tmp_path, server, "sync", run)
        assert (done.code, "5 rows that the run does not have" in done.out) == (0, True)
        assert server.runs[f"{run_id}-2"].lines_sent == 20


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("metrics.jsonl", "not a row\n", "line 1 is not a row"),
        ("metrics.jsonl", '{"step": 2}\n{"step": 2}\n', "line 2 is not a row"),
        ("metrics.jsonl", '{"step": "a"}\n', "line 1 is not a row"),
        ("metrics.jsonl", '{"step": NaN}\n', "line 1 is not a row"),
        ("run.json", "{", "run.json: cannot be read"),
        ("run.json", "[]", "run.json: holds no object"),
        ("config.yaml", "[1]", "holds no config"),
        ("config.yaml", "tracker: 3", "is not that of a run"),
        ("config.yaml", "{}", "is not that of a run"),
        ("status.json", "{", "3 rows, unknown"),  # which is no obstacle
        ("status.json", "[1]", "3 rows, unknown"),
        ("status.json", "3", "3 rows, unknown"),
    ],
)
def test_damaged_records_are_one_line(tmp_path, capsys, name: str, text: str, expected: str):
    bad, good = make_run(tmp_path / "0-bad", 3), make_run(tmp_path / "1-good", 3)
    (bad / name).write_text(text)
    code, (first, second) = dry_run(capsys, bad, good)
    refused = name != "status.json"
    assert (code, first.startswith("0-bad: cannot be uploaded: ")) == (refused, refused)
    assert expected in first
    assert second.startswith("1-good: 3 rows, finished (project proj")


def test_a_run_that_may_train_on_another_host_is_left_out(tmp_path, capsys):
    """Whose locks may not be seen here; after half an hour without a sign of life it is as one that
    was cut."""
    run = make_run(tmp_path / "0-seed=0", 30, state="running", code=None, host="another")
    assert "left out: it is in training" in dry_run(capsys, run)[1][0]
    for file in run.iterdir():
        os.utime(file, (0, 0))
    assert "30 rows, crashed" in dry_run(capsys, run)[1][0]


def test_a_run_that_lost_its_last_rows_is_never_complete(tmp_path, capsys):
    run = make_run(tmp_path / "0-seed=0", 30, summary={"steps": 30, "final val/loss": 3.97})
    write_rows(run / "metrics.jsonl", make_rows(1, 4))
    lost = "not complete: it says finished at step 30, but its rows end at 4"
    code, (line,) = dry_run(capsys, run)
    assert (code, lost in line) == (1, True)
    with FakeWandb() as server:
        done = llmexp(tmp_path, server, "sync", run)
        line, total = done.out.splitlines()
        assert (done.code, lost in line, "finished: " in line) == (1, True, False)
        assert "1 of 1 run is not complete in the tracker; the same command tries" in total
        assert server.run.exit_code == 1
        assert "final val/loss" not in server.run.summary
        assert upload_command(run) is not None
        # Found again, they follow; lost after that, what is there is left as it is.
        write_rows(run / "metrics.jsonl", make_rows(1, 30))
        done = llmexp(tmp_path, server, "sync", run)
        assert (done.code, "26 of 30 rows sent, finished" in done.out) == (0, True)
        assert (server.run.exit_code, bare(server.run.rows)) == (0, make_rows(1, 30))
        write_rows(run / "metrics.jsonl", make_rows(1, 4))
        done = llmexp(tmp_path, server, "sync", run)
        assert (done.code, "the tracker has later rows" in done.out) == (1, True)
        assert (server.run.exit_code, server.run.lines_sent) == (0, 30)
