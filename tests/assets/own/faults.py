"""Faults at planned moments: `hooks=[own.faults.act] --allow own`, planned by FAULT_PLAN.

This variable of the environment is a list of EVENT-STEP:ACTION or EVENT-STEP@RANK:ACTION with `;`
between, such as "step_start-3:kill; saved-4@1:raise late". STEP `*` is each step. An action ends in
`once` to happen in the first process that comes there. Files lie in the working folder.
"""

import os
import re
import resource
import signal
import subprocess
import time
from pathlib import Path

PLAN = re.compile(r"\s*(\w+)-(\d+|\*)(?:@(\d+))?:(\w+)(?: (?!once\s*$)([^;]*?))?( once)?\s*")


def _fill(folder: str) -> None:
    with open(os.path.join(folder, "ballast"), "ab", buffering=0) as file:
        for size in (65536, 4096, 1):
            try:
                while file.write(b"x" * size):
                    pass
            except OSError:
                pass


def _limit(size: str) -> None:
    """Limit the size of files, as the shell does with `ulimit -f`."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(size) if size != "unlimited" else hard, hard))


def _hold(name: str) -> None:
    """Say in NAME.RANK that this process waits, and wait for the file NAME or for a stop."""
    from llmexp.system.child import STOP

    Path(f"{name}.{os.environ.get('RANK', '0')}").write_text(str(os.getpid()))
    end = time.monotonic() + 1200
    while not os.path.exists(name) and not STOP.requested and time.monotonic() < end:
        time.sleep(0.02)


def _turn_back(seconds: str) -> None:
    """Turn back the clock of the wall; the monotonic ones never jump."""
    real = time.time
    time.time = lambda: real() - float(seconds)


def _raise(text: str) -> None:
    raise RuntimeError(text or "on purpose")


ACTIONS = {
    "kill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "term": lambda _: os.kill(os.getpid(), signal.SIGTERM),
    "freeze": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "exit": lambda code: os._exit(int(code)),
    "raise": _raise,
    "sleep": lambda seconds: time.sleep(float(seconds)),
    "hold": _hold,
    "back": _turn_back,
    "touch": lambda name: Path(name).touch(),
    "full": _fill,
    "room": lambda folder: os.unlink(os.path.join(folder, "ballast")),
    "ro": lambda folder: subprocess.run(["mount", "-o", "remount,ro", folder], check=True),
    "rw": lambda folder: subprocess.run(["mount", "-o", "remount,rw", folder], check=True),
    "limit": _limit,
}


def act(event, context):
    """Do what FAULT_PLAN says for this event, step and rank."""
    for words in filter(str.strip, os.environ.get("FAULT_PLAN", "").split(";")):
        found = PLAN.fullmatch(words)
        assert found, f"FAULT_PLAN: {words!r} is not EVENT-STEP:ACTION"
        when, step, rank, action, argument, once = found.groups()
        if when != event or step not in ("*", str(context.step)):
            continue
        if rank is not None and rank != os.environ.get("RANK", "0"):
            continue
        if once:
            try:
                os.close(os.open(f"did-{when}-{step}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
        ACTIONS[action](argument or "")


def no_room(event, context):
    """Kill rank 1, as a host of its own would, where it has more than two sequences at a time."""
    if os.environ["RANK"] == "1" and context.run.micro_batch_size > 2:
        os.kill(os.getpid(), signal.SIGKILL)


def hungry(event, context):
    """From step 7 on have the model ask for 400 MiB, with 100 left by what FAULT_MEMORY names:
    `ulimit`, or the folder of a memory cgroup."""
    where = os.environ.get("FAULT_MEMORY")
    if not where or (event, context.step) != ("step_start", 7):
        return
    if where == "ulimit":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + 100 * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (most, -1))
    else:
        Path(where, "cgroup.procs").write_text(str(os.getpid()))
    import torch

    context.model.register_forward_pre_hook(lambda *_: [torch.ones(100 * 2**20), None][1])
