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
    for number in map(int, os.listdir("/proc/self/fd")):
        if number != server.fileno() and os.path.exists(f"/proc/self/fd/{number}"):
            numbers.append(number)
    waiting: list[int] = []
    child = 0

    def forward(number: int, frame: object) -> None:
        if not child:
            waiting.append(number)
            return
        if os.path.exists(f"/proc/{child}"):
            os.kill(child, number)

    def answer() -> int:
        """A line of the server; as for a worker that was killed where it has ended."""
        line = b""
        while not line.endswith(b"\n"):
            if not (more := server.recv(1)):
                return -signal.SIGKILL
            line += more
        return int(line)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # held back until now by who started this
    unheard = (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE)
    umask = os.umask(0)
    os.umask(umask)
    request = {"argv": sys.orig_argv, "cwd": os.getcwd(), "env": dict(os.environ), "fds": numbers}
    request |= {"umask": umask, "pid": os.getpid()}
    request["ignored"] = [n for n in unheard if signal.getsignal(n) == signal.SIG_IGN]
    message = marshal.dumps(request)
    passed = b"".join(number.to_bytes(4, sys.byteorder) for number in numbers)
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)
    server.sendmsg([len(message).to_bytes(8, "big")], [rights])
    server.sendall(message)
    child = max(answer(), 0)
    if not child:
        os._exit(1)
    if os.getppid() != parent:
        waiting.append(signal.SIGTERM)
    for number in waiting:
        forward(number, None)
    for number in numbers:  # what the worker closes must be closed
        os.close(number)
    if (code := answer()) < 0:
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def settings() -> str:
    """What only a fresh process would have or obey: some of the environment, limits, its control
    group."""
    import resource

    names = "PYTHON LD_ LC_ LANG OMP_ MKL_ MALLOC_ TORCH_LOGS TORCHDYNAMO TORCHINDUCTOR"
    own = {k: v for k, v in os.environ.items() if k.startswith(tuple(names.split()))}
    found = sorted((k, v) for k, v in own.items() if k not in ("PYTHON", "PYTHONPATH"))
    kinds = (resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE)
    with open("/proc/self/cgroup") as f:
        return repr((found, [*map(resource.getrlimit, kinds)], os.getuid(), f.read()))


if address := os.environ.get("LLMEXP_TEST_FORKS"):
    arguments = [a for a in sys.orig_argv[1:] if a not in ("-P", "-u")]
    known = "llmexp llmexp.train llmexp.sweep.check llmexp.forecast.fitting torch.distributed.run "
    known += "tests.tracker.worker wandb"
    ours = arguments[:1] == ["-m"] and arguments[1] in known.split()
    open_streams = all(os.path.exists(f"/proc/self/fd/{number}") for number in range(3))
    if ours and open_streams and os.environ.get("LLMEXP_TEST_FORKS_SETTINGS") == settings():
        hand_over(address)
