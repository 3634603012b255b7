"""Print what a process can see of itself, as JSON: `python -m own.facts ARGUMENT`."""

import json
import os
import random
import resource
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch

from llmexp.system.child import STOP_SIGNALS, end_process


def facts() -> dict:
    status = dict(line.split(":\t") for line in Path("/proc/self/status").read_text().splitlines())
    shown = Path("/proc/self/environ").read_text().strip("\0").split("\0")
    files = {}
    for number in sorted(map(int, os.listdir("/proc/self/fd"))):
        if os.path.exists(f"/proc/self/fd/{number}"):
            files[number] = os.readlink(f"/proc/self/fd/{number}").partition(":")[0]
    return {
        "argument": sys.argv[1:],
        "command": Path("/proc/self/cmdline").read_text().replace("\0", " ").strip(),
        "cwd": os.getcwd(),
        "shown": sorted(shown),
        "environment": dict(os.environ),
        "files": files,
        "encodings": [s.encoding for s in (sys.stdin, sys.stdout, sys.stderr)],
        "buffering": [s.line_buffering for s in (sys.stdout, sys.stderr)],
        "path": [p for p in sys.path if p != os.getcwd()],
        "leads its group": os.getpgid(0) == os.getpid(),
        "session": os.getsid(0),
        "parent": os.getppid(),
        "umask": status["Umask"],
        "ignored": status["SigIgn"],
        "priority": os.nice(0),
        "cores": sorted(os.sched_getaffinity(0)),
        "limits": [resource.getrlimit(n) for n in range(16)],
        "threads": torch.get_num_threads(),
        "dtype": str(torch.get_default_dtype()),
        "own": [random.random(), float(np.random.random()), float(torch.rand(()))],
    }  # fmt: skip


if __name__ == "__main__":
    do = sys.argv[1]
    if do == "facts":
        print(json.dumps(facts()))
    elif do == "sleep":
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        print("here", flush=True)
        time.sleep(600)
    elif do:
        end_process(int(do))
