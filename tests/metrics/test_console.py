"""The console: rows as lines, durations, the banner, and the progress bar on real terminals."""

import fcntl
import io
import json
import math
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llmexp.metrics.keys import LOSSES, ROW_KEYS, TIMINGS
from llmexp.metrics.lines import format_row
from llmexp.system.console import Console, banner
from llmexp.system.text import duration
from tests.conftest import HANG_S, ROOT

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
COLORED = re.compile(r"\x1b\[[0-9;]*[1-9][0-9;]*m")
ROW = {
    "step": 10, "tokens_seen": 20480, "epoch": 0.12, "lr": 3e-5, "step_time": 0.1234,
    "tokens_per_sec": 8312.4, "grad_norm": 1.23449, "train/loss": 4.98761, "val/loss": 5.01234,
    "val/ppl": 150.26, "eta": 83.4, "amp": 0,
}  # fmt: skip


def test_a_row_is_a_line():
    whole = (
        "step 10/300 | lr 3.000e-05 | step_time 0.123 s | tokens/s 8,312 | grad_norm 1.234 | "
        "train loss 4.9876 | val loss 5.0123 | val ppl 150.3 | eta 1m 23s"
    )
    some = {"step": 1, "epoch": None, "skipped": True, "amp": 1, "mfu": 0.4}
    for row, more, line in (
        (ROW | {"skipped": False}, [], whole),
        (ROW, [1.0], whole),
        (ROW, [1.5], f"epoch 0.12 | {whole}"),
        (some, [], "step 1/300 | skipped"),
        ({}, [], ""),
    ):
        assert re.sub(" +", " ", format_row(row, 300, *more)) == line
    ordinary = {k: v for k, v in ROW.items() if not k.startswith("val/")}
    assert len(format_row(ordinary, 12345)) <= 132


def rows_with(**values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    others = {
        "epoch": st.floats(0, 99), "step": st.integers(1, 12345), "lr": st.floats(1e-8, 1),
        "step_time": st.floats(1e-3, 999), "tokens_per_sec": st.floats(0, 9_999_999),
        "eta": st.floats(0, 8e6), "amp": st.sampled_from([0, 1]),
    }  # fmt: skip
    return st.fixed_dictionaries(others | values)


IN_ROWS = ("train/loss", "val/loss")
usual_rows = rows_with(
    **{"grad_norm": st.floats(1e-3, 1e5), "val/ppl": st.floats(1, 1e5)},
    **dict.fromkeys(IN_ROWS, st.floats(1e-3, 99)),
)
any_rows = rows_with(**dict.fromkeys(("grad_norm", "val/ppl", *IN_ROWS), st.floats(1e-9, 1e9)))


@given(usual_rows, usual_rows)
def test_rows_stand_in_columns(a, b):
    bars = [[m.start() for m in re.finditer(r"\|", format_row(row, 12345, 9))] for row in (a, b)]
    assert bars[0] == bars[1]


@given(any_rows)
@example(
    {"grad_norm": 9.9996, "val/ppl": 999999.6, "train/loss": 1e-3, "lr": 3e-5, "step_time": 0.09996}
)
def test_rounding_hides_nothing(row):
    # Half a unit of the last digit shown: 4 significant digits, 3 for the time, 4 decimals of a
    # loss.
    relative = {"lr": 5e-4, "grad_norm": 5e-4, "val ppl": 5e-4, "step_time": 5e-3}
    for cell in format_row(row, 12345, 9).split(" | "):
        label, value = re.fullmatch(r"([a-z_/ ]*[a-z_]) +(.*)", cell).groups()
        key = label.replace(" ", "/")
        if label in relative or key in IN_ROWS:
            rel, off = relative.get(label, 5e-5), 5e-5 if key in IN_ROWS else 0.0
            found = float(value.removesuffix(" s").replace(",", ""))
            assert found == pytest.approx(row[key], rel=rel * (1 + 1e-9), abs=off * (1 + 1e-9))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0])
def test_odd_values_are_shown(value):
    line = format_row(dict.fromkeys(ROW, value) | {"step": 3, "amp": 1}, 10, 9)
    assert line.count("|") == 9
    assert value == 0 or str(value) in line


def test_the_table_of_keys_knows_every_key_of_a_row():
    for file in (ROOT / "tests/golden/recorded").glob("*.json"):
        for run in json.loads(file.read_text())["runs"].values():
            for row in run["rows"]:
                assert row.keys() <= ROW_KEYS.keys()
    assert {*LOSSES, *TIMINGS} <= ROW_KEYS.keys()
    assert {key.better for key in ROW_KEYS.values()} == {"", "lower", "higher"}


TIMES = {
    0: "0.0s", 9.96: "10s", 59.6: "1m 00s", 3599.6: "1h 00m", 86371: "1d 00h", 273600: "3d 04h",
    math.nan: "?", math.inf: "?", -1: "?",
}  # fmt: skip


@given(st.floats(0, 1e9))
def test_duration_is_near_and_short(seconds):
    assert {value: duration(value) for value in TIMES} == TIMES
    text = duration(seconds)
    unit = {"s": 1, "m": 60, "h": 3600, "d": 86400}
    parts = [(float(n), letter) for n, letter in re.findall(r"([\d.]+)([smhd])", text)]
    last = 0.1 if "." in text else unit[parts[-1][1]]
    value = sum(number * unit[letter] for number, letter in parts)
    assert abs(value - seconds) <= last / 2 + 1e-6
    assert all(n < {"s": 60, "m": 60, "h": 24}.get(letter, math.inf) for n, letter in parts)


def test_a_banner_aligns_and_wraps(monkeypatch):
    path = "/a/path/that/is/longer/than/the/whole/line/and/must/stay/in/one-piece"
    batch = "8 x 4 x 2 = 64 sequences, which is 65536 tokens"
    text = banner([("model", "gpt"), ("real batch", batch), ("dir", path)], 40)
    assert text.splitlines() == [
        "model       gpt",
        "real batch  8 x 4 x 2 = 64 sequences,",
        "            which is 65536 tokens",
        f"dir         {path}",
    ]
    assert banner([("a", "one\n\ntwo"), ("b", "")], 40) == "a  one\n\n   two\nb"
    assert banner([]) == ""
    table = " limit  clipped  mean\n     1    50.0%   0.9  this run"
    lines = ["a   limit  clipped  mean", "        1    50.0%   0.9  this run"]
    assert banner([("a", table)], 10).split("\n") == lines
    monkeypatch.setenv("COLUMNS", "60")
    words = [("label", "word " * 100)]
    assert max(map(len, banner(words).splitlines())) in range(55, 61)
    assert banner(words) == banner(words, 60)


def test_plain_stream_and_log_get_the_same_lines_without_escapes(tmp_path):
    stream, log = io.StringIO(), tmp_path / "train.log"
    console = Console(log, 10, stream=stream)
    console.line("start\n  second line")
    assert not console.live  # so that nobody moves a bar
    console.line(
        "\x1b[31mred\x1b[0m \x1b]8;;http://x\x1b\\link\x1b]8;;\x07 bell\x07 back\rward "
        "[bold]kept[/bold] é"
    )
    console.close()
    console.close()
    expected = "start\n  second line\nred link bell backward [bold]kept[/bold] é\n"
    assert stream.getvalue() == log.read_text(encoding="utf-8") == expected
    assert console.failure is None
    again = Console(log, 10, stream=io.StringIO())
    again.line("resumed")
    again.close()
    assert log.read_text(encoding="utf-8") == expected + "resumed\n"


def test_full_disk_on_the_log_is_kept_for_the_caller(tmp_path):
    stream = io.StringIO()
    console = Console(Path("/dev/full"), 10, stream=stream)
    assert console.failure is None
    console.line("one")
    first = console.failure
    assert isinstance(first, OSError)
    console.line("two")
    assert console.failure is first
    console.close()
    said = "WARNING: /dev/full cannot be written (No space left on device); the run continues\n"
    assert stream.getvalue() == f"{said}one\ntwo\n"
    console = Console(tmp_path / "missing" / "train.log", 10, stream=stream)
    assert isinstance(console.failure, FileNotFoundError)
    console.line("three")
    assert stream.getvalue().endswith("three\n")


# Programs with a console, whose log is their argument.
BEGIN = """
import signal, sys, threading, time
from pathlib import Path
from llmexp.system.console import Console
signal.signal(signal.SIGHUP, signal.SIG_IGN)
def console_of(steps):
    return Console(Path(sys.argv[1]), steps, sys.stdout)
"""
BAR = """
console = console_of(300)
console.line("before")
for step in (101, 150, 200, 300):
    console.progress(step, 4.98761, 8312.4, 83)
    time.sleep(0.21)
    console.line(f"row {step} " + "x" * 30)
console.close()
console.line("after")
"""
ROWS = [f"row {step} " + "x" * 30 for step in (101, 150, 200, 300)]


def program(log: Path, code: str, stream: Any, **env: str) -> subprocess.Popen[bytes]:
    """Start a program; `stream` is its stdin and stdout, and what goes to stderr is kept."""
    apart = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")
    clean = {k: v for k, v in os.environ.items() if k not in apart}
    environment = clean | {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"} | env
    return subprocess.Popen(
        [sys.executable, "-c", BEGIN + code, str(log)], stdin=stream, stdout=stream,
        stderr=subprocess.PIPE, env=environment,
    )  # fmt: skip


def succeeded(process: subprocess.Popen[bytes]) -> None:
    _, err = process.communicate(timeout=HANG_S)
    assert (process.returncode, err) == (0, b"")


def on_terminal(log: Path, code: str, columns: int = 80, until: str | None = None, **env: str):
    """The output on a terminal of that width, which hangs up where it has shown `until`."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = program(log, code, slave, **env)
    os.close(slave)
    out = b""
    try:
        while (until is None or until.encode() not in out) and (data := os.read(master, 65536)):
            out += data
    except OSError:  # the other end is closed
        pass
    os.close(master)
    succeeded(process)
    return out.decode()


def screen(text: str) -> list[str]:
    """The lines that a terminal shows in the end, for the few controls that the bar uses."""
    lines, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|[\s\S]", text):
        if token == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif token == "\r":
            column = 0
        elif token == "\x1b[2K":
            lines[row] = ""
        elif re.fullmatch(r"\x1b\[\d*A", token):
            row -= int(token[2:-1] or 1)
        elif not token.startswith("\x1b"):
            lines[row] = lines[row][:column].ljust(column) + token + lines[row][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines if line.strip()]


@pytest.mark.parametrize("columns", [100, 12])
def test_the_bar_on_a_terminal(tmp_path, columns):
    out = on_terminal(tmp_path / "log", BAR, columns)
    drawn = [ESCAPE.sub("", part) for line in out.split("\n") for part in line.split("\r")]
    bars = [text for text in drawn if "/300" in text]
    assert len(bars) >= 4
    assert all(len(bar) <= columns for bar in bars), bars  # a line that is full would wrap
    assert all(f"step {step}/300" in out for step in (101, 150, 200, 300))
    if columns == 100:
        assert "loss 4.9876  8,312 tokens/s  eta 1m 23s" in bars[0]
        assert all("━" * 10 in bar for bar in bars)
        assert COLORED.search(out)
    # In the end the lines stand above each other and the bar is gone.
    assert screen(out) == ["before", *ROWS, "after"]
    assert out.rfind("\x1b[?25h") > out.rfind("\x1b[?25l")  # the cursor is visible


def test_terminals_without_colors_or_controls_and_one_that_hangs_up(tmp_path):
    unknown = BAR.replace("4.98761, 8312.4, 83", "None, 8312.4, None")
    without = on_terminal(tmp_path / "log", unknown, NO_COLOR="1")
    assert "step 150/300  8,312 tokens/s" in without
    assert "loss" not in without
    assert not COLORED.search(without)
    dumb = on_terminal(tmp_path / "log", BAR, TERM="dumb")
    assert "\x1b" not in dumb
    assert "/300" not in dumb
    assert screen(dumb) == ["before", *ROWS, "after"]
    more = "print('x' * 100000)"
    on_terminal(tmp_path / "log of the last", BAR + more, until="step 101/300")
    assert (tmp_path / "log of the last").read_text().splitlines() == ["before", *ROWS]


def test_the_bar_is_throttled_and_starts_no_thread(tmp_path):
    code = """
console = console_of(10**9)
start = time.monotonic()
calls = 0
while calls < 500 or time.monotonic() - start < 0.5:
    calls += 1
    console.progress(calls, 1.0, 1.0, 1.0)
assert threading.active_count() == 1, threading.enumerate()
console.close()
print("took", time.monotonic() - start)
"""
    out = ESCAPE.sub("", on_terminal(tmp_path / "log", code))
    (elapsed,) = re.findall(r"took ([\d.]+)", out)
    # the first one comes at once, the last one at the end
    assert 1 <= out.count("/1000000000") <= float(elapsed) / 0.2 + 2


def test_an_ascii_terminal_shows_replacements(tmp_path):
    """tests/cli/test_cli.py has streams."""
    code = """
console = console_of(10)
console.progress(1, 1.0, 1.0, 1.0)
console.line("naïve 实验 \\udc80 end")
console.close()
"""
    out = on_terminal(tmp_path / "log", code, PYTHONIOENCODING="ascii")
    assert "na?ve ?? ? end" in out
    assert (tmp_path / "log").read_text(encoding="utf-8") == "naïve 实验 ? end\n"


def test_a_full_disk_under_stdout_leaves_training_unaffected(tmp_path):
    """tests/cli/test_cli.py has pipes and streams that are closed."""
    code = """
console = console_of(10)
for i in range(2000):
    console.line(f"line {i} " + "x" * 100)
    console.progress(i, 1.0, 1.0, 1.0)
console.close()
print("x" * 100000)
"""
    with open("/dev/full", "w") as full:
        succeeded(program(tmp_path / "log", code, full))
    assert len((tmp_path / "log").read_text().splitlines()) == 2000
