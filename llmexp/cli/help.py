"""Print `llmexp train --help`: examples, the knobs that are needed first, flags, groups.

Imports no torch.
"""

from __future__ import annotations

import inspect
import itertools
import shutil
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmexp.config.arguments import JSON_HELP, annotated, flag_of
from llmexp.config.knobs import fields
from llmexp.config.sections import conf_dir

FIRST = (
    "data.train_files", "train.max_steps", "train.max_epochs", "train.max_tokens", "train.seed",
    "batch.micro_batch_size", "batch.gradient_accumulation_steps", "batch.real_batch_size",
    "optimizer.lr", "schedule.warmup_steps", "clip.max_norm", "model.n_layers", "model.d_model",
    "parallelism.nproc_per_node", "checkpoint.every", "tracker.name",
)  # fmt: skip
_FLAGS = {
    "-m, --multirun": "a sweep: every combination of comma-separated values",
    "--cfg job": "print the config with all knobs and stop (--resolve: resolved)",
    "--info": "where the config comes from: all, defaults, searchpath, ...",
    "--config-dir DIR": "your own config files: DIR/model/mine.yaml becomes model=mine",
    "--allow PACKAGE": "allow _target_ and hooks in your package (looked for in this folder too)",
    "--hydra-help": "Hydra's own flags",
}
FOLDER = {
    "hydra.run.dir=DIR": "of a run; default outputs/<name>/<stamp>",
    "hydra.sweep.dir=DIR": "of a sweep; a run is a folder in it",
}
_EXAMPLES = (
    "data=text 'data.train_files=[book.txt]' train.max_epochs=2",
    "batch.real_batch_size=32 batch.gradient_accumulation_steps=4",
    "parallelism=ddp parallelism.nproc_per_node=2",
    "-m batch.gradient_accumulation_steps=1,2,4 clip.max_norm=0.5,1.0",
    "experiment=shakespeare_fast 'data.train_files=[book.txt]'",
)


def _groups(extra: str | None) -> dict[str, str]:
    """Config groups with their options, of conf/ and of the user's --config-dir."""
    found: dict[str, set[str]] = {}
    for root in filter(None, (conf_dir(), Path(extra) if extra else None)):
        for file in sorted(root.glob("*/*.yaml")):
            found.setdefault(file.parent.name, set()).add(file.stem)
    parts = ("base", "hydra")  # no groups
    return {name: ", ".join(sorted(found[name])) for name in sorted(found) if name not in parts}


def print_help(command: str, function: Callable[..., Any], arguments: list[str]) -> None:
    """Print the help of a command that composes a config, with the options of --config-dir."""
    width = min(100, shutil.get_terminal_size((100, 20)).columns)
    extra = None
    for flag, value in itertools.pairwise(arguments):
        extra = value if flag in ("--config-dir", "-cd") else extra
    flags = "[--config-dir DIR] [--allow PACKAGE] [GROUP=OPTION ...] [KEY=VALUE ...]"
    several = command != "prepare"  # which takes the data of one run
    usage = f"usage: llmexp {command} {'[-m] ' * several}{flags}"
    print(textwrap.fill(usage, width, subsequent_indent=" " * 14, break_on_hyphens=False) + "\n")
    examples = [words for words in _EXAMPLES if several or "data." in words]
    print("EXAMPLES", *(f"  llmexp {command} {words}" for words in examples), sep="\n")
    print("\nKNOBS (of each, more: llmexp explain KEY)")
    _table({key: fields()[key].doc.partition(";")[0] for key in FIRST}, 38, width)
    print("\nFLAGS")
    own = {flag_of(one): knob.doc for one, _, knob, _ in annotated(function) if one.name != "line"}
    if inspect.signature(function).return_annotation != "int":
        own["--json"] = JSON_HELP
    _table(own | {k: v for k, v in _FLAGS.items() if several or k[:2] != "-m"}, 38, width)
    print("\nFOLDER")
    _table(FOLDER, 38, width)
    print("\nGROUPS (one option each)")
    _table(_groups(extra), 14, width)


def _table(texts: dict[str, str], column: int, width: int) -> None:
    """Print names, each with its text from `column` on.

    The text stands under the name where the terminal is too narrow.
    """
    column = 4 if width - column < 40 else column
    for name, text in texts.items():
        lines = textwrap.wrap(text, width - column - 2) or [""]
        if len(name) >= column:
            print(f"  {name}")
            name = ""
        print(f"  {name:<{column}}{lines[0]}")
        for line in lines[1:]:
            print(" " * (column + 2) + line)
