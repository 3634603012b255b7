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


def _raise(text: str) -> None:
    raise RuntimeError(text or "on purpose")


ACTIONS = {
    "kill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "term": lambda _: os.kill(os.getpid(), signal.SIGTERM),
    "interrupt": lambda _: os.kill(os.getpid(), signal.SIGINT),
    "freeze": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "exit": lambda code: os._exit(int(code)),
    "raise": _raise,
    "sleep": lambda seconds: time.sleep(float(seconds)),
    "hold": _hold,
    "touch": lambda name: Path(name).touch(),
    "cut": lambda words: os.truncate(words.split()[0], int(words.split()[1])),
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
