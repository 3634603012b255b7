"""A folder of somebody else's: each of its files may be anything, and each command that reads it
ends, with an exit code and the name of the folder, and without a trace.

A command runs in a fork of this process, with a limit of processor time: a load makes it no slower.
"""

import os
import random
import re
import resource
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from llmexp.__main__ import run
from llmexp.compare import reading
from llmexp.folders.folder import RunFolder
from llmexp.folders.steps import STEP_RECORD, steps_up_to
from tests.conftest import TINY, Result, llmexp
from tests.tools import cut_after

CPU_S = 60  # of a command, against hangs: it takes one
SYNTHETIC = [*TINY, "data=synthetic", "data.n_tokens=5000", "batch.micro_batch_size=4"]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A sweep of two points, a fork of one, and a run that was cut off."""
    home = tmp_path_factory.mktemp("foreign")
    often = ["train.log_every=1", "checkpoint.every=4", "train.max_steps=8"]
    often += ["train.eval_every=4", "metrics.layers_every=2"]
    done = llmexp(
        "train", "-m", *SYNTHETIC, *often, "train.seed=1,2", "hydra.sweep.dir=sweep", cwd=home
    )
    assert done.code == 0, done.err
    fork = ["fork.run=sweep/0-seed_1", "fork.step=4", "train.max_steps=6", "hydra.run.dir=fork"]
    assert llmexp("train", *fork, cwd=home).code == 0
    cut_after(Result(0, "", "", home / "sweep/0-seed_1"), home, 4).rename(home / "cut")
    return home


def bind(path: Path) -> None:
    with tempfile.TemporaryDirectory() as short, socket.socket(socket.AF_UNIX) as s:
        s.bind(f"{short}/s")  # such a name may not be long
        os.rename(f"{short}/s", path)


def doubling(levels: int) -> bytes:
    """YAML whose aliases double so many times."""
    lines = [f"a{i}: &a{i} {{p: *a{i - 1}, q: *a{i - 1}}}" for i in range(1, levels)]
    return "\n".join(["a0: &a0 {x: 1}", *lines, ""]).encode()


def bringing(levels: int) -> bytes:
    """The same by interpolations."""
    names = [f"${{user.a{i}}}" for i in range(levels)]
    lines = [f"  a{i}: {{p: '{n}', q: '{n}'}}" for i, n in enumerate(names, 1)]
    return "\n".join(["user:", "  a0: {x: 1}", *lines, ""]).encode()


NUMBER = re.compile(rb"(?<=[:\[])(\s*)-?\d[\d.e+-]*(?=\s*[,\]}\n])")
CONTENTS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda b: b"",
    "half": lambda b: b[: len(b) // 2],
    "zeros": lambda b: b[:20] + b"\0" * 4096 + b[20:],
    "no text": lambda b: b.replace(b"e", b"\xff", 9),
    "surrogates and escapes": lambda b: b.replace(b"seed", b"se\\ud800\\u001b[2J<script>ed"),
    "byte order mark": lambda b: b"\xef\xbb\xbf" + b,
    "lines of Windows": lambda b: b.replace(b"\n", b"\r\n"),
    "a list": lambda b: b"[1, [2]]\n",
    "a number": lambda b: b"5\n",
    "deep": lambda b: b"[" * 100_000 + b"]" * 100_000 + b"\n",
    "deep inside": lambda b: b'{"step": 1, "x": ' + b"[" * 900 + b"]" * 900 + b"}\n",
    "long": lambda b: b + b'{"step": 999, "x": "' + b"y" * 2**22 + b'"}\n',
    "many values": lambda b: b + b'{"step": 999, "x": [' + b"1," * 2**20 + b"1]}\n",
    "twice": lambda b: b + b,
    "keys twice": lambda b: b.replace(b'"', b'"step": 7, "', 1) + b"train: 1\ntrain: 2\n",
}
NUMBERS = (
    b'"low"', b"-5", b"0", b"1e308", b"1e999", b"NaN", b"true", b"[1]", b'{"a": 1}', b"null",
    b"0.5", b"1" + b"0" * 30, b"1" + b"0" * 400,
)  # fmt: skip
for each in NUMBERS:
    CONTENTS[f"numbers: {each[:32].decode()}"] = lambda b, n=each: NUMBER.sub(rb"\g<1>" + n, b)
KINDS: dict[str, Callable[[Path], object]] = {
    "gone": lambda path: None,
    "a folder": Path.mkdir,
    "a pipe": os.mkfifo,
    "a socket": bind,
    "a link": lambda path: path.symlink_to("/dev/zero"),
    "a loop": lambda path: path.symlink_to(path.name),
    "dangling": lambda path: path.symlink_to("nowhere"),
}
OF_YAML: dict[str, Callable[[bytes], bytes]] = {
    "doubling": lambda b: doubling(40),
    "doubling inside": lambda b: b"model:\n " + doubling(40).replace(b"\n", b"\n "),
    "bringing": lambda b: b.replace(b"user: {}\n", bringing(40)),
    "a cycle": lambda b: b"model: &c [*c]\n",
    "a cycle of keys": lambda b: b"model: &c {x: *c}\n",
    "deep blocks": lambda b: b"".join(b" " * n + b"a:\n" for n in range(3000)),
    "other values": lambda b: b + b"a: 2020-01-01\n",
    "a tag": lambda b: b + b"a: !!binary aGVsbG8=\n",
    "digits": lambda b: b + b"a: 0x" + b"f" * 200_000 + b"\n",
    "times": lambda b: b + b"a: " + b"1:" * 2**18 + b"1\n",
}
FILES = (
    "sweep/sweep.json", "sweep/sweep.jsonl", "sweep/.lock-sweep",
    *(f"sweep/0-seed_1/{name}" for name in (
        "config.yaml", "run.json", "status.json", "metrics.jsonl", "layers.jsonl", "tracker.json",
        "provenance/provenance.json", "provenance/packages.txt")),
    "fork/lineage.jsonl", "fork/run.json",
    *(f"cut/{name}" for name in (
        "config.yaml", "run.json", "status.json", "metrics.jsonl", "layers.jsonl", "steps.bin",
        "train.log",
        ".lock", ".lock-ranks", "spikes", "spikes/5.json", "checkpoints",
        "checkpoints/step_00000004/manifest.json", "checkpoints/step_00000004/state.pt",
        "checkpoints/step_00000004/model.safetensors")),
)  # fmt: skip
LOOKING = (
    ["runs", "."], ["runs", "--json", "."], ["runs", "--remove-checkpoints", "."],
    ["compare", ".", "--why", "--out", "page.html", "--out", "table.csv"], ["next", "."],
    ["fit", ".", "--form", "power", "--by", "tokens"], ["sync", "--dry-run", "."],
)  # fmt: skip


def commands(file: str) -> list[list[str]]:
    """The commands that read the folder of a file."""
    path = "cut" if file.startswith("cut") else str(Path(file).parent).partition("/prov")[0]
    of_run = [
        ["resume", path], ["sample", path, "--tokens", "2"], ["evaluate", path],
        ["export", path, "--to", "hf", "exported"],
        ["average", path, "--last", "1", "--out", "mean"],
        ["plan", f"fork.run={path}", "train.max_steps=20"], ["replay", f"{path}@6"],
        ["explain", "train.max_steps", f"fork.run={path}"],
    ]  # fmt: skip
    return [*LOOKING, *(of_run if path != "sweep" else [["resume", "sweep"]])]


CASES = [
    (file, damage, command)
    for file in FILES
    for damage in [*CONTENTS, *KINDS, *(OF_YAML if file.endswith(".yaml") else ())]
    for command in commands(file)
]


def in_fork(command: list[str], home: Path) -> tuple[int, str]:
    """The exit code of a command in a fork of this process, and all that it prints."""
    printed = home / "printed"
    if (pid := os.fork()) == 0:
        code = 99
        try:
            where = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(where, 1), os.dup2(where, 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", errors="backslashreplace")
            resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 5))
            signal.alarm(20 * CPU_S)  # for what waits without end
            os.chdir(home)
            code = run(command)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code, printed.read_text(errors="replace")


def attempt(base: Path, home: Path, file: str, damage: str, command: list[str]) -> None:
    """Run a command beside a damaged file, and hold it against the promise."""
    shutil.copytree(base, home)
    path = home / file
    before = path.read_bytes() if path.is_file() else b'{"step": 1}\n'
    path.parent.mkdir(exist_ok=True)
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    if damage in KINDS:
        KINDS[damage](path)
    else:
        path.write_bytes((CONTENTS | OF_YAML)[damage](before))
    code, printed = in_fork(command, home)
    about = f"{file}, {damage}: llmexp {' '.join(command)}: {code}\n{printed[-3000:]}"
    # a run that is gone on with may fail where it has to write
    assert code in (0, 1, 2, *[3] * (command[0] == "resume")), about
    assert "Traceback" not in printed, about
    assert "\x1b" not in printed, about
    if code == 2 and command[0] not in ("fit", "next", "compare"):  # these take many folders
        assert Path(file).parts[0] in printed, about
    shutil.rmtree(home)


SAMPLES = [random.Random(part).sample(CASES, 16) for part in (0, 1)]
OF_FILES = [[case for case in CASES if case[0] == file] for file in FILES]


@pytest.mark.parametrize(
    "cases", [*SAMPLES, *(pytest.param(cases, marks=pytest.mark.slow) for cases in OF_FILES)]
)
def test_whatever_a_file_holds_a_command_ends_in_words(base, tmp_path, forking, cases):
    for number, case in enumerate(cases):
        attempt(base, tmp_path / str(number), *case)


def doubled(size: int) -> bytes:
    return b"".join(b"a%d: &a%d [x]\nb%d: *a%d\n" % (i, i, i, i) for i in range(size // 40))


def row(size: int) -> bytes:
    return b'{"step": 1, "x": "' + b"y" * size + b'"}\n'


READ: dict[str, Callable[[Path], object]] = {
    "rows": lambda folder: reading.read_columns(folder / "metrics.jsonl"),
    "last": lambda folder: RunFolder(folder, strict=False).last_row(),
    "facts": lambda folder: RunFolder(folder, strict=False).facts,
    "config": lambda folder: RunFolder(folder, strict=False).config,
}


@pytest.mark.parametrize(
    ("name", "made", "read"),
    [
        ("metrics.jsonl", row, "last"),
        ("metrics.jsonl", lambda n: row(n)[:-3], "last"),
        ("metrics.jsonl", row, "rows"),
        ("metrics.jsonl", lambda n: b'{"step": 1}\n' * (n // 12), "rows"),
        ("run.json", lambda n: b'{"a": [' + b"[1]," * (n // 4) + b"1]}", "facts"),
        ("config.yaml", doubled, "config"),
        ("config.yaml", lambda n: b"a: " + b"[" * n, "config"),
    ],
)
def test_reading_takes_linear_time(tmp_path, name, made, read):
    """Eight times as many bytes take some eight times as long, and not 64 times, in processor
    time."""
    took = []
    for size in (2**19, 2**22):
        (tmp_path / name).write_bytes(made(size))
        tries = []
        for _ in range(3):
            begun = time.process_time()
            found = READ[read](tmp_path)
            tries.append(time.process_time() - begun)
        took.append(min(tries) + 0.02)  # below that clocks decide
        assert found is not None or read == "last"
    assert took[1] < 8 * 4 * took[0], took


def test_a_step_far_beyond_the_end_asks_for_no_memory(tmp_path):
    records = STEP_RECORD.pack(1.0, 2.0, 3.0, 4.0) * 3
    (tmp_path / "steps.bin").write_bytes(records + b"cut")
    assert steps_up_to(tmp_path, 2**53) == records
    assert steps_up_to(tmp_path, 2) == records[: 2 * STEP_RECORD.size]
