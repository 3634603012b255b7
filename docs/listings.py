"""The listings of README.md and docs/: what commands print, as they print it today.

    python docs/listings.py           runs the commands (some minutes) and writes their output into the files
    python docs/listings.py verify    only those of commands that begin with this word

tests/test_listings.py runs small versions of the same commands and compares what the machine does
not decide.
"""  # noqa: E501

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = "100"


@dataclass(frozen=True)
class Listing:
    """A block of a file that begins with `$ llmexp COMMAND`. Of the output are shown the lines that
    match a pattern of `keep`, with what is indented below them; ... stands for the others."""

    file: str
    command: str
    keep: tuple[str, ...]
    small: tuple[str, ...]  # overrides that make the same lines in a few seconds


SMALL = (
    "model.n_layers=2", "model.n_heads=2", "model.d_model=16", "model.d_ff=16",
    "batch.sequence_length=16",
)  # fmt: skip
LISTINGS = (
    Listing(
        "README.md",
        "train",
        (
            r"(data|train|validation|model|batch|budget|warm-up|FLOPs|device|precision|folder|start)  ",  # noqa: E501
            r"step +(50|300)/300",
            r"(result|tokens_seen|final (train|val)/loss|picture|folder|next)  ",
        ),
        SMALL,
    ),
    Listing(
        "README.md",
        "verify resume",
        (r"[vk]", "PASS", "-"),
        (*SMALL, "--steps=6"),
    ),
    Listing(
        "docs/verify.md",
        "verify geometry",
        (r"verify ", r"\d+ steps", "PASS  fp.*two ranks", "PASS: "),
        (*SMALL, "precision=fp32"),
    ),
)


def shown(output: str, keep: tuple[str, ...]) -> list[str]:
    """The lines of an output that a listing shows."""
    lines: list[str] = []
    kept = False
    output = re.sub(r"its\s+runs\s+are\s+in\s+\S+", "its runs are in ...", output)
    for line in re.sub(r"valid\s+in\s+a\s+sequence", "valid in a sequence", output).splitlines():
        kept = any(re.match(pattern, line) for pattern in keep) or (kept and line.startswith("  "))
        if kept:
            lines.append(line)
        elif not lines or lines[-1] != "...":
            lines.append("...")
    return lines[:-1] if lines[-1] == "..." else lines


def find(listing: Listing, text: str) -> re.Match[str]:
    """The block in its file: the line of the command, then its output."""
    found = re.search(
        rf"```\n(\$ llmexp {re.escape(listing.command)}(?: +#.*)?\n)(.*?)```\n", text, re.S
    )
    assert found is not None, (
        f"{listing.file} has no block that begins with $ llmexp {listing.command}"
    )
    return found


def written(listing: Listing, folder: str) -> list[str]:
    """What the command prints in `folder`."""
    command = [sys.executable, "-m", "llmexp", *listing.command.split()]
    env = {**os.environ, "COLUMNS": COLUMNS, "PYTHONPATH": str(ROOT), "WANDB_MODE": "offline"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return shown(done.stdout, listing.keep)


def main() -> None:
    for listing in LISTINGS:
        if not listing.command.startswith(tuple(sys.argv[1:]) or ""):
            continue
        print(f"llmexp {listing.command}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            lines = written(listing, folder)
        path = ROOT / listing.file
        text = path.read_text()
        block = find(listing, text)
        path.write_text(text[: block.start(2)] + "\n".join(lines) + "\n" + text[block.end(2) :])


if __name__ == "__main__":
    main()
