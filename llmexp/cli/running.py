"""Run a command: read the words of the command line for its function, print what it returns."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import io
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, TextIO

from llmexp.config.arguments import Held, Parser, call
from llmexp.config.values import ConfigError
from llmexp.system import fileio
from llmexp.system.child import DONE, release_signals
from llmexp.system.redact import redacted, warn
from llmexp.system.text import columns

Screen = Annotated[bool, "which of many knobs matter: two values of each, in 8, 16 or 32 runs"]
CommandLine = Annotated[Any, "KEY=VALUE", "settings of the run, as for llmexp train"]
Paths = Annotated[str | Path, "PATH", "runs, sweeps, folders of them, globs (default: outputs)"]
Out = Annotated[Sequence[Path], "FILE", "also write the answer there; may be given several times"]


@dataclass(frozen=True)
class Printed:
    """Hold what a comparison or a fit has found, to be printed or read as data."""

    found: Any
    why: bool = False
    words: ClassVar[Any]  # the module that shows it, and returns its data

    def show(self, to: TextIO | None = None) -> None:
        """Print the answer as wide as the terminal is."""
        self.words.show(self.found, to or sys.stdout, columns(), self.why)

    def __str__(self) -> str:
        out = io.StringIO()
        self.show(out)
        return out.getvalue().rstrip("\n")

    @property
    def headline(self) -> str:
        """Return the result in short."""
        return str(self.data["headline"])

    @property
    def problems(self) -> Sequence[str]:
        """Return what could not be read, in words."""
        return tuple(self.found.problems)

    @cached_property
    def data(self) -> dict[str, Any]:
        """Return what the command prints with --json."""
        return dict(self.words.data(self.found))


def function_of(command: str) -> Callable[..., Any]:
    """Return the function of a command; its module imports what it needs, and no more."""
    module = importlib.import_module(f"llmexp.cli.{command}")
    found: Callable[..., Any] = getattr(module, "next_step" if command == "next" else command)
    return found


def run_command(command: str, words: list[str]) -> int:
    """Run a command with the words after its name; return the exit code. Raises ConfigError.

    A function that returns a number has printed what there is. Else `problems` of its answer go to
    standard error, then the answer is printed: `data` as JSON, or by its `show()`, or its text.
    """
    function = function_of(command)
    if {"-h", "--help"} & set(words) and command in ("train", "plan", "prepare"):
        from llmexp.cli.help import print_help

        print_help(command, function, words)
        return DONE
    args = read_line(command, function, words)
    if "line" in args:
        from llmexp.cli import hydra_flags

        if hydra_flags.asked(args):
            return hydra_flags.answer_flags(args)
    ranks = getattr(sys.modules[function.__module__], "ranks", lambda args: 1)(args)
    if ranks > 1 and "RANK" not in os.environ:
        from llmexp.mesh.ranks import run_alike

        return run_alike([command, *words], ranks)
    if ranks > 1:
        release_signals()
    found = call(function, args)
    if isinstance(found, int):
        return found
    for problem in getattr(found, "problems", ()):
        warn(problem)
    if os.environ.get("RANK", "0") != "0":
        return DONE
    if args.json:
        print(as_json(found.data if hasattr(found, "data") else dataclasses.asdict(found)))
    elif hasattr(found, "show"):
        found.show()
    else:
        print(redacted(str(found)))
    return getattr(found, "exit_code", DONE)


def as_json(found: Mapping[str, Any]) -> str:
    """Return strict JSON."""
    return json.dumps(found, indent=2, allow_nan=False, default=str)


def read_line(
    command: str, function: Callable[..., Any], words: Sequence[str]
) -> argparse.Namespace:
    """Return the arguments of a command; --allow takes effect. Raises ConfigError.

    Those of a command that composes a config have all of them as `line`, too.
    """
    parser, takes = Parser(f"llmexp {command}", function), inspect.signature(function).parameters
    if not {"line", "run"} & set(takes):
        return parser.parse_intermixed_args(words)
    from llmexp.compose.command_line import parse, take_allowed

    if os.environ.get("LLMEXP_ALLOW") or any(word.startswith("--allow") for word in words):
        words = take_allowed(words)
    text = "allow parts from your package (looked for in this folder too)"
    parser.add_argument("--allow", metavar="PACKAGE", help=text)
    if "line" in takes:
        text = "your own config files: DIR/model/mine.yaml becomes model=mine"
        parser.add_argument("--config-dir", metavar="DIR", help=text)
    if "run" in takes or {"-h", "--help"} & set(words):
        return parser.parse_intermixed_args(words)
    return parse(command, function, words)


def paths_of(given: Sequence[Any]) -> list[Any]:
    """Return the paths of runs, folders and globs, and data frames as they are; else outputs."""
    return [one.value if isinstance(one, Held) else Path(one) for one in given or ["outputs"]]


def words_in(given: Sequence[str]) -> list[str]:
    """Return names that are given one by one, or several with commas."""
    return [name.strip() for text in given for name in text.split(",") if name.strip()]


def check_out(out: Sequence[Path], forms: Mapping[str, Any]) -> None:
    """Raise ConfigError for a file that cannot be written, before anything is read."""
    for path in map(Path, out):
        way = f"for example --out /tmp/{path.name}"
        if path.suffix.lower() not in forms:
            ends = f"the file's name must end in {', '.join(forms)}"
            text = f"--out {path}: {ends}; for example --out table{min(forms)}"
            raise ConfigError("unknown_option", text)
        if not path.parent.is_dir():
            text = f"--out {path}: there is no folder {path.parent}; {way}"
            raise ConfigError("unknown_file", text)
        if path.is_dir() or not os.access(path.parent, os.W_OK):
            raise ConfigError("disk", f"--out {path}: cannot be written; {way}")


def write_out(out: Sequence[Path], forms: Mapping[str, Callable[[Any], Any]], found: Any) -> None:
    """Write an answer into files, each in the form of its name. Raises OSError in words."""
    for path in map(Path, out):
        try:
            whole = forms[path.suffix.lower()](found)
            fileio.write_whole(path, whole if isinstance(whole, str) else as_json(whole) + "\n")
        except OSError as error:
            why = f"could not be written: {error.strerror or error}"
            way = f"name a file elsewhere, for example --out /tmp/{path.name}"
            raise OSError(f"--out {path}: {why}; {way}") from error
        warn(f"wrote {path}")
