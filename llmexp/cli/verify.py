"""`llmexp verify PROOF`: compose the config, run the proof, print and record what it found."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmexp import __version__
from llmexp.cli import hydra_flags
from llmexp.compose import app, command_line, environment, origin
from llmexp.runs import rundir
from llmexp.settings.config import Config, plain
from llmexp.settings.kinds import kind_of_error
from llmexp.settings.values import AUTO, ConfigError, nearest, refuse
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


def main(arguments: list[str]) -> int:
    """Run the proof that the first argument names, and return the exit code."""
    what, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if what in ("-h", "--help") or {"-h", "--help"} & set(rest):
        usage()
        return PASS
    args = parse_proof(what, rest)
    with app.composed(args, "verify") as (cfg, multirun):
        origin.refuse_unused(args.overrides, multirun)
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
    environment.refuse_secrets(args.overrides, "the command line")
    rundir.check_writable(wanted)
    fixed = app.fixed_folder(args.overrides, "hydra.run.dir")
    # runs of another verification would be gone on with
    if fixed and wanted.is_dir() and any(wanted.iterdir()):
        text = f"is not empty; choose a new folder, for example {wanted}-2"
        raise refuse("exists", "hydra.run.dir", wanted, text)
    made_of = {"overrides": list(args.overrides), "steps": args.steps, "shrink": args.shrink}
    return prove(Proof(what, rundir.claim(wanted, fixed), config, made_of))


def parse_proof(what: str, rest: list[str]) -> argparse.Namespace:
    """Return the arguments of a proof. Raises ConfigError for what it cannot take."""
    if what not in PROOFS:
        text = f"there is no such proof.{nearest(what, PROOFS)} Known: {', '.join(PROOFS)}"
        raise ConfigError("unknown_option", f"verify {what}: {text}")
    for run in filter(rundir.is_run, map(Path, rest)):
        given = rundir.read_run(run).get("overrides") or ()
        own = (text for text in given if not text.startswith("hydra."))
        again = rundir.command_on(run, "verify", what, *own)
        text = f"verify takes what a run was made of, not its folder; of this one: {again}"
        raise ConfigError("unsupported", f"{run}: {text}")
    args = command_line.parse("verify", rest)
    if hydra_flags.asked(args):
        raise ConfigError(
            "unsupported", "verify: --cfg, --info and --hydra-help are flags of llmexp train"
        )
    if args.steps is not None and args.steps < 2:
        text = "at least 2 optimizer steps are needed; for example --steps 8"
        raise ConfigError("out_of_range", f"--steps {args.steps}: {text}")
    if what == "data" and (args.steps is not None or args.shrink):
        flag = f"--steps {args.steps}" if args.steps is not None else "--shrink"
        text = "has no meaning for verify data, which reads all data; llmexp verify data data=text"
        raise ConfigError("idle_knob", f"{flag}: {text}")
    return args


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
        warn("stopped; nothing is proven")
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
    from llmexp.runs.versions import source_commit, versions

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


def usage() -> None:
    print(
        "usage: llmexp verify PROOF [--steps N] [--shrink]\n                     [GROUP=OPTION "
        "...] [KEY=VALUE ...]\n"
    )
    print_wrapped(
        "Proves it for the run that these settings describe, by runs like those of llmexp train."
    )
    print()
    flags = {
        "--steps N": "optimizer steps of each run (default: as many as the proof needs)",
        "--shrink": "2 layers, at most 64 tokens a sequence, small batches: for what is too large "
        "here",
    }
    for name, text in (PROOFS | flags).items():
        print_wrapped(f"  {name:<12}  {text}", " " * 16)
    print()
    print_wrapped(
        "Exit code 0: PASS; 1: FAIL; 2: refused, or a run could not be made. The figures are in "
        "verify.json."
    )
