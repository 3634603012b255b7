"""`llmexp verify` around its proofs: wrong use, what is printed and recorded, and how it ends when
it is stopped."""

import json
import math
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from llmexp.__main__ import run
from llmexp.cli import verify
from llmexp.config.values import ConfigError
from llmexp.data.stream import DataChanged
from llmexp.system.child import children, ended
from llmexp.verify import resume, runs
from llmexp.verify.checks import Check, at_most, none_differ
from tests.conftest import HANG_S, TINY, llmexp, start
from tests.tools import wait_for

BASE = [*TINY, "data=synthetic", "data.n_tokens=4000", "data.val_ratio=0", "precision=fp64"]


@pytest.fixture
def proof(tmp_path, monkeypatch):
    """A proof that finds what a test gives it."""
    found: list[Check | BaseException] = []

    def made_up(config, path, steps, shrink):
        for item in found:
            if isinstance(item, BaseException):
                raise item
        return found

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(verify.PROOFS, "made_up", "something")
    monkeypatch.setitem(sys.modules, "llmexp.verify.made_up", types.SimpleNamespace(verify=made_up))
    return found


GOOD = at_most("sums agree", 1e-16, 1e-12)
BAD = none_differ("rows", ["step 3"], 8)
UNSEEN = Check("ranks", None, note="one")
# a path is never broken, however narrow the terminal is
THERE = "hydra.run.dir=there/" + "a-long-name-" * 6 + "/and-more"


def recorded() -> dict:
    text = Path(THERE.partition("=")[2], "verify.json").read_text()
    return json.loads(text, parse_constant=pytest.fail)


@pytest.mark.parametrize(
    ("checks", "code"),
    [
        ([GOOD, UNSEEN], 0),
        ([GOOD, BAD], 1),
        ([UNSEEN], 1),
        ([], 1),
        ([at_most("x", math.nan, 1)], 1),
    ],
    ids=["good", "bad", "unseen", "none", "nan"],
)
def test_the_verdict_its_exit_code_and_its_record(
    proof, capsys, monkeypatch, words, request, checks, code
):
    monkeypatch.setenv("COLUMNS", "60")
    proof.extend(checks)
    assert run(["verify", "made_up", "--steps", "5", "optimizer.lr=0.1", THERE]) == code
    record = recorded()
    assert record["passed"] is (code == 0)
    assert [c["passed"] for c in record["checks"]] == [c.passed for c in checks]
    assert (record["steps"], record["overrides"][0]) == (5, "optimizer.lr=0.1")
    assert record["config"]["optimizer"]["lr"] == 0.1
    words.hidden[r"\b\d+ s\b"] = "N s"
    words("verify/verdict", capsys.readouterr().out, request.node.callspec.id)


def test_what_is_not_finite_is_within_no_limit_and_comparing_nothing_proves_nothing():
    for found in (math.nan, math.inf, -math.inf):
        assert not any(at_most("x", found, limit).passed for limit in (1.0, math.inf))
    assert [none_differ("rows", [], of).passed for of in (0, 1)] == [False, True]


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("cannot_verify", "x/fp64: exit code 3: boom"),
        DataChanged("train.npy: this token file was cut"),
        OSError(28, "No space left", "there/x"),
        KeyError("a"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_cannot_be_made_is_recorded_without_a_verdict(proof, capsys, words, error):
    proof.append(error)
    assert run(["verify", "made_up", THERE]) == 2
    record = recorded()
    assert record["passed"] is None
    assert f"llmexp: {record['error']}\n" in capsys.readouterr().err
    words.hidden[r"\(.*test_command.py:\d+\)"] = "(FILE:LINE)"
    words("verify/errors", record["error"], type(error).__name__)


def test_no_secret_is_printed_or_recorded(proof, capsys, monkeypatch):
    """Neither from a check nor from an error; and one on the command line is refused, as by
    train."""
    secret = "k-0123456789abcdef"
    monkeypatch.setenv("MY_API_KEY", secret)
    proof.append(Check(f"sha256 of /data/{secret}", True, secret, secret, note=f"in {secret}"))
    assert run(["verify", "made_up", "hydra.run.dir=a"]) == 0
    proof[:] = [ConfigError("cannot_verify", f"/data/{secret}: boom")]
    assert run(["verify", "made_up", "hydra.run.dir=b"]) == 2
    assert run(["verify", "made_up", "hydra.run.dir=c", f"++data.note={secret}"]) == 2
    out, err = capsys.readouterr()
    assert "/data/<$MY_API_KEY>: <$MY_API_KEY>" in out
    assert "/data/<$MY_API_KEY>: boom" in err
    assert not Path("c").exists()
    records = [Path(name, "verify.json").read_text() for name in ("a", "b")]
    assert all("$MY_API_KEY" in text for text in records)
    assert not any(secret in text for text in (out, err, *records))


def test_a_run_that_fails_is_named_with_its_words(tmp_path):
    plan = "step_start-1:raise"
    broken = ["hooks=[own.faults.act]", "--allow=own", "hydra.run.dir=v"]
    result = llmexp("verify", "geometry", *BASE, *broken, cwd=tmp_path, FAULT_PLAN=plan)
    assert result.code == 2
    error = result.json("verify.json")["error"]
    assert error.startswith("v/fp64-one_batch: ")
    assert "exit code 3" in error
    assert "own.faults.act" in error
    assert f"llmexp: {error}\n" in result.err
    assert "Traceback" not in result.err


@pytest.mark.parametrize("kill", [False, True])
def test_ctrl_c_is_not_lost(kill):
    """Where the worker is killed as planned, or heeds it so late that it ends with 0."""
    program = "import os, signal, time; signal.signal(signal.SIGINT, lambda *_: os._exit(0))"
    program += "; print(flush=True); time.sleep(60)"
    command = [sys.executable, "-c", program]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0)

    def strike() -> None:
        with runs.ended_with_us(process):
            os.kill(os.getpid(), signal.SIGINT)
            if kill:
                resume._kill_all(process, [process.pid])
            else:
                assert process.wait() == 0

    with process.stdout:
        process.stdout.readline()
        with pytest.raises(KeyboardInterrupt):
            strike()
    assert process.poll() is not None


@pytest.mark.skipif(sys.platform != "linux", reason="finds the worker in /proc")
@pytest.mark.fresh  # a fork has a child from the start: its template
def test_ctrl_c_ends_it_and_leaves_no_worker(tmp_path):
    process = start("verify", "geometry", *BASE, "hydra.run.dir=v", cwd=tmp_path)
    workers = wait_for(lambda: children(process.pid), process)
    time.sleep(0.5)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 130, out + err
    assert "Traceback" not in err
    assert all(map(ended, workers))
