"""Start, signal and watch a child process, and serve a child before it imports torch.

A child needs signals, its parent and exit codes. Standard library only.
"""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import io
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from subprocess import Popen

BEGAN = "LLMEXP_BEGAN"  # seconds since 1970, in a worker and its ranks: when it was started
TEMPLATE = "template:"  # begins the argument of a worker that becomes others; its socket follows
DONE, REFUSED, FAILED, PREEMPTED = 0, 2, 3, 75
# one request reaches a rank several times: from Slurm, by srun, by the process that started it
REPEAT_S = 1.0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)
PASSED_ON = (*STOP_SIGNALS, signal.SIGHUP)  # by who starts workers, to them


class Stop:
    """A request to stop, set by a signal. Before training starts a signal ends the process at once.

    While `importing`, it does so without an exception: torch aborts when one comes out of its
    imports.
    """

    def __init__(self) -> None:
        self.requested = False
        self.signal_name = ""
        self.importing = True
        self.training = False
        self._count = 0
        self._last = -math.inf  # when a signal last counted, in seconds

    def install(self) -> Stop:
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)
        release_signals()
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if time.monotonic() < self._last + REPEAT_S:
            return
        self._last = time.monotonic()
        self._count += 1
        self.requested = True
        self.signal_name = signal.Signals(number).name
        if self._count == 1 and os.environ.get("RANK", "0") == "0":
            saving, at_once = "finishing this step, then saving", "stopped before training"
            what = saving if self.training else at_once
            with contextlib.suppress(OSError):
                after = "\n" if os.isatty(2) else ""  # an echoed ^C
                os.write(2, f"{after}llmexp: {self.signal_name}: {what}\n".encode())
        if not self.training and not self.importing:
            raise SystemExit(128 + number)
        # Third signal: somebody insists. Checkpoints are whole or absent, so this loses at most the
        # save.
        if self.importing or self._count >= 3:
            os._exit(128 + number)


STOP = Stop()


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Hold stop signals back while a worker is started, until it has handlers.

    Python's own start would end with a failure, or a trace, where one comes in the midst of it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def release_signals() -> None:
    """Let stop signals in that `signals_held` has held back since this process was started."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def start(
    module: str,
    *arguments: str,
    log: Path | None = None,
    popen: Callable[..., Popen[Any]] | None = None,
    **more: Any,
) -> Popen[Any]:
    """Start `python -m MODULE ARGUMENTS` in a process group of its own.

    Ctrl-C reaches this process alone, which passes it on once. `log` gets the child's standard
    error, and the child has no other stream; `more` is for `popen`, otherwise Popen.
    """
    import subprocess

    with contextlib.ExitStack() as stack:
        if log is not None:
            errors = stack.enter_context(open(log, "ab"))
            more |= {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": errors}
        if popen is None:
            stack.enter_context(signals_held())
        command = [sys.executable, "-P", "-m", module, *arguments]
        return (popen or subprocess.Popen)(command, **{"process_group": 0, **more})


def hand_over(process: Popen[str], request: dict[str, Any]) -> None:
    """Write a request to a child that reads it; the exit code of one that has died says why."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
        json.dump(request, pipe)


def pass_on(process: Popen[Any], number: int) -> None:
    """Pass a signal on to a child that may have ended; a worker takes a hang-up as SIGTERM."""
    process.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)


@contextlib.contextmanager
def signals_passed_on(processes: Sequence[Popen[Any]]) -> Iterator[list[int]]:
    """Pass signals on to children for a while; yield the numbers of those passed on so far."""
    passed: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        passed.append(number)
        for process in processes:
            pass_on(process, number)

    with handling(PASSED_ON, handler, stay=lambda: bool(passed)):
        yield passed


def how_it_died(code: int, stopped: bool, who: str = "the worker") -> str:
    """Return how a process died that could not record it; negative codes are signals.

    `stopped`: a signal was passed on to it.
    """
    if code >= 0:
        return f"{who} ended with exit code {code} and reported no error"
    hint = "; out of memory?" if -code == signal.SIGKILL and not stopped else ""
    return f"{who} was ended by signal {-code} ({signal.Signals(-code).name}{hint})"


@contextlib.contextmanager
def handling(
    numbers: Sequence[signal.Signals],
    handler: Callable[[int, FrameType | None], Any] | signal.Handlers,
    stay: Callable[[], bool] = lambda: False,
) -> Iterator[None]:
    """Handle the signals by `handler` for a while, except those that are ignored.

    nohup ignores the hang-up. Where `stay` holds in the end the handler stays: a second request to
    stop must not take the exit code from the first.
    """
    wanted = [n for n in numbers if signal.getsignal(n) is not signal.SIG_IGN]
    old = {n: signal.signal(n, handler) for n in wanted}
    try:
        yield
    finally:
        for number, before in old.items() if not stay() else ():
            signal.signal(number, before)


def children(pid: int) -> list[int]:
    """Return the running processes that a process has started, as the kernel of Linux shows them.

    Elsewhere none.
    """
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, task.read_text().split())
    return [child for child in found if not ended(child)]


def ended(pid: int) -> bool:
    """Return whether the process is no more; it may be left as a zombie until its parent looks."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def send(pid: int, number: int) -> None:
    """Send a signal to a process that may have gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def family(pid: int) -> list[int]:
    """Return a process and those under it."""
    return [pid, *(under for child in children(pid) for under in family(child))]


def kill_family(pid: int) -> list[int]:
    """Kill a process of ours and all under it (SIGKILL), and return who they were.

    It is stopped first, so that it sees none of them die, and starts no more.
    """
    send(pid, signal.SIGSTOP)
    found = family(pid)
    for one in reversed(found):
        send(one, signal.SIGKILL)
    return found


def first_to_go_without_memory(pid: int) -> None:
    """Have the kernel (Linux) end this process before others where the host has no memory left."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/oom_score_adj").write_text("1000")


def die_with_parent() -> None:
    """Ask the kernel (Linux) for SIGTERM when the parent dies, however it dies."""
    parent = os.getppid()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        raise SystemExit(128 + signal.SIGTERM)


def _as_ascii(error: UnicodeError) -> tuple[str, int]:
    """Return what a stream prints for characters that it cannot show: `+-` for ±, else `?`."""
    assert isinstance(error, UnicodeEncodeError)
    text = error.object[error.start : error.end]
    return "".join("+-" if character == "±" else "?" for character in text), error.end


codecs.register_error("llmexp", _as_ascii)


def printable(text: str, encoding: str) -> str:
    """Return what a stream of this encoding prints for a text, whose width then is known."""
    return text.encode(encoding, "llmexp").decode(encoding)


def never_fail_to_print() -> None:
    """Make both output streams replace the characters that they cannot show.

    An ASCII terminal must end no run.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors != "backslashreplace":
            utf8 = stream.encoding.lower().replace("-", "") == "utf8"
            # surrogateescape gives the bytes of any file name back
            if not (utf8 and stream.errors == "surrogateescape"):
                stream.reconfigure(errors="llmexp")


def end_process(code: int) -> NoReturn:
    """Flush and end the process without the interpreter's finalisation.

    There threads of gloo and wandb abort.
    """
    for stream in (sys.stdout, sys.stderr):
        # closed, or None where it never was open
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)


def say(text: str) -> None:
    """Print at once; a standard output that is gone (`llmexp ... | head`) stops nothing."""
    try:
        print(text, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
