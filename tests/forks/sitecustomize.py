"""Found by Python at its start when the tests put this folder on PYTHONPATH: a command (`python -m
llmexp X`) or a worker (`python -P -m llmexp.train X`) becomes a fork of a process that has Hydra
and torch imported already. This process stays as its stand-in: it has the other's place in the
process tree, passes signals on, and ends as the other ends.

It hands over only where the fork would be the same as a fresh process: LLMEXP_TEST_FORKS="" starts
a fresh one.
"""

import os
import sys


def hand_over(address: str) -> None:
    """End this process as a fork of the server ends.

    The C modules of `signal` and `socket`, and marshal for json: each command of the tests and each
    of its workers pays for the imports of its stand-in, which would be most of what that costs."""
    import _signal as signal
    import _socket as socket
    import ctypes
    import marshal

    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # as the worker: SIGTERM when the parent dies
    parent = os.getppid()
    server = socket.socket(socket.AF_UNIX)
    server.connect(address)
    numbers = []
    for name in os.listdir("/proc/self/fd"):
        if int(name) != server.fileno():
            try:
                os.fstat(int(name))
            except OSError:
                continue
            numbers.append(int(name))
    waiting: list[int] = []
    child = 0

    def forward(number: int, frame: object) -> None:
        if not child:
            waiting.append(number)
            return
        import contextlib

        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    def answer() -> int | None:
        """A line of the server; None where it has ended."""
        line = b""
        while not line.endswith(b"\n"):
            more = server.recv(1)
            if not more:
                return None
            line += more
        return int(line)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # held back until now by who started this
    ignored = [
        n
        for n in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE)
        if signal.getsignal(n) == signal.SIG_IGN
    ]
    umask = os.umask(0)
    os.umask(umask)
    request = {
        "argv": sys.orig_argv,
        "cwd": os.getcwd(),
        "env": dict(os.environ),
        "fds": numbers,
        "umask": umask,
        "pid": os.getpid(),
        "ignored": ignored,
    }
    message = marshal.dumps(request)
    passed = b"".join(number.to_bytes(4, sys.byteorder) for number in numbers)
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)
    server.sendmsg([len(message).to_bytes(8, "big")], [rights])
    server.sendall(message)
    started = answer()
    if started is None:
        os._exit(1)
    child = started
    if os.getppid() != parent:
        waiting.append(signal.SIGTERM)
    for number in waiting:
        forward(number, None)
    for number in numbers:  # what the worker closes must be closed
        os.close(number)
    code = answer()
    if code is None:
        code = -signal.SIGKILL
    if code < 0:
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def settings() -> str:
    """What only a fresh process would have or obey: some of the environment, limits, its control
    group."""
    import resource

    names = (
        "PYTHON",
        "LD_",
        "LC_",
        "LANG",
        "OMP_",
        "MKL_",
        "MALLOC_",
        "TORCH_LOGS",
        "TORCHDYNAMO",
        "TORCHINDUCTOR",
    )
    found = [
        (k, v)
        for k, v in os.environ.items()
        if k.startswith(names) and k not in ("PYTHON", "PYTHONPATH")
    ]
    limits = [
        resource.getrlimit(r)
        for r in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE)
    ]
    with open("/proc/self/cgroup") as f:
        return repr((sorted(found), limits, os.getuid(), f.read()))


if address := os.environ.get("LLMEXP_TEST_FORKS"):
    arguments = [a for a in sys.orig_argv[1:] if a not in ("-P", "-u")]
    ours = arguments[:1] == ["-m"] and arguments[1:2] in (
        ["llmexp"],
        ["llmexp.train"],
        ["llmexp.sweep.check"],
        ["llmexp.forecast.fitting"],
        ["torch.distributed.run"],
        ["tests.tracker.worker"],
        ["wandb"],
    )
    open_streams = all(os.path.exists(f"/proc/self/fd/{number}") for number in range(3))
    if ours and open_streams and os.environ.get("LLMEXP_TEST_FORKS_SETTINGS") == settings():
        hand_over(address)
