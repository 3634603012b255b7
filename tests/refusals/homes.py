"""Working folders in which commands are refused: each function fills an empty one."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from tests.runs import Runs


def empty(work: Path, runs: Runs) -> None:
    """Nothing lies there."""


def files(work: Path, runs: Runs) -> None:
    """Data of every bad kind, broken and sound files of options."""
    (work / "empty.txt").touch()
    (work / "short.txt").write_text("hi")
    (work / "latin.txt").write_bytes(b"x" * 60 + b"\xff" + b"x" * 300)
    (work / "good.txt").write_text("hello world, how are you? " * 50)
    (work / "odd.bin").write_bytes(bytes(101))
    np.array([1] * 400, np.uint16).tofile(work / "a.bin")
    np.array([1] * 100 + [5000], np.uint16).tofile(work / "b.bin")
    np.save(work / "floats.npy", np.zeros(50))
    (work / "some.zst").write_bytes(b"\x28\xb5\x2f\xfd" + bytes(100))
    os.mkfifo(work / "pipe.txt")
    (work / "bad" / "model").mkdir(parents=True)
    (work / "bad" / "model" / "mine.yaml").write_text("a: [1\nb")
    own = work / "own" / "experiment"
    own.mkdir(parents=True)
    clipped = "# @package _global_\ndefaults:\n  - override /clip: none\nclip:\n  max_norm: 0.5\n"
    (own / "clipped.yaml").write_text(clipped)
    (own / "nowhere.yaml").write_text("train:\n  max_steps: 5\n")


def run(work: Path, runs: Runs) -> None:
    """A finished run of four steps in the folder `run`."""
    more = ["data=synthetic", "data.n_tokens=5000", "train.max_steps=4", "checkpoint.every=2"]
    runs.copy(work / "run", *more)
