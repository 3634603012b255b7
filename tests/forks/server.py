"""The process that commands and workers of the tests are forks of; see sitecustomize.py. `python
server.py SOCKET`."""

import contextlib
import ctypes
import gc
import marshal
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
import threading

from hydra.core.plugins import Plugins

from llmexp.compose import app
from llmexp.runs import versions
from llmexp.system import workers
from llmexp.system.child import STOP_SIGNALS
from tests import forks
from tests.tiny import TINY


def main(address: str) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # goes with the tests
    forks.preload()
    workers.FORKS = False  # they are forks of this process already
    Plugins.instance()  # looks through all of Hydra's plugins
    versions.versions()  # reads the metadata of packages
    if forks.PRETEND_BF16:
        forks.pretend_bf16()
    with app.hydra_app(None) as hydra:  # its parsers learn their grammars
        app.compose(hydra, [*TINY, "data=synthetic", "hooks=[]", "hydra.run.dir=a/b"])
    gc.collect()
    gc.freeze()  # a fork's collections need not look at all of it
    gc.set_threshold(20_000, 10, 10)  # there are few in the second that it lives
    forks.in_large_pages()

    # As for a fresh worker they wait until it has handlers (`process.signals_held`): after a fork
    # Python itself runs code in which an exception is lost.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    while True:
        connection, _ = listener.accept()
        head, fds, _, _ = socket.recv_fds(connection, 8, 250)
        size, text = int.from_bytes(head, "big"), b""
        while len(text) < size:
            text += connection.recv(size - len(text))
        # Forked by this thread, the only one that the child will have.
        child = os.fork()
        if child == 0:
            listener.close()
            connection.close()
            become_worker(marshal.loads(text), fds)
        for fd in fds:
            os.close(fd)
        threading.Thread(target=look_after, args=(child, connection), daemon=True).start()


def look_after(child: int, connection: socket.socket) -> None:
    """Tell the stand-in how its worker ended; one that is killed takes the worker with it."""
    ended = os.pidfd_open(child)
    with contextlib.suppress(OSError):
        connection.sendall(f"{child}\n".encode())
    if connection in select.select([connection, ended], [], [])[0]:  # it says nothing: it is gone
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    os.close(ended)
    with contextlib.suppress(OSError):
        connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    connection.close()


def become_worker(request: dict, fds: list[int]) -> None:
    """Be like a fresh process from here on: its files, folder, environment and arguments."""
    code = 1
    try:
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(1, 0)
        enter_namespaces(request["pid"])
        for number in request["ignored"]:
            signal.signal(number, signal.SIG_IGN)
        aside = max([*fds, *request["fds"]]) + 1
        for fd, number in zip(fds, request["fds"], strict=True):
            os.dup2(fd, aside + number)
        os.closerange(0, aside)
        for number in request["fds"]:
            os.dup2(aside + number, number)
        os.closerange(aside, 1 << 16)  # other workers' connections among them
        os.umask(request["umask"])
        os.chdir(request["cwd"])
        old = [os.path.dirname(os.path.abspath(__file__)), *paths()]
        os.environ.clear()
        os.environ.update(request["env"])
        sys.path[:] = paths() + [path for path in sys.path if path not in old]
        tempfile.tempdir = None  # is chosen by the environment
        sys.orig_argv[:] = request["argv"]
        at = request["argv"].index("-m")
        sys.argv[:] = request["argv"][at + 1 :]
        if "-P" not in request["argv"][:at]:
            sys.path.insert(0, os.getcwd())
        if not hasattr(sys.modules.get(sys.argv[0]), "__path__"):
            sys.modules.pop(sys.argv[0], None)  # runs as __main__
        # Made anew: the one that there is remembers whether its file could be sought in.
        sys.stdout = open(1, "w", encoding=sys.stdout.encoding, closefd=False)  # noqa: SIM115
        unbuffered = "-u" in request["argv"][:at]
        sys.stdout.reconfigure(line_buffering=os.isatty(1), write_through=unbuffered)
        if sys.argv[0] != "llmexp.train":
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as done:
        code = done.code if isinstance(done.code, int) else int(done.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def paths() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def enter_namespaces(pid: int) -> None:
    """A process of another host of the tests is a fork that has gone there."""
    for name in ("net", "uts", "mnt"):
        theirs = f"/proc/{pid}/ns/{name}"
        if not os.path.exists(theirs):  # the stand-in was killed
            os._exit(1)
        if os.readlink(theirs) == os.readlink(f"/proc/self/ns/{name}"):
            continue
        with open(theirs) as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0):
                raise OSError(ctypes.get_errno(), theirs)


if __name__ == "__main__":
    main(sys.argv[1])
