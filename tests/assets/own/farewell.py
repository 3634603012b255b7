"""A run that is killed while it prints its end, and data that take for ever to prepare."""

import os
import signal
import time

import numpy as np


def hook(event, context):
    from llmexp.train import summary

    summary.plot_losses = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)


def slow_numbers():
    open("preparing", "w").close()
    for _ in range(60_000):
        time.sleep(0.05)
    return np.arange(2000) % 60, np.arange(200) % 60
