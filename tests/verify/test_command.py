"""`llmexp verify` around its proofs: wrong use, what is printed and recorded, and how it ends when
it is stopped."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest

from llmexp.__main__ import run
from llmexp.cli import verify
from llmexp.data.stream import DataChanged
from llmexp.settings.values import ConfigError
from llmexp.system.child import children, ended
from llmexp.verify import runs
from llmexp.verify.checks import Check, at_most, none_differ
from tests.conftest import HANG_S, TINY, llmexp, start
from tests.tools import wait_for

BASE = [*TINY, "data=synthetic", "data.n_tokens=4000", "data.val_ratio=0", "precision=fp64"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("geometrie", "verify geometrie: there is no such proof. Did you mean geometry?"),
        ("train.max_steps=4", "there is no such proof"),
        ("geometry --steps 0", "--steps 0: at least 2 optimizer steps are needed; for example "),
        ("geometry --steps two", "argument --steps: invalid int value: 'two'"),
        ("data --steps 4", "--steps 4: has no meaning for verify data"),
        ("data --shrink", "--shrink: has no meaning for verify data"),
        ("geometry -m optimizer.lr=0.1,0.2", "verify: takes one config, not a sweep; leave out -m"),
        ("geometry --cfg job", "are flags of llmexp train"),
        ("geometry optimizer.rl=0.1", "Did you mean optimizer.lr?"),
        ("geometry batch.real_batch_size=8 batch.micro_batch_size=auto",
         "batch.micro_batch_size=auto: verify tries no sizes; give a number"),
        ("geometry fork.run=there", "fork.run=there: "),
        ("geometry hydra.run.dir=/proc/none", "hydra.run.dir=/proc/none: "),
    ],
)  # fmt: skip
def test_wrong_use_is_one_line(tmp_path, monkeypatch, capsys, arguments, says):
    monkeypatch.chdir(tmp_path)
    assert run(["verify", *arguments.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert err.startswith("llmexp: ")
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [[], ["--help"], ["geometry", "-h"]])
def test_usage_fits_a_narrow_terminal(monkeypatch, capsys, arguments):
    monkeypatch.setenv("COLUMNS", "60")
    assert run(["verify", *arguments]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in verify.PROOFS)
    assert max(map(len, out.splitlines())) <= 60


@pytest.fixture
def proof(tmp_path, monkeypatch):
    """A proof that finds what a test gives it."""
    found: list[Check | BaseException] = []

    def made_up(config, path, *, steps, shrink):
        for item in found:
            if isinstance(item, BaseException):
                raise item
        return found

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(verify.PROOFS, "made_up", "something")
    monkeypatch.setitem(sys.modules, "llmexp.verify.made_up", types.SimpleNamespace(verify=made_up))
    return found


GOOD, BAD, UNSEEN = (
    at_most("sums agree", 1e-16, 1e-12),
    none_differ("rows", ["step 3"], 8),
    Check("ranks", None, note="one"),
)


@pytest.mark.parametrize(
    ("checks", "code"),
    [
        ([GOOD], 0),
        ([GOOD, UNSEEN], 0),
        ([GOOD, BAD], 1),
        ([UNSEEN], 1),
        ([], 1),
        ([at_most("x", float("nan"), 1)], 1),
    ],
)
def test_the_verdict_its_exit_code_and_its_record(proof, capsys, checks, code):
    proof.extend(checks)
    assert (
        run(["verify", "made_up", "--steps", "5", "optimizer.lr=0.1", "hydra.run.dir=there"])
        == code
    )
    record = json.loads(Path("there/verify.json").read_text(), parse_constant=pytest.fail)
    assert record["passed"] is (code == 0)
    assert [c["passed"] for c in record["checks"]] == [c.passed for c in checks]
    assert (record["steps"], record["overrides"][0]) == (5, "optimizer.lr=0.1")
    assert record["config"]["optimizer"]["lr"] == 0.1
    out = capsys.readouterr().out
    assert out.splitlines()[-2].startswith("PASS: made_up" if code == 0 else "FAIL: made_up")
    for check in checks:
        assert (
            f"{'PASS' if check.passed else 'FAIL' if check.passed is False else '-   '}  "
            f"{check.what}" in out
        )


def test_what_is_not_finite_is_within_no_limit_and_comparing_nothing_proves_nothing():
    for found in (math.nan, math.inf, -math.inf):
        assert not any(at_most("x", found, limit).passed for limit in (1.0, math.inf))
    assert [none_differ("rows", [], of).passed for of in (0, 1)] == [False, True]


def test_a_path_is_never_broken(proof, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    proof.append(GOOD)
    path = "a-long-name-" * 6 + "/and-more"
    assert run(["verify", "made_up", f"hydra.run.dir={path}"]) == 0
    assert capsys.readouterr().out.count(path) == 2


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ConfigError("x/fp64: exit code 3: boom"), "x/fp64: exit code 3: boom"),
        (DataChanged("train.npy: this token file was cut"), "train.npy: this token file was cut"),
        (OSError(28, "No space left", "there/x"), "[Errno 28] No space left: 'there/x'"),
        (KeyError("a"), "verify made_up could not be made: KeyError: 'a' ("),
    ],
    ids=["run", "data", "disk", "model"],
)  # fmt: skip
def test_what_cannot_be_made_is_recorded_without_a_verdict(proof, capsys, error, says):
    proof.append(error)
    assert run(["verify", "made_up", "hydra.run.dir=there"]) == 2
    record = json.loads(Path("there/verify.json").read_text())
    assert record["passed"] is None
    assert record["error"].startswith(says)
    assert f"llmexp: {record['error']}\n" in capsys.readouterr().err


SECRET = "k-0123456789abcdef"


def test_no_secret_is_printed_or_recorded(proof, capsys, monkeypatch):
    """Neither from a check nor from an error; and one on the command line is refused, as by
    train."""
    monkeypatch.setenv("MY_API_KEY", SECRET)
    proof.append(
        Check(f"sha256 of /data/{SECRET}/a.bin", True, SECRET, SECRET, note=f"in {SECRET}")
    )
    assert run(["verify", "made_up", "hydra.run.dir=a"]) == 0
    proof[:] = [ConfigError(f"/data/{SECRET}: boom")]
    assert run(["verify", "made_up", "hydra.run.dir=b"]) == 2
    assert run(["verify", "made_up", "hydra.run.dir=c", f"++data.note={SECRET}"]) == 2
    out, err = capsys.readouterr()
    assert SECRET not in out + err
    assert "sha256 of /data/<$MY_API_KEY>/a.bin: <$MY_API_KEY>" in out
    assert "/data/<$MY_API_KEY>: boom" in err
    assert not Path("c").exists()
    for name in ("a", "b"):
        text = Path(name, "verify.json").read_text()
        assert SECRET not in text
        assert "$MY_API_KEY" in text


def test_a_folder_in_use_is_refused(proof, capsys):
    """Runs that lie there would be gone on with."""
    Path("there/fp64").mkdir(parents=True)
    assert run(["verify", "made_up", "hydra.run.dir=there"]) == 2
    assert (
        "hydra.run.dir=there: is not empty; choose a new folder, for example there-2"
        in capsys.readouterr().err
    )
    assert [p.name for p in Path("there").iterdir()] == ["fp64"]


def test_a_run_that_fails_is_named_with_its_words(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def breaks(event, context):\n    raise ZeroDivisionError('by zero')\n"
    )
    result = llmexp(
        "verify",
        "geometry",
        *BASE,
        "hooks=[mine.breaks]",
        "--allow=mine",
        "hydra.run.dir=v",
        cwd=tmp_path,
    )
    assert result.code == 2
    assert "v/fp64-one_batch: this run of the verification ended with exit code 3" in result.err
    assert "the hook mine.breaks failed at" in result.err
    assert "Traceback" not in result.err
    assert "by zero" in json.loads((tmp_path / "v" / "verify.json").read_text())["error"]


def test_ctrl_c_counts_although_the_run_came_to_its_end(tmp_path, monkeypatch):
    """A worker that heeds the signal too late, or not at all, ends with 0."""
    program = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGINT, lambda *_: os._exit(0))\n"
        "print('here', flush=True)\n"
        "time.sleep(60)"
    )
    before, done = signal.getsignal(signal.SIGINT), threading.Event()
    threads: list[threading.Thread] = []

    def interrupt() -> None:  # not sooner than it is handled, and not in a later test
        while signal.getsignal(signal.SIGINT) is before:
            if done.wait(0.01):
                return
        os.kill(os.getpid(), signal.SIGINT)

    def begin(path: Path, config: object, **env: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", program]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0)
        assert process.stdout is not None
        process.stdout.readline()
        threads.append(threading.Thread(target=interrupt))
        threads[0].start()
        return process

    monkeypatch.setattr(runs, "start_run", begin)
    try:
        with pytest.raises(KeyboardInterrupt):
            runs.train_folder(tmp_path, None)
    finally:
        done.set()
        for thread in threads:
            thread.join()


@pytest.mark.skipif(sys.platform != "linux", reason="finds the worker in /proc")
@pytest.mark.fresh  # its workers are no children of the stand-in
def test_ctrl_c_ends_it_and_leaves_no_worker(tmp_path):
    process = start("verify", "geometry", *BASE, "hydra.run.dir=v", cwd=tmp_path)
    workers = wait_for(lambda: children(process.pid), process)
    time.sleep(0.5)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 130, out + err
    assert "llmexp: stopped; nothing is proven" in err
    assert "Traceback" not in err
    assert all(map(ended, workers))
