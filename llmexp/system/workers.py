"""Start workers: `python -m llmexp.train ARGUMENT`, each a process of its own.

Where a command starts several, each is a fork of a template: a process that has imported torch and
what else a worker imports, and has done nothing yet. A fork has streams, folder, environment,
process group and signals of its own, and is a child of the process that asked for it, as one is
that was started afresh.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmexp.system import child

# Variables that nothing reads as it is imported, as LLMEXP_*: workers of a template may differ in
# them.
_OWN = (
    "CUDA_VISIBLE_DEVICES", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR",
    "MASTER_PORT", "PWD",
)  # fmt: skip
# What every run imports later: at its first loss and backward pass, and as it saves.
_LATER = ("torch.fx.experimental.symbolic_shapes", "torch.utils.serialization.config", "numpy.ma")
_MOST = 4  # templates at once
FORKS = sys.platform == "linux"  # whether they can be; the tests have a server of their own
_ANSWER_S = 300.0  # for a fork, also from a template that still imports on a busy machine
_SUBREAPER = 36  # of prctl(2)

_templates: dict[str, Template | None] | None = None  # by environment; None: all start afresh


class Forked(subprocess.Popen[Any]):
    """A child that was not started by this object: it waits for it and sends it signals."""

    _sigint_wait_secs = 0.0  # of Popen: it leaves without a wait on Ctrl-C

    def __init__(self, pid: int, pipes: dict[int, Any]) -> None:
        self.pid, self.returncode = pid, None
        self.stdin, self.stdout, self.stderr = map(pipes.get, range(3))

    def poll(self) -> int | None:
        return self._look(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        assert timeout is None
        code = self._look(0)
        assert code is not None
        return code

    def _look(self, how: int) -> int | None:
        if self.returncode is None:
            with contextlib.suppress(ChildProcessError):  # a handler of a signal has looked
                there, status = os.waitpid(self.pid, how)
                if there:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            child.send(self.pid, sig)


class Template:
    """A process that becomes a worker as often as it is asked to."""

    def __init__(self, env: dict[str, str]) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(_ANSWER_S)
        with theirs:
            number = theirs.fileno()
            self._process = child.start(
                "llmexp.train", f"{child.TEMPLATE}{number}", env=env, pass_fds=(number,),
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            )  # fmt: skip

    def fork(self, request: dict[str, Any], streams: list[int]) -> int:
        """Return the process id of a new worker. Raises OSError where there is no template now."""
        message = json.dumps(request).encode()
        try:
            with _adopting():
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
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def warm(wanted: bool = True, at_once: bool = False) -> Iterator[None]:
    """Have all workers that are started within be forks of templates, where these can serve.

    One for this environment begins to import `at_once`, or with the first worker. Workers are
    started by one thread.
    """
    global _templates
    before = _templates
    _templates = {} if wanted and FORKS else None
    try:
        if at_once and _templates is not None:
            _template(dict(os.environ))
        yield
    finally:
        for template in (_templates or {}).values():
            if template is not None:
                template.end()
        _templates = before


def start_worker(
    argument: str, log: Path | None = None, module: str = "llmexp.train", **more: Any
) -> subprocess.Popen[Any]:
    """Start `python -m llmexp.train ARGUMENT` in a process group of its own, as `child.start` does.

    It is a fork where `warm` says so and a template for its environment can be had. So can be
    another `module`, which imports torch too, and takes one argument.
    """
    if _templates is not None and more.keys() <= {"env", "stdin", "stdout", "stderr", "text"}:
        request: dict[str, Any] = {"module": module, "argument": argument, "parent": os.getpid()}
        request["env"] = dict(more.pop("env", None) or os.environ)
        with contextlib.suppress(OSError):  # no memory to fork, or the template was killed twice
            request["folder"] = os.getcwd()
            return _forked(request, log, **more)
        more["env"] = request["env"]
    return child.start(module, argument, log=log, **more)


def _forked(request: dict[str, Any], log: Path | None, text: bool = False, **given: Any) -> Forked:
    """Return a fork of the template of its environment, which is started, or again where it died.

    Raises OSError where there is none.
    """
    with contextlib.ExitStack() as opened:
        null = opened.enter_context(open(os.devnull, "r+b"))
        if log is not None:
            errors = opened.enter_context(open(log, "ab"))
            given = {"stdin": null, "stdout": null, "stderr": errors}
        streams, pipes = list[int](), dict[int, Any]()
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            stream = number if given.get(name) is None else given[name]
            if stream == subprocess.PIPE:
                read, write = os.pipe()
                ours, stream = (read, write) if number else (write, read)
                opened.callback(os.close, stream)
                pipes[number] = os.fdopen(ours, ("r" if number else "w") + "b" * (not text))
            elif stream == subprocess.DEVNULL:
                stream = null
            streams.append(stream if isinstance(stream, int) else stream.fileno())
        for again in (True, False):
            try:
                return Forked(_template(request["env"]).fork(request, streams), pipes)
            except OSError:
                _end_template(request["env"], again)
                if not again:
                    raise
    raise AssertionError


def _kind(env: dict[str, str]) -> str:
    early = {k: v for k, v in env.items() if not (k in _OWN or k.startswith("LLMEXP_"))}
    return json.dumps(early, sort_keys=True)


def _template(env: dict[str, str]) -> Template:
    """Return the template of an environment. Raises OSError where there can be none."""
    assert _templates is not None
    kind = _kind(env)
    if kind not in _templates and len(_templates) < _MOST:
        _templates[kind] = Template(env)
    if (found := _templates.get(kind)) is None:
        raise OSError("there is no template for this environment")
    return found


def _end_template(env: dict[str, str], again: bool) -> None:
    """End the template of an environment; unless it may be started `again`, none follows."""
    assert _templates is not None
    if ended := _templates.pop(kind := _kind(env), None):
        ended.end()
        if not again:
            _templates[kind] = None


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Take the place of the parent that an orphan below this process has lost, for a moment."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(_SUBREAPER, 0)


def serve_forks(number: int) -> str:
    """Become a worker whenever the process that started this template asks for one.

    Return in the worker, with its argument. The template itself ends with that process, and where
    what it imported has started threads or a device, which no fork could use.
    """
    asked = socket.socket(fileno=number)
    several = int(os.environ.get("WORLD_SIZE", 1)) > 1
    for name in [*_LATER, *(["torch._dynamo"] if several else [])]:  # which DDP imports
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # collections of the forks need not walk what all share
    while True:
        head, streams, _, _ = socket.recv_fds(asked, 8, 3)
        if (
            len(head) < 8
            or threading.active_count() > 1
            or sys.modules["torch"].cuda.is_initialized()
        ):
            child.end_process(child.DONE)
        text = b""
        while len(text) < int.from_bytes(head, "big") and (more := asked.recv(1 << 16)):
            text += more
        with child.signals_held():
            if (between := os.fork()) == 0:
                between = os.getpid()
                try:
                    if os.fork():
                        os._exit(0)  # the worker becomes a child of who asked
                except OSError:  # no room for a process
                    asked.sendall(bytes(8))
                    os._exit(child.FAILED)
                request = json.loads(text)
                _become(request, asked, streams, between)
                break
        os.waitpid(between, 0)
        for stream in streams:
            os.close(stream)
    if request["module"] != "llmexp.train":
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
        child.end_process(child.DONE)
    return str(request["argument"])


def _become(
    request: dict[str, Any], asked: socket.socket, streams: list[int], between: int
) -> None:
    """Make this fork what a process is that was started afresh."""
    while (parent := os.getppid()) != request["parent"]:
        if parent != between:  # who asked has gone, or the system gives it no children
            with contextlib.suppress(OSError):
                asked.sendall(bytes(8))
            os._exit(child.FAILED)
        time.sleep(0.0005)
    child.die_with_parent()
    os.setpgid(0, 0)
    asked.sendall(os.getpid().to_bytes(8, "big"))
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2:
            with contextlib.suppress(OSError):  # that of the list itself
                os.close(number)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv[1:] = [request["argument"]]
    # anew: the one that there is remembers what its file was
    sys.stdout = io.TextIOWrapper(
        open(1, "wb", closefd=False),  # noqa: SIM115
        sys.stdout.encoding,
        sys.stdout.errors,
        write_through=bool(request["env"].get("PYTHONUNBUFFERED")),
    )
    child.never_fail_to_print()
    # as of a start: drawn anew by each process; random does it by itself
    sys.modules["numpy"].random.seed()
    sys.modules["torch"].default_generator.seed()
