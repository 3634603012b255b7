"""Train, plan, prepare, average and export, as the commands do."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmexp.program.folder import Run, load, named, words_of
from llmexp.settings.commands import command
from llmexp.settings.values import ConfigError, refusal
from llmexp.system.child import DONE, PREEMPTED, REFUSED

if TYPE_CHECKING:
    from llmexp.cli.average import Averaged
    from llmexp.cli.prepare import Prepared
    from llmexp.cli.tokenizer import TrainedTokenizer
    from llmexp.exchange.export import Exported
    from llmexp.forecast.planned import Planned


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
        found = json.loads(text or "{}")
        kinds = [run["kind"] for run in found.get("runs", ()) if "kind" in run]
        error = found.get("error") or {"key": None, "code": (*kinds, "failed")[0]}
        raise refusal(error | {"message": why})
    found = {"path": "", "runs": []}
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


@contextlib.contextmanager
def allowed_in_a_call() -> Iterator[None]:
    """Take back at the end what --allow allows: a command ends its process, a program goes on."""
    path, before = list(sys.path), {k: os.environ.get(k) for k in ("LLMEXP_ALLOW", "PYTHONPATH")}
    try:
        yield
    finally:
        sys.path[:] = path
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@allowed_in_a_call()
def plan(overrides: Sequence[str] = (), *, measure: bool = False) -> Planned | list[Planned]:
    """Check everything and return the plan of a run, as `llmexp plan` prints it.

    Return the list of the plans of its points for a sweep (-m). Raises ConfigError for what train
    would refuse.
    """
    from llmexp.cli.plan import planned
    from llmexp.compose.command_line import parse
    from llmexp.forecast.planned import Planned
    from llmexp.sweep.points import reasons

    found = planned(parse("plan", words_of(overrides, measure=measure)))
    if isinstance(found, Planned):
        return found
    if found.refused:
        raise ConfigError(found.refused[0].kind, "\n".join(reasons(found.refused)))
    return found.plans


@allowed_in_a_call()
def prepare(overrides: Sequence[str] = ()) -> Prepared | str:
    """Tokenise the data into the cache, as `llmexp prepare` does, and return their counts.

    With prepare.part return the part. Raises ConfigError.
    """
    from llmexp.cli.prepare import prepared
    from llmexp.compose.command_line import parse

    return prepared(parse("prepare", words_of(overrides)))


@allowed_in_a_call()
def tokenizer(overrides: Sequence[str], vocab_size: int, *, pattern: str = "gpt2",
              out: str | os.PathLike[str] | None = None) -> TrainedTokenizer:  # fmt: skip
    """Train a tokenizer on the data of the overrides, as `llmexp tokenizer` does.

    Raises ConfigError.
    """
    from llmexp.cli.tokenizer import trained
    from llmexp.compose.command_line import parse

    words = words_of(overrides, vocab_size=vocab_size, pattern=pattern, out=out)
    return trained(parse("tokenizer", words))


def export(run: Run | str | os.PathLike[str], folder: str | os.PathLike[str], *,
           dtype: str | None = None, weights: str = "model", keep_padding: bool = False,
           check: bool = True) -> Exported:  # fmt: skip
    """Write the model of RUN[@STEP] for Hugging Face transformers, as `llmexp export --to hf` does.

    `dtype`: fp32, bf16, fp16, None for as trained. `keep_padding`: also write the rows of the
    vocabulary behind the tokenizer's ids. `check`: compare what transformers finds in the folder.
    Raises ConfigError.
    """
    from llmexp.cli.export import exported

    return exported(named(run), Path(folder), dtype, weights, keep_padding, check)


def average(*runs: Run | str | os.PathLike[str], last: int | None = None, weights: str = "model",
            out: str | os.PathLike[str] | None = None) -> Averaged:  # fmt: skip
    """Write the mean of the weights of checkpoints, as `llmexp average` does.

    `runs` are RUN[@STEP]s; with `last` so many checkpoints of each. Raises ConfigError.
    """
    from llmexp.cli.average import averaged

    return averaged([named(run) for run in runs], last, weights, Path(out) if out else None)
