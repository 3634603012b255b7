"""The answer of a sweep in wandb: the real client, against a server that records."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from llmexp.compare.comparing import compare
from llmexp.folders.ledger import Ledger
from llmexp.folders.rows import read_rows
from llmexp.tracker.answer import SweepAnswer, deliver
from llmexp.tracker.fields import (
    MirrorPosition,
    read_position,
    upload_is_pending,
    write_position,
)
from llmexp.tracker.sync import upload_command
from tests.conftest import HANG_S, ROOT
from tests.tools import amend
from tests.tracker.fake_wandb import Behaviour, FakeRun, FakeWandb
from tests.tracker.made import QUICK, bare, llmexp, login, make_run

MARKS = ("compare/mark", "compare/difference", "compare/ci_half")


def answers(server: FakeWandb) -> list[FakeRun]:
    return [r for r in server.runs.values() if r.variables.get("jobType") == "compare"]


def check_all_there(tmp_path: Path, server: FakeWandb) -> None:
    """One answer, the newest; and in every run's summary what the comparison at home says."""
    (answer,) = answers(server)
    found = compare([tmp_path / "s"])
    pages = [row["compare/page"]["path"] for row in answer.rows]
    assert len(set(pages)) == len(pages)
    assert answer.summary["compare/page"]["path"] == pages[-1]
    page = server.files[pages[-1]].decode()
    assert "<title>" in page
    assert f"{len(found.runs)} runs of" in page
    assert answer.variables["notes"].startswith(found.headline)
    table = json.loads(server.files["compare/table.table.json"])
    for entry, values in zip(found.settings, table["data"], strict=True):
        line = dict(zip(table["columns"], values, strict=True))
        shown = {"name": entry.name, "mark": entry.mark, "difference": entry.size}
        figures = {c.key: entry.figures[c.key] for c in found.columns if c.key in entry.figures}
        assert (shown | {"half": entry.half} | entry.values | figures).items() <= line.items()
        assert "val/loss" in figures
    assert server.files[answer.summary["compare/table"]["path"]]
    assert (answer.exit_code, answer.variables["displayName"]) == (0, "answer")
    assert len(server.runs) == len(found.runs) + 1
    for entry in found.settings:
        for one in entry.runs:
            position = read_position(one.path)
            assert position is not None
            there = server.runs[position.run_id]
            assert there.variables["groupName"] == answer.variables["groupName"]
            figures = (None, None) if one.out else (entry.size, entry.half)
            values = zip(MARKS, (one.out or entry.mark, *figures), strict=True)
            known = {k: v for k, v in values if v not in (None, "")}
            assert {k: v for k, v in there.summary.items() if k in MARKS} == known
            assert "final val/loss" in there.summary
            rows = read_rows(one.path / "metrics.jsonl")
            assert bare(there.rows) == rows
            assert [row["_step"] for row in there.rows] == [row["step"] for row in rows]
            record = json.loads((one.path / "run.json").read_text())
            config = {key: value["value"] for key, value in there.config.items()}
            assert config["run"]["max_tokens"] == record["max_tokens"]
            assert config["batch"]["real_batch_size"] == record["real_batch_size"]
    assert not upload_is_pending(tmp_path / "s")


def check_workspace(server: FakeWandb, said: str) -> None:
    """With the package one workspace for the sweep, and its link; without it the command that
    installs it."""
    if importlib.util.find_spec("wandb_workspaces") is None:
        assert "to install it: pip install 'llmexp[workspaces]'" in said
        return
    (view,) = server.views
    group = answers(server)[0].variables["groupName"]
    named = {"entityName": "someone", "projectName": "llmexp", "displayName": group}
    assert named.items() <= view.items()
    name = view["name"].removeprefix("nw-").removesuffix("-v")
    assert f"s: workspace: {server.url}/someone/llmexp?nw={name}\n" in said
    section = json.loads(view["spec"])["section"]
    (runs,) = section["runSets"]
    assert [key["name"] for key in runs["grouping"]] == ["optimizer.value.lr"]
    filters = [(f["key"]["name"], f["op"], f["value"]) for f in runs["filters"]["filters"]]
    assert filters == [("group", "=", group), ("jobType", "!=", "compare")]
    assert [f"summary:{key}" for key in MARKS] == runs["runFeed"]["columnOrder"][1:]
    (panels,) = [part["panels"] for part in section["panelBankConfig"]["sections"]]
    assert {panel["config"]["xAxis"] for panel in panels} == {"tokens_seen"}
    assert {panel["config"]["groupArea"] for panel in panels} == {"minmax"}


def test_an_offline_sweep_is_completed_by_sync_and_a_wider_one_replaces_its_answer(tmp_path):
    grid = [*QUICK, "-m", "optimizer.lr=1e-5,1e-2"]
    with FakeWandb() as server:
        done = llmexp(tmp_path, server, "train", *grid, "hydra.sweep.dir=s", WANDB_MODE="offline")
        assert done.code == 0, done.err
        assert (server.runs, "upload llmexp sync" in done.out) == ({}, True)
        assert "wandb: the answer" not in done.out
        for behaviour, says in (
            ("refuses rows", ".* runs are not complete there"),
            ("refuses files", "the server does not have its page and table"),  # unsaid by wandb
        ):
            server.behaviour = behaviour
            done = llmexp(tmp_path, server, "sync", "s")
            assert done.code == 1
            assert re.search(f"^s: answer not uploaded: {says}$", done.out, re.M), done.out
            assert (behaviour == "refuses rows") == (answers(server) == [])
            assert upload_is_pending(tmp_path / "s")
        server.behaviour = "ok"
        done = llmexp(tmp_path, server, "sync", "s")
        assert done.code == 0, done.out + done.err
        check_all_there(tmp_path, server)
        requests = server.requests
        assert "answer" not in llmexp(tmp_path, server, "sync", "s").out
        assert server.requests - requests < 5
        done = llmexp(tmp_path, server, "sync", "--answer", "s")  # again, by itself
        assert "s: answer: http" in done.out
        check_all_there(tmp_path, server)
        check_workspace(server, done.out)

        first = answers(server)[0].variables["notes"]
        done = llmexp(tmp_path, server, "train", *grid, "train.seed=1,2", "sweep.resume=s")
        assert done.code == 0, done.err
        (line,) = re.findall(r"^wandb  (.*)$", done.out, re.M)
        assert line.endswith(next(i for i, r in server.runs.items() if r in answers(server)))
        assert "upload llmexp sync" not in done.out
        check_all_there(tmp_path, server)
        assert answers(server)[0].variables["notes"] != first

        # A run was deleted there.
        del server.runs[next(name for name in server.runs if not line.endswith(name))]
        (answer,), rows = answers(server), len(answers(server)[0].rows)
        done = llmexp(tmp_path, server, "sync", "--answer", "s")
        assert (done.code, done.err) == (1, "")
        assert re.search(r"^s: answer not uploaded: .*Could not find run", done.out, re.M)
        assert len(answer.rows) == rows
        assert upload_is_pending(tmp_path / "s")


def make_sweep(path: Path) -> Path:
    """A sweep whose two runs are in wandb."""
    for number in range(2):
        run_dir = make_run(path / f"{number}-seed={number}", 20)
        amend(run_dir / "config.yaml", tracker={"finish_timeout_s": 2})
        there = {"project": "proj", "step": 20, "exit_code": 0}
        write_position(run_dir, MirrorPosition(f"r{number}", 1280, 20, there, entity="someone"))
    Ledger(path, "x", str(path), "local", [], []).save()
    return path


def python(cwd: Path, script: str, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """What a script does in a process of its own; of its time wandb alone would take more."""
    command, more = [sys.executable, "-c", script, *words], {"capture_output": True, "text": True}
    there = os.environ | {"HOME": str(cwd)} | env
    return subprocess.run(command, cwd=cwd, env=there, timeout=HANG_S, **more)


DELIVER = """
import sys
from pathlib import Path
from llmexp.tracker.answer import SweepAnswer, deliver

sweep = Path("s")
marks = {run: {} for run in sweep.glob("*-*")}
answer = SweepAnswer("it is decided", {"name": ["a"]}, "<p>", marks)
asked = iter([False] * int(sys.argv[1]))  # whether the sweep was stopped
print(deliver(sweep, lambda: answer, lambda: next(asked, True)))
print("the sweep goes on")
"""


@pytest.mark.parametrize(
    ("behaviour", "module", "expected"),
    [
        ("hangs", "", "not done after 2 s"),
        ("hangs", "", "stopped"),
        ("ok", "raise SystemExit(3)", "SystemExit: 3"),
    ],
)
def test_a_bad_server_costs_the_answer_what_it_costs_a_run(
    tmp_path, behaviour: Behaviour, module: str, expected: str
):
    make_sweep(tmp_path / "s")
    (tmp_path / "path").mkdir()
    if module:
        (tmp_path / "path" / "wandb.py").write_text(module)
    asked = "3" if expected == "stopped" else "1000"
    with FakeWandb(behaviour) as server:
        env = {"PYTHONPATH": f"{tmp_path / 'path'}:{ROOT}", "WANDB_MODE": "online"}
        done = python(tmp_path, DELIVER, asked, **env, **login(server.url))
    lines = [f"wandb: the answer is not there ({expected})", "the sweep goes on"]
    said = [line for line in done.stderr.splitlines() if "[wandb.login()]" not in line]
    assert (done.stdout.splitlines(), said) == (lines, [])  # the client may get to its own line
    assert upload_is_pending(tmp_path / "s")
    assert upload_command(tmp_path / "s") == f"llmexp sync {tmp_path / 's'}"


GIVE_UP = """
import gc, sys, time
from llmexp.tracker.wandb import forget_wandb, import_wandb

import_wandb()
asyncer = sys.modules["wandb.sdk.wandb_setup"].singleton().ensure_service()._asyncer
asyncer._ready_event.wait()
asyncer._loop.call_soon_threadsafe(time.sleep, 0.5)  # its thread does not get to run
forget_wandb(kill=True)
del asyncer
gc.collect()
"""


def test_a_client_that_is_given_up_prints_nothing(tmp_path):
    done = python(tmp_path, GIVE_UP, PYTHONPATH=str(ROOT))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_errors_here_cost_no_sweep_its_end(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    sweep = make_sweep(tmp_path / "s")

    def broken() -> SweepAnswer:
        raise ValueError("no page")

    assert deliver(sweep, broken, lambda: True) == ""  # the sweep was stopped
    assert not (sweep / "tracker.json").exists()
    there = "wandb: the answer is not there"
    assert deliver(sweep, broken, lambda: False) == f"{there} (ValueError: no page)"
    (sweep / "tracker.json").unlink()
    (sweep / "tracker.json").mkdir()
    assert deliver(sweep, broken, lambda: False).startswith(f"{there} (Unwritable: [Errno 21]")
    (sweep / "1-seed=1" / "config.yaml").write_text("[")
    assert deliver(sweep, broken, lambda: False).startswith(f"{there} (ConfigError")


@pytest.mark.fresh  # forks have imported plotly
def test_a_comparison_that_fails_does_not_fail_the_upload(tmp_path):
    make_sweep(tmp_path / "s")
    (tmp_path / "plotly.py").write_text("raise RuntimeError('broken')")
    with FakeWandb() as server:
        done = llmexp(tmp_path, server, "sync", "--answer", "s", PYTHONPATH=f"{tmp_path}:{ROOT}")
    *runs, answer = done.out.splitlines()
    assert (done.code, done.err, len(runs)) == (1, "", 2)
    assert all("nothing to send, all 20 rows are there" in line for line in runs)
    assert answer == "s: answer not uploaded: RuntimeError: broken"
