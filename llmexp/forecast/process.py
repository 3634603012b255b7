"""Say what a process that trains on a CPU holds beside its model.

That is Python, torch, and what the first step leaves behind (code that is read, workspaces of
products).
"""

from __future__ import annotations

import functools
import signal
import subprocess
import sys

import torch
from torch import nn

from llmexp.system import hardware
from llmexp.system.child import start
from llmexp.train import worker  # noqa: F401  (a run has imported it)

CPU = torch.device("cpu")


@functools.cache
def process_bytes(threads: int) -> int:
    """Return what such a process takes, measured in one of its own.

    This one holds more or less, such as what it has planned before.
    """
    child = start("llmexp.forecast.process", str(threads), stdout=subprocess.PIPE, text=True)
    text, _ = child.communicate()
    if child.returncode:
        raise RuntimeError(f"a process without a run ended with exit code {child.returncode}")
    return int(text)


def step_a_little() -> None:
    """Go through a model of some 2 MB and back, as a step does."""
    embedding, layer = nn.Embedding(256, 128), nn.TransformerEncoderLayer(128, 4, 512)
    ids_bt = torch.zeros(4, 128, dtype=torch.int64)
    logits_btv = layer(embedding(ids_bt)) @ embedding.weight.T
    nn.functional.cross_entropy(logits_btv.flatten(0, 1), ids_bt.flatten()).backward()


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # the plan may be stopped before the answer
    torch.set_num_threads(int(sys.argv[1]))
    step_a_little()
    print(round(hardware.peak_memory_gib(CPU) * 2**30))
