"""steps.bin: what each step of a run came to, whichever steps have rows.

The record of step s is the s-th one: FIELDS as float64, little-endian, the loss and the norm NaN
where there is none, all 0 where it was lost. In a fork those of its parents come first. What is
judged goes by it: which steps have a row is up to train.log_every, and must decide nothing.
"""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path

STEPS_BIN = "steps.bin"
FIELDS = ("train/loss", "target_tokens", "grad_norm", "lr")
STEP_RECORD = struct.Struct(f"<{len(FIELDS)}d")


def steps_up_to(path: Path, step: int) -> bytes:
    """Return the records of a run up to a step, as far as it has them."""
    with contextlib.suppress(OSError), open(path / STEPS_BIN, "rb") as file:
        return file.read(min(step, steps_in(path)) * STEP_RECORD.size)
    return b""


def steps_in(path: Path) -> int:
    """Return how many steps the folder of a run has records of."""
    with contextlib.suppress(OSError):
        return (path / STEPS_BIN).stat().st_size // STEP_RECORD.size
    return 0
