"""`llmexp verify PROOF`: compose the config, run the proof, print and record what it found."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from llmexp import __version__
from llmexp.cli.running import CommandLine
from llmexp.compose import app, command_line, security
from llmexp.config.kinds import kind_of_error
from llmexp.config.sections import Config, plain
from llmexp.config.values import AUTO, ConfigError, knob, nearest, refuse
from llmexp.folders import rundir
from llmexp.system import fileio
from llmexp.system.redact import concealed, redacted, warn
from llmexp.system.workers import warm
from llmexp.verify.checks import Check, print_wrapped

PROOFS = {
    "geometry": "one big batch, accumulation, ranks, masked targets and a tail compute the same",
    "resume": "a run that is killed again and again ends bit-equal to an unbroken one",
    "determinism": "the same run twice is bit-equal",
    "transfer": "models of all widths begin to learn alike, so that the rate of one holds for all",
    "data": "every token in range, files as they were written, each sequence once per epoch",
}
_RECORD = "verify.json"
PASS, FAIL = 0, 1


def verify(
    proof: Annotated[str, "PROOF", "; ".join(f"{name}: {text}" for name, text in PROOFS.items())],
    line: CommandLine = (),
    *,
    steps: Annotated[
        int | None,
        knob("optimizer steps of each run (default: as many as are needed)", 8, at_least=2),
    ] = None,
    shrink: Annotated[
        bool,
        "2 layers, at most 64 tokens a sequence, small batches: for what is too large here",
    ] = False,
) -> int:
    """Prove on this machine what holds for the run that the settings describe, by runs like those.

    Exit code 0: PASS; 1: FAIL; 2: refused, or a run could not be made. The figures are in
    verify.json.
    """
    if proof not in PROOFS:
        text = f"there is no such proof.{nearest(proof, PROOFS)} Known: {', '.join(PROOFS)}"
        raise ConfigError("unknown_option", f"verify {proof}: {text}")
    if proof == "data" and (steps is not None or shrink):
        flag = f"--steps {steps}" if steps is not None else "--shrink"
        text = "is not supported by verify data, which reads all data; llmexp verify data data=text"
        raise ConfigError("idle_knob", f"{flag}: {text}")
    with app.composed(line, "verify") as (cfg, multirun):
        command_line.refuse_unused(line.overrides, multirun)
        config, wanted = app.typed_config(cfg), app.chosen_folder(cfg, "hydra.run.dir")
        if config.fork.run is not None:
            text = "verify proves runs from their beginning; leave it out"
            raise refuse("unsupported", "fork.run", config.fork.run, text)
        if config.batch.micro_batch_size == AUTO:
            raise refuse(
                "unsupported",
                "batch.micro_batch_size",
                AUTO,
                "verify tries no sizes; give a number",
                8,
            )
    security.refuse_secrets(line.overrides, "the command line")
    rundir.check_writable(wanted)
    fixed = app.fixed_folder(line.overrides, "hydra.run.dir")
    # runs of another verification would be gone on with
    if fixed and wanted.is_dir() and any(wanted.iterdir()):
        text = f"is not empty; choose a new folder, for example {wanted}-2"
        raise refuse("exists", "hydra.run.dir", wanted, text)
    made_of = {"overrides": list(line.overrides), "steps": steps, "shrink": shrink}
    return prove(Proof(proof, rundir.claim(wanted, fixed), config, made_of))


@dataclass(frozen=True)
class Proof:
    """A proof to be made: its name, its folder, the config."""

    what: str
    path: Path
    config: Config
    made_of: dict[str, Any]  # overrides, steps and shrink, as they were given
    began: float = field(default_factory=time.monotonic)


def prove(proof: Proof) -> int:
    """Make the proof, print and record what it finds; return the exit code.

    Raises ConfigError, which is recorded too, where it cannot be made.
    """
    what = proof.what
    its = "its record is" if what in ("data", "transfer") else "its runs are"
    print_wrapped(f"verify {what}: {PROOFS[what]}; {its} in {proof.path}")
    module = importlib.import_module(f"llmexp.verify.{what}")
    steps, shrink = proof.made_of["steps"], proof.made_of["shrink"]
    try:
        with warm():
            found = module.verify(proof.config, proof.path, steps, shrink)
        return print_report(proof, found)
    except BrokenPipeError:  # nobody reads what is printed; an OSError like the following
        raise
    # also of the files that it reads and writes, and of a model of the user's own
    except Exception as error:
        words = str(error)
        if not isinstance(error, (ConfigError, OSError)):
            at = traceback.extract_tb(error.__traceback__)[-1]
            what_happened = f"{type(error).__name__}: {words} ({at.filename}:{at.lineno})"
            words = f"verify {what} could not be made: {what_happened}"
        words = redacted(words)
        with contextlib.suppress(OSError):  # the disk may be what failed
            write_record(proof, None, [], words)
        raise ConfigError(kind_of_error(error, "cannot_verify"), words) from error
    except KeyboardInterrupt:
        warn("interrupted; no verdict")
        raise


def print_report(proof: Proof, checks: Sequence[Check]) -> int:
    """Print the checks, a line each, and the verdict; write verify.json. Returns the exit code."""
    failed = sum(c.passed is False for c in checks)
    left = sum(c.passed is None for c in checks)
    passed = not failed and any(c.passed for c in checks)
    for check in checks:
        mark = {True: "PASS", False: "FAIL", None: "-   "}[check.passed]
        limit = "" if check.limit is None else f" (allowed: {_figure(check.limit)})"
        found = "" if check.found is None else f": {_figure(check.found)}{limit}"
        note = f"; {check.note}" if check.note else ""
        print_wrapped(redacted(f"{mark}  {check.what}{found}{note}"), "      ")
    unseen = f", {left} could not be looked at here" if left else ""
    verdict = f"{'PASS' if passed else 'FAIL'}: {proof.what}, {failed} of {len(checks)} checks"
    print_wrapped(f"{verdict} failed{unseen}, {time.monotonic() - proof.began:.0f} s")
    write_record(proof, passed, checks)
    print(f"record  {proof.path / _RECORD}", flush=True)
    return PASS if passed else FAIL


def write_record(
    proof: Proof, passed: bool | None, checks: Sequence[Check], error: str | None = None
) -> None:
    """Write verify.json, without the values of secrets and variables.

    `passed` None: there is no verdict, because of `error`.
    """
    from llmexp.folders.versions import source_commit, versions

    found = {
        "format": 1,
        "verify": proof.what,
        "passed": passed,
        "error": error,
        "seconds": time.monotonic() - proof.began,
        **proof.made_of,
        "config": plain(proof.config),
        "llmexp": __version__,
        "versions": versions(),
        "commit": source_commit(),
        "checks": [_strict(dataclasses.asdict(c)) for c in checks],
    }
    fileio.write_json(proof.path / _RECORD, concealed(found))


def _figure(value: float | int | str) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else value


def _strict(check: dict[str, Any]) -> dict[str, Any]:
    """Without nan and infinities, which JSON does not have: they become text."""
    return {k: str(v) if isinstance(v, float) and v - v != 0 else v for k, v in check.items()}
