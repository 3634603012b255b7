"""Train, as the command does, in a process of its own."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmexp.api.folder import Run, load
from llmexp.config.commands import command
from llmexp.config.values import ConfigError, refusal
from llmexp.system.child import DONE, PREEMPTED, REFUSED


def train(overrides: Sequence[str] = (), *, quiet: bool = False) -> Any:
    """Train as `llmexp train OVERRIDES` does, in a process of its own, and return the run.

    Return the list of the runs of a sweep (-m). The lines of the command are printed, with `quiet`
    only errors. A run that train.stop_step stopped is returned too. Raises ConfigError for what is
    refused before training, RunFailed where a run did not come to its end.
    """
    if isinstance(overrides, str):
        raise TypeError(f"a list is needed: llmexp.train([{overrides!r}])")
    command = [sys.executable, "-m", "llmexp", "train", *overrides, "--json"]
    lines: list[str] = []
    with tempfile.TemporaryFile() as result:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=result, stderr=subprocess.PIPE
        )
        try:
            relay(process, lines, quiet)
        except KeyboardInterrupt:  # a notebook interrupts this process alone
            process.send_signal(signal.SIGINT)
            relay(process, lines, quiet)
            raise
        result.seek(0)
        text = result.read()
    code = process.returncode
    printed = [line.removeprefix("llmexp: ") for line in lines if line.startswith("llmexp: ")]
    why = "\n".join(printed) or f"llmexp train ended with exit code {code}"
    if code == REFUSED:
        ended = json.loads(text or "{}")
        kinds = [run["kind"] for run in ended.get("runs", ()) if "kind" in run]
        error = ended.get("error") or {"key": None, "code": (*kinds, "failed")[0]}
        raise refusal(error | {"message": why})
    found: dict[str, Any] = {"path": "", "runs": []}
    if text or code == DONE:
        found = result_of(text, overrides)
    runs = [load(run["path"]) for run in found["runs"]]
    if code not in (DONE, PREEMPTED):
        raise RunFailed(why, code, runs)
    sweep = len(runs) != 1 or Path(found["path"]) != runs[0].path
    return runs if sweep else runs[0]


class RunFailed(RuntimeError):
    """A run, or a run of a sweep, that did not come to its end. `runs`: those that were made."""

    def __init__(self, text: str, exit_code: int, runs: list[Run]) -> None:
        super().__init__(text)
        self.exit_code, self.runs = exit_code, runs


def result_of(text: bytes, words: Sequence[str]) -> dict[str, Any]:
    """Return what `llmexp train --json` printed.

    Raises ConfigError for words that made it print something else and train nothing, as --help.
    """
    with contextlib.suppress(ValueError):
        found = json.loads(text)
        if isinstance(found, dict) and "runs" in found:
            return dict(found)
    flags = [word for word in words if word.startswith("-")]
    raise ConfigError(
        "unsupported",
        f"{' '.join(flags)}: trains no run; it is for the command line: {command('train', *flags)}",
    )


def relay(process: subprocess.Popen[bytes], lines: list[str], quiet: bool) -> None:
    """Print what the command prints, until it ends."""
    assert process.stderr is not None
    for raw in process.stderr:
        lines.append(raw.decode(errors="replace").rstrip("\n"))
        if not quiet:
            print(lines[-1], flush=True)
    process.wait()
