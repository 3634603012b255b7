"""Hooks by which points of a sweep end, told apart by their weight decay and accumulation.

A file in the working folder makes a fault happen once only.
"""

import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import torch

from llmexp.system.child import STOP, children

DRAWN = random.random(), np.random.random(), torch.rand(2)  # by each process that imports this


def once(name):
    try:
        os.close(os.open(name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def wait(there):
    while not (there() or STOP.requested):
        time.sleep(0.02)


def decay(context):
    return context.optimizers[0].param_groups[0]["weight_decay"]


def grid(event, context):
    """Of 2 x 3 points one raises, one is killed once it is `armed`, one waits for `go`."""
    if event != "step_start":
        return
    point = (decay(context), context.run.gradient_accumulation_steps)
    if point == (0.2, 2) and context.step == 12:
        raise RuntimeError("boom")
    if point == (0.1, 4) and context.step >= 15:  # or later, where it was stopped there
        wait(lambda: os.path.exists("armed"))
        if os.path.exists("armed") and once("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
    if point == (0.3, 2) and context.step == 7:
        while once("reached") or not os.path.exists("go"):
            time.sleep(0.02)


def lose_task(event, context):
    if event == "step_start" and context.step == 15 and decay(context) == 0.3 and once("lost"):
        os.kill(os.getppid(), signal.SIGKILL)  # Ray's own process


def rest(event, context):
    if event == "step_start" and context.step == 4:
        once(f"rests {decay(context)}")
        wait(lambda: False)


def by_size(event, context):
    """Fail in another way for each micro-batch size."""
    if event == "step_end" and context.step == 2:
        size = context.run.micro_batch_size
        if size == 1:
            raise RuntimeError("boom, first " + "many words " * 12 + "the last one")
        if size == 2:
            os._exit(7)
        if size == 3:
            os.kill(os.getpid(), signal.SIGKILL)


def fast_fails(event, context):
    if event == "step_end" and context.optimizers[0].param_groups[0]["lr"] > 0.01:
        raise RuntimeError("diverged")


def lose_template(event, context):
    """Kill what the sweep forks its points of, once, from the first of them."""
    if event == "step_start" and context.step == 2 and once("template"):
        beside = sorted(pid for pid in children(os.getppid()) if pid != os.getpid())
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in beside}
        os.kill(next(p for p, c in commands.items() if b"template:" in c), signal.SIGKILL)
