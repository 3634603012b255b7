"""The console: rows as lines, durations, the banner, and the progress bar on real terminals."""

import fcntl
import io
import math
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llmexp.metrics.lines import format_row
from llmexp.system.console import Console, banner
from llmexp.system.text import duration
from tests.conftest import HANG_S

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
ROW = {
    "step": 10,
    "tokens_seen": 20480,
    "epoch": 0.12,
    "lr": 3e-5,
    "step_time": 0.1234,
    "tokens_per_sec": 8312.4,
    "grad_norm": 1.23449,
    "train/loss": 4.98761,
    "val/loss": 5.01234,
    "val/ppl": 150.26,
    "eta": 83.4,
    "amp": 0,
}


def program(code: str, streams: Any, **env: str) -> subprocess.Popen[bytes]:
    """Start Python code; `streams` are its stdin and stdout, and what goes to stderr is kept."""
    apart = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")
    clean = {k: v for k, v in os.environ.items() if k not in apart}
    environment = clean | {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"} | env
    command = [sys.executable, "-c", code]
    return subprocess.Popen(
        command, stdin=streams, stdout=streams, stderr=subprocess.PIPE, env=environment
    )


def on_terminal(code: str, columns: int, **env: str) -> str:
    """The output of `code` on a terminal of that width."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = program(code, slave, **env)
    os.close(slave)
    out = b""
    try:
        while data := os.read(master, 65536):
            out += data
    except OSError:  # the other end is closed
        pass
    os.close(master)
    _, err = process.communicate(timeout=HANG_S)
    assert (process.returncode, err) == (0, b"")
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
    return [line.rstrip() for line in lines]


def test_a_row_is_a_line() -> None:
    got = re.sub(" +", " ", format_row(ROW, 300))
    assert got == (
        "step 10/300 | lr 3.000e-05 | step_time 0.123 s | tokens/s 8,312 | grad_norm 1.234 | "
        "train loss 4.9876 | val loss 5.0123 | val ppl 150.3 | eta 1m 23s"
    )
    assert re.sub(" +", " ", format_row(ROW, 300, 1.0)) == got
    assert re.sub(" +", " ", format_row(ROW, 300, 1.5)) == f"epoch 0.12 | {got}"
    ordinary = {k: v for k, v in ROW.items() if not k.startswith("val/")}
    assert len(format_row(ordinary, 12345)) <= 132
    some = {"step": 1, "epoch": None, "skipped": True, "amp": 1, "mfu": 0.4}
    assert re.sub(" +", " ", format_row(some, 9)) == "step 1/9 | skipped"
    assert "skipped" not in format_row(ROW | {"skipped": False}, 300)
    assert format_row({}, 300) == ""


def rows_with(**values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    others = {"epoch": st.floats(0, 99), "step": st.integers(1, 12345), "lr": st.floats(1e-8, 1)}
    others |= {"step_time": st.floats(1e-3, 999), "tokens_per_sec": st.floats(0, 9_999_999)}
    others |= {"eta": st.floats(0, 8e6), "amp": st.sampled_from([0, 1])}
    return st.fixed_dictionaries(others | values)


LOSSES = ("train/loss", "val/loss")
usual_rows = rows_with(
    **{"grad_norm": st.floats(1e-3, 1e5), "val/ppl": st.floats(1, 1e5)},
    **dict.fromkeys(LOSSES, st.floats(1e-3, 99)),
)
any_rows = rows_with(**dict.fromkeys(("grad_norm", "val/ppl", *LOSSES), st.floats(1e-9, 1e9)))


@given(usual_rows, usual_rows)
def test_rows_stand_in_columns(a: dict[str, Any], b: dict[str, Any]) -> None:
    bars_a, bars_b = (
        [m.start() for m in re.finditer(r"\|", format_row(row, 12345, 9))] for row in (a, b)
    )
    assert bars_a == bars_b


@given(any_rows)
@example(
    {"grad_norm": 9.9996, "val/ppl": 999999.6, "train/loss": 1e-3, "lr": 3e-5, "step_time": 0.09996}
)
def test_rounding_hides_nothing(row: dict[str, Any]) -> None:
    # Half a unit of the last digit shown: 4 significant digits, 3 for the time, 4 decimals of a
    # loss.
    relative = {"lr": 5e-4, "grad_norm": 5e-4, "val ppl": 5e-4, "step_time": 5e-3}
    for cell in format_row(row, 12345, 9).split(" | "):
        label, value = re.fullmatch(r"([a-z_/ ]*[a-z_]) +(.*)", cell).groups()  # type: ignore[union-attr]
        key = label.replace(" ", "/")
        if label in relative or key in LOSSES:
            rel, off = relative.get(label, 5e-5), 5e-5 if key in LOSSES else 0.0
            found = float(value.removesuffix(" s").replace(",", ""))
            assert found == pytest.approx(row[key], rel=rel * (1 + 1e-9), abs=off * (1 + 1e-9))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0])
def test_odd_values_are_shown(value: float) -> None:
    line = format_row(dict.fromkeys(ROW, value) | {"step": 3, "amp": 1}, 10, 9)
    assert line.count("|") == 9
    if value != 0:
        assert str(value) in line


TIMES = {
    0: "0.0s",
    9.96: "10s",
    59.6: "1m 00s",
    3599.6: "1h 00m",
    86371: "1d 00h",
    273600: "3d 04h",
    math.nan: "?",
    math.inf: "?",
    -1: "?",
}


def test_duration() -> None:
    assert {seconds: duration(seconds) for seconds in TIMES} == TIMES


@given(st.floats(0, 1e9))
def test_duration_is_near_and_short(seconds: float) -> None:
    text = duration(seconds)
    unit = {"s": 1, "m": 60, "h": 3600, "d": 86400}
    parts = re.findall(r"([\d.]+)([smhd])", text)
    value = sum(float(number) * unit[letter] for number, letter in parts)
    last = 0.1 if "." in text else unit[parts[-1][1]]
    assert abs(value - seconds) <= last / 2 + 1e-6
    assert all(
        float(number) < {"s": 60, "m": 60, "h": 24}.get(letter, math.inf)
        for number, letter in parts
    )


def test_a_banner_aligns_and_wraps(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_plain_stream_and_log_get_the_same_lines_without_escapes(tmp_path: Path) -> None:
    stream = io.StringIO()
    console = Console(tmp_path / "train.log", 10, stream=stream)
    console.line("start\n  second line")
    assert not console.live  # so that nobody moves a bar
    console.line(
        "\x1b[31mred\x1b[0m \x1b]8;;http://x\x1b\\link\x1b]8;;\x07 bell\x07 back\rward "
        "[bold]kept[/bold] é"
    )
    console.close()
    console.close()
    expected = "start\n  second line\nred link bell backward [bold]kept[/bold] é\n"
    assert stream.getvalue() == expected
    assert (tmp_path / "train.log").read_text(encoding="utf-8") == expected
    assert console.failure is None

    again = Console(tmp_path / "train.log", 10, stream=io.StringIO())
    again.line("resumed")
    again.close()
    assert (tmp_path / "train.log").read_text(encoding="utf-8") == expected + "resumed\n"


BAR = """
import time
from llmexp.system.console import Console
console = Console(None, 300)
console.line("before")
for step in (101, 150, 200, 300):
    console.progress(step, 4.98761, 8312.4, 83)
    time.sleep(0.21)
    console.line(f"row {step} " + "x" * 30)
console.close()
console.line("after")
"""


@pytest.mark.parametrize("columns", [100, 12])
def test_the_bar_on_a_terminal(columns: int) -> None:
    out = on_terminal(BAR, columns)
    drawn = [ESCAPE.sub("", part) for line in out.split("\n") for part in line.split("\r")]
    bars = [text for text in drawn if "/300" in text]
    assert len(bars) >= 4
    assert all(len(bar) <= columns for bar in bars), bars  # a line that is full would wrap
    assert all(f"step {step}/300" in out for step in (101, 150, 200, 300))
    if columns == 100:
        assert "loss 4.9876  8,312 tokens/s  eta 1m 23s" in bars[0]
        assert all("━" * 10 in bar for bar in bars)
    # In the end the lines stand above each other and the bar is gone.
    rows = [f"row {step} " + "x" * 30 for step in (101, 150, 200, 300)]
    assert [line for line in screen(out) if line] == ["before", *rows, "after"]
    assert out.rfind("\x1b[?25h") > out.rfind("\x1b[?25l")  # the cursor is visible


def test_a_terminal_that_hangs_up(tmp_path: Path) -> None:
    code = f"""
import signal
from pathlib import Path
signal.signal(signal.SIGHUP, signal.SIG_IGN)
{BAR.replace("None, 300", f"Path({str(tmp_path / 'log')!r}), 300")}
print("x" * 100000)
Path({str(tmp_path / "done")!r}).touch()
"""
    master, slave = pty.openpty()
    process = program(code, slave)
    os.close(slave)
    seen = b""
    while b"step 101/300" not in seen:
        seen += os.read(master, 65536)
    os.close(master)
    _, err = process.communicate(timeout=HANG_S)
    assert (tmp_path / "done").exists(), err
    assert err == b""
    assert process.returncode == 0
    assert len((tmp_path / "log").read_text().splitlines()) == 5


def test_other_terminals_and_figures() -> None:
    colored = re.compile(r"\x1b\[[0-9;]*[1-9][0-9;]*m")
    assert colored.search(on_terminal(BAR, 80))
    without = on_terminal(
        BAR.replace("4.98761, 8312.4, 83", "None, 8312.4, None"), 80, NO_COLOR="1"
    )
    assert "step 150/300  8,312 tokens/s" in without
    assert "loss" not in without
    assert not colored.search(without)
    dumb = on_terminal(BAR, 80, TERM="dumb")
    assert "\x1b" not in dumb
    assert "/300" not in dumb
    assert "row 150" in dumb


def test_the_bar_is_throttled_and_starts_no_thread() -> None:
    code = """
import threading, time
from llmexp.system.console import Console
console = Console(None, 10**9)
start = time.monotonic()
calls = 0
while calls < 500 or time.monotonic() - start < 0.5:
    calls += 1
    console.progress(calls, 1.0, 1.0, 1.0)
assert threading.active_count() == 1, threading.enumerate()
console.close()
print("took", time.monotonic() - start)
"""
    out = ESCAPE.sub("", on_terminal(code, 80))
    (elapsed,) = re.findall(r"took ([\d.]+)", out)
    # the first one comes at once, the last one at the end
    assert 1 <= out.count("/1000000000") <= float(elapsed) / 0.2 + 2


def test_an_ascii_terminal_shows_replacements(tmp_path: Path) -> None:
    """tests/cli/test_cli.py has streams."""
    code = f"""
from llmexp.system.console import Console
from pathlib import Path
console = Console(Path({str(tmp_path / "log")!r}), 10)
console.progress(1, 1.0, 1.0, 1.0)
console.line("naïve 实验 \\udc80 end")
console.close()
"""
    assert "na?ve ?? ? end" in on_terminal(code, 80, PYTHONIOENCODING="ascii")
    assert (tmp_path / "log").read_text(encoding="utf-8") == "naïve 实验 ? end\n"


def test_a_full_disk_under_stdout_leaves_training_unaffected(tmp_path: Path) -> None:
    """tests/cli/test_cli.py has pipes and streams that are closed."""
    code = f"""
import os, sys
from pathlib import Path
from llmexp.system.console import Console
console = Console(Path({str(tmp_path / "log")!r}), 10)
for i in range(2000):
    console.line(f"line {{i}} " + "x" * 100)
    console.progress(i, 1.0, 1.0, 1.0)
console.close()
print("x" * 100000)
Path({str(tmp_path / "done")!r}).touch()
"""
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=HANG_S)
    assert (tmp_path / "done").exists(), done.stderr
    assert (done.returncode, done.stderr) == (0, b"")
    assert len((tmp_path / "log").read_text().splitlines()) == 2000


def test_full_disk_on_the_log_is_kept_for_the_caller(tmp_path: Path) -> None:
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


def test_lines_from_another_thread_do_not_mix(tmp_path: Path) -> None:
    stream = io.StringIO()
    console = Console(tmp_path / "log", 10, stream=stream)
    texts = [f"thread {i} " + "y" * 50 for i in range(4)]
    threads = [
        threading.Thread(target=lambda text=text: [console.line(text) for _ in range(200)])
        for text in texts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for lines in (stream.getvalue().splitlines(), (tmp_path / "log").read_text().splitlines()):
        assert sorted(lines) == sorted(texts * 200)
