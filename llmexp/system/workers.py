"""Start workers: `python -m llmexp.train ARGUMENT`, each a process of its own.

Where a command starts several, each is a fork of a template: a process that has imported torch and
what else a worker imports, and has done nothing yet. A fork has streams, folder, environment,
process group and signals of its own, and is a child of the process that asked for it, as one is
that was started afresh.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from llmexp.system import child

# Variables that nothing reads as it is imported, as LLMEXP_*: workers of a template may differ in
# them. torch sets the last one where something imports its compiler.
_OWN = (
    "CUDA_VISIBLE_DEVICES", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR",
    "MASTER_PORT", "PWD", "TORCHINDUCTOR_CACHE_DIR",
)  # fmt: skip
# What every run imports later: at its first loss, and as it saves.
_LATER = ("torch.utils.serialization.config", "numpy.ma")
_MOST = 4  # templates at once
FORKS = sys.platform == "linux"  # whether there can be any
_ROOM = 1000  # characters for the command of a fork, and for what its environment has more
_ANSWER_S = 300.0  # for a fork, also from a template that still imports on a busy machine
_SUBREAPER = 36  # of prctl(2)
_ONE = threading.Lock()  # for one fork at a time

# By environment: a template, or why there is none. None: all start afresh.
_templates: dict[str, Template | str] | None = None


class Forked(subprocess.Popen[Any]):
    """A child that a template forks; everything else is as of one that is started afresh."""

    def __init__(self, template: Template, command: list[str], **more: Any) -> None:
        self._template = template
        super().__init__(command, **more)

    def _execute_child(self, command: list[str], *given: Any) -> None:
        """Ask for the child in place of starting one, as Popen does with what it has opened."""
        _, _, _, pass_fds, folder, env, _, _, _, *pipes = given[:15]
        session, group = given[-2:]
        streams = {n: n if pipes[i] == -1 else pipes[i] for n, i in enumerate((0, 3, 5))}
        streams |= {n: n for n in pass_fds}
        request = {
            "argv": command[command.index("-m") + 1 :], "env": dict(env or os.environ),
            "folder": str(folder or os.getcwd()), "numbers": [*streams], "parent": os.getpid(),
            "session": session, "group": group,
        }  # fmt: skip
        try:
            self.pid = self._template.fork(request, [*streams.values()])
            self._child_created = True
        finally:
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


class Template:
    """A process that becomes a worker as often as it is asked to.

    Its `module` has imported what the workers import when it calls `serve_forks`.
    """

    def __init__(self, env: dict[str, str], module: str = "llmexp.train") -> None:
        self._socket, theirs = _channel()
        with theirs:
            number = theirs.fileno()
            process = child.start(
                module, f"{child.TEMPLATE}{number:<{_ROOM}}", pass_fds=(number,),
                env={**env, "LLMEXP_ROOM": " " * _ROOM},
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            )  # fmt: skip
        self.pid = process.pid
        process.returncode = child.DONE  # it is waited for by its number

    def fork(self, request: dict[str, Any], streams: list[int]) -> int:
        """Return the process id of a new worker. Raises OSError where there is no template now."""
        message = json.dumps(request).encode()
        try:
            with _ONE, _adopting():
                socket.send_fds(self._socket, [len(message).to_bytes(8, "big")], streams)
                self._socket.sendall(message)
                answer = self._socket.recv(8)
        except BaseException:  # an answer that comes later would be taken for that of the next
            self._socket.close()
            raise
        if not (pid := int.from_bytes(answer, "big")):
            raise OSError("the template has ended, or its forks are children of another process")
        return pid

    def end(self) -> None:
        self._socket.close()
        with contextlib.suppress(ChildProcessError):  # a handler of a signal has looked
            child.send(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


class _Kept(Template):
    """A template that is a fork of this process."""

    def __init__(self, ranks: bool) -> None:
        self._socket, theirs = _channel()
        with child.signals_held(), open(os.devnull, "r+b") as null, theirs:
            if (pid := os.fork()) == 0:
                try:
                    os.setpgid(0, 0)
                    child.die_with_parent()
                    shown = [sys.executable, "-P", "-m", "llmexp.train", child.TEMPLATE]
                    _show(shown, dict(os.environ))
                    _take([null.fileno()] * 2 + [2, theirs.fileno()], [0, 1, 2, theirs.fileno()])
                    serve_forks(theirs.fileno(), ranks)
                finally:
                    os._exit(child.FAILED)
        self.pid = pid


def _channel() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair()
    ours.settimeout(_ANSWER_S)
    return ours, theirs


def keep_template(ranks: bool = False) -> None:
    """Have later workers be forks of a copy of this process, which has imported what they import.

    For a process that has done nothing else yet. `ranks`: they are several ranks of a run.
    """
    global _templates
    if FORKS:
        _templates = {_kind(dict(os.environ)): _Kept(ranks)}


@contextlib.contextmanager
def warm(wanted: bool = True, at_once: bool = False) -> Iterator[None]:
    """Have all workers that are started within be forks of templates, where these can serve.

    One for this environment begins to import `at_once`, or with the first worker. It ends with the
    thread that started it.
    """
    global _templates
    before = _templates
    _templates = dict(before or {}) if wanted and FORKS else None
    try:
        if at_once and _templates is not None:
            _template(dict(os.environ))
        yield
    finally:
        for kind, template in (_templates or {}).items():
            if isinstance(template, Template) and template is not (before or {}).get(kind):
                template.end()
        _templates = before


def stay_warm(wanted: bool) -> None:
    """Do as `warm`, to the end of this process."""
    global _templates
    if wanted and FORKS and _templates is None:
        _templates = {}


def start_worker(
    argument: str, log: Path | None = None, module: str = "llmexp.train", **more: Any
) -> subprocess.Popen[Any]:
    """Start `python -m llmexp.train ARGUMENT` in a process group of its own, as `child.start` does.

    It is a fork where `warm` says so and a template for its environment can be had, else
    `why_fresh` knows why not. So can be another `module`, which imports torch too, and takes one
    argument.
    """
    why = "sweep.warm=false" if FORKS else "only Linux has forks of a template"
    env = dict(more.get("env") or os.environ)
    for _ in range(0 if _templates is None else 2):  # a template may have been killed
        try:
            if isinstance(found := _template(env), str):
                why = found
                break
            fork = functools.partial(Forked, found)
            return child.start(module, argument, log=log, popen=fork, **more)
        except OSError as error:  # such as no memory to fork
            why = str(error)
            _end_template(env)
    process = child.start(module, argument, log=log, **more)
    if _templates is not None:
        _templates.setdefault(_kind(env), why)
    vars(process)["why_fresh"] = why
    return process


def why_fresh(process: subprocess.Popen[Any]) -> str | None:
    """Return why a worker was started afresh; None of a fork."""
    return vars(process).get("why_fresh")


def _kind(env: dict[str, str]) -> str:
    early = {k: v for k, v in env.items() if not (k in _OWN or k.startswith("LLMEXP_"))}
    return json.dumps(early, sort_keys=True)


def _template(env: dict[str, str]) -> Template | str:
    """Return the template of an environment, or why there is none. Raises OSError."""
    assert _templates is not None
    kind = _kind(env)
    if kind not in _templates and len(_templates) < _MOST:
        _templates[kind] = Template({k: v for k, v in env.items() if k != "RANK"})  # it has none
    return _templates.get(kind, f"{_MOST} other environments have templates")


def _end_template(env: dict[str, str]) -> None:
    assert _templates is not None
    if isinstance(ended := _templates.pop(_kind(env), None), Template):
        ended.end()


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Take the place of the parent that an orphan below this process has lost, for a moment."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(_SUBREAPER, 0)


def serve_forks(number: int, ranks: bool = False) -> NoReturn:
    """Become what the process that started this template asks for, whenever it does.

    The template itself ends with that process, and where what it imported has started threads or a
    device, which no fork could use.
    """
    for one in child.STOP_SIGNALS:  # as at the start of a process
        signal.signal(one, signal.SIG_DFL)
    child.release_signals()
    asked = socket.socket(fileno=number)
    ranks = ranks or int(os.environ.get("WORLD_SIZE", 1)) > 1
    for name in [*_LATER, *(["torch._dynamo"] if ranks else [])]:  # which DDP imports
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # collections of the forks need not walk what all share
    _in_large_pages()
    while True:
        head, streams, _, _ = socket.recv_fds(asked, 8, 64)
        if (
            len(head) < 8
            or threading.active_count() > 1
            or sys.modules["torch"].cuda.is_initialized()
        ):
            os._exit(child.DONE)
        text = b""
        while len(text) < int.from_bytes(head, "big") and (more := asked.recv(1 << 16)):
            text += more
        with child.signals_held():
            if (between := os.fork()) == 0:
                between = os.getpid()
                try:
                    if os.fork():
                        os._exit(0)  # the worker becomes a child of who asked
                    request = json.loads(text)
                    _go_there(request, between)
                except OSError:  # such as no room for a process
                    asked.sendall(bytes(8))
                    os._exit(child.FAILED)
                asked.sendall(os.getpid().to_bytes(8, "big"))
                _become(request, streams)
                break
        os.waitpid(between, 0)
        for stream in streams:
            os.close(stream)
    _run(request["argv"][0])


def _in_large_pages() -> None:
    """Have the kernel (Linux 6.1) keep this memory in pages of 2 MiB where it can.

    A fork copies the table of pages, which is most of what forking and ending cost.
    """
    size, collapse, libc = 2 << 20, 25, ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, _, _, _, *name = line.split()
        start, end = (int(address, 16) for address in addresses.split("-"))
        if access == "rw-p" and name in ([], ["[heap]"]):
            for at in range(-(-start // size) * size, end - size + 1, size):
                libc.madvise(ctypes.c_void_p(at), ctypes.c_size_t(size), collapse)


def _run(module: str) -> NoReturn:
    """Do what `python -m MODULE` does, and end this process."""
    code: Any = child.DONE
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as asked:
        code = asked.code or child.DONE
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    child.end_process(code)


def _take(given: list[int], numbers: list[int]) -> None:
    """Have the files that are open as `given` be open as `numbers`, and no others."""
    aside = [fcntl.fcntl(one, fcntl.F_DUPFD, max(numbers) + 1) for one in given]
    for one, number in zip(aside, numbers, strict=True):
        os.dup2(one, number)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number not in numbers:
            with contextlib.suppress(OSError):  # that of the list itself
                os.close(number)


def _show(command: list[str], env: dict[str, str]) -> None:
    """Have the system show the command and the environment of this fork in place of its template's.

    They stand where the kernel has put those of the template, which make room.
    """
    numbers = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end, _, last = map(int, numbers[45:49])
    if not start:  # gVisor does not say
        return
    words = os.fsencode(" ".join(command))[:4000] + b"\0"
    if len(words) < end - start:  # no zero at the end: it is one text, which may go on beyond
        words = words.ljust(end - start - 1, b"\0") + b" "
    own = sorted(env.items(), key=lambda one: one[0] not in _OWN)  # if there is room for less
    variables = b"".join(os.fsencode(f"{name}={value}\0") for name, value in own)
    text = (words + variables)[: last - start].ljust(last - start, b"\0")
    ctypes.memmove(start, text, last - start)


def _go_there(request: dict[str, Any], between: int) -> None:
    """Become a child of who asked, in the session, group and folder that it wants."""
    while (parent := os.getppid()) != request["parent"]:
        if parent != between:
            raise OSError("who asked has gone, or the system gives it no children")
        time.sleep(0.0005)
    child.die_with_parent()
    if request["session"]:
        os.setsid()
    if request["group"] >= 0:
        os.setpgid(0, request["group"])
    os.chdir(request["folder"])


def _become(request: dict[str, Any], streams: list[int]) -> None:
    """Make this fork what a process is that was started afresh."""
    _take(streams, request["numbers"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv[1:] = request["argv"][1:]
    _show([sys.executable, "-P", "-m", *request["argv"]], request["env"])
    # anew: the one that there is remembers what its file was
    sys.stdout = io.TextIOWrapper(
        open(1, "wb", closefd=False),  # noqa: SIM115
        sys.stdout.encoding,
        sys.stdout.errors,
        write_through=bool(request["env"].get("PYTHONUNBUFFERED")),
    )
    child.never_fail_to_print()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # as of a start: drawn anew by each process; random does it by itself
    sys.modules["numpy"].random.seed()
    sys.modules["torch"].default_generator.seed()
