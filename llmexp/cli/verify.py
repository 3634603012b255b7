"""The command `llmexp verify WHAT`: composes the user's config, runs the proof, prints and records
what it found."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmexp import __version__, fileio, rundir
from llmexp.cli import hydra_flags
from llmexp.compose import app, command_line, environment, origin
from llmexp.config import Config, ConfigError, nearest, plain
from llmexp.redact import concealed, redacted
from llmexp.verify.checks import Check, said

WHAT = {
    "geometry": "one big batch, accumulation, ranks, masked targets and a tail compute the same",
    "resume": "a run that is killed again and again ends bit-equal to an unbroken one",
    "determinism": "the same run twice is bit-equal",
    "data": "every token in range, files as they were written, each sequence once per epoch",
}
RECORD = "verify.json"
PASS, FAIL = 0, 1


def run(arguments: list[str]) -> int:
    """`llmexp verify geometry|resume|determinism|data [--shrink] [--steps N] [overrides]`; returns
    the exit code."""
    what, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if what in ("-h", "--help") or {"-h", "--help"} & set(rest):
        usage()
        return PASS
    if what not in WHAT:
        raise ConfigError(
            f"verify {what}: there is no such proof.{nearest(what, WHAT)} Known: {', '.join(WHAT)}"
        )
    args = command_line.parse("verify", rest)
    if hydra_flags.asked(args):
        raise ConfigError("verify: --cfg, --info and --hydra-help are flags of llmexp train")
    if args.steps is not None and args.steps < 2:
        raise ConfigError(
            f"--steps {args.steps}: at least 2 optimizer steps are needed; for example --steps 8"
        )
    if what == "data" and (args.steps is not None or args.shrink):
        flag = f"--steps {args.steps}" if args.steps is not None else "--shrink"
        raise ConfigError(
            f"{flag}: has no meaning for verify data, which reads all data; llmexp verify data "
            "data=text"
        )
    with app.hydra_app(args.config_dir) as hydra:
        cfg, multirun = app.compose(hydra, args.overrides, args.multirun)
        if multirun:
            raise ConfigError("verify: takes one config, not a sweep; leave out -m")
        origin.refuse_unused(args.overrides, multirun)
        config, wanted = app.typed(cfg), app.chosen_folder(cfg, "hydra.run.dir")
    environment.refuse_secrets(args.overrides, "the command line")
    rundir.check_writable(wanted)
    fixed = app.fixed_folder(args.overrides, "hydra.run.dir")
    if (
        fixed and wanted.is_dir() and any(wanted.iterdir())
    ):  # runs of another verification would be gone on with
        raise ConfigError(
            f"hydra.run.dir={wanted}: is not empty; choose a new folder, for example {wanted}-2"
        )
    path = rundir.claim(wanted, fixed)
    said(
        f"verify {what}: {WHAT[what]}; {'its record is' if what == 'data' else 'its runs are'} in "
        f"{path}"
    )
    proof = importlib.import_module(f"llmexp.verify.{what}")
    began = time.monotonic()
    made_of = {"overrides": list(args.overrides), "steps": args.steps, "shrink": args.shrink}
    try:
        checks: list[Check] = proof.verify(config, path, steps=args.steps, shrink=args.shrink)
        return report(what, path, config, checks, time.monotonic() - began, made_of)
    except BrokenPipeError:  # nobody reads what is printed; an OSError like the following
        raise
    except (
        Exception
    ) as error:  # also of the files that it reads and writes, and of a model of the user's own
        words = str(error)
        if not isinstance(error, (ConfigError, OSError)):
            at = traceback.extract_tb(error.__traceback__)[-1]
            words = (
                f"verify {what} could not be made: {type(error).__name__}: {words} "
                f"({at.filename}:{at.lineno})"
            )
        words = redacted(words)
        with contextlib.suppress(OSError):  # the disk may be what failed
            record(
                what,
                path,
                config,
                time.monotonic() - began,
                made_of,
                passed=None,
                error=words,
                checks=[],
            )
        raise ConfigError(words) from error
    except KeyboardInterrupt:
        print("llmexp: stopped; nothing is proven", file=sys.stderr)
        raise


def report(
    what: str,
    path: Path,
    config: Config,
    checks: Sequence[Check],
    seconds: float,
    made_of: dict[str, Any],
) -> int:
    """Print the checks, a line each, and the verdict; write verify.json. Returns the exit code."""
    passed = (
        bool(checks)
        and all(c.passed is not False for c in checks)
        and any(c.passed for c in checks)
    )
    for check in checks:
        mark = {True: "PASS", False: "FAIL", None: "-   "}[check.passed]
        limit = "" if check.limit is None else f" (allowed: {_figure(check.limit)})"
        found = "" if check.found is None else f": {_figure(check.found)}{limit}"
        note = f"; {check.note}" if check.note else ""
        said(redacted(f"{mark}  {check.what}{found}{note}"), "      ")
    failed = sum(c.passed is False for c in checks)
    left = sum(c.passed is None for c in checks)
    unseen = f", {left} could not be looked at here" if left else ""
    said(
        f"{'PASS' if passed else 'FAIL'}: {what}, {failed} of {len(checks)} checks failed{unseen}, "
        f"{seconds:.0f} s"
    )
    record(what, path, config, seconds, made_of, passed=passed, error=None, checks=checks)
    print(f"record  {path / RECORD}", flush=True)
    return PASS if passed else FAIL


def record(
    what: str,
    path: Path,
    config: Config,
    seconds: float,
    made_of: dict[str, Any],
    *,
    passed: bool | None,
    error: str | None,
    checks: Sequence[Check],
) -> None:
    """Write verify.json, without values of secrets and variables. `passed` None: no verdict,
    because of `error`."""
    from llmexp.metrics.hardware import commit, versions

    found = {
        "format": 1,
        "verify": what,
        "passed": passed,
        "error": error,
        "seconds": seconds,
        **made_of,
        "config": plain(config),
        "llmexp": __version__,
        "versions": versions(),
        "commit": commit(),
        "checks": [_strict(dataclasses.asdict(c)) for c in checks],
    }
    fileio.write_json(path / RECORD, concealed(found))


def _figure(value: float | int | str) -> str:
    return (
        f"{value:.3g}"
        if isinstance(value, float)
        else f"{value:,}"
        if isinstance(value, int)
        else value
    )


def _strict(check: dict[str, Any]) -> dict[str, Any]:
    """Without nan and infinities, which JSON does not have: they become text."""
    return {k: str(v) if isinstance(v, float) and v - v != 0 else v for k, v in check.items()}


def usage() -> None:
    print(
        "usage: llmexp verify PROOF [--steps N] [--shrink]\n                     [GROUP=OPTION "
        "...] [KEY=VALUE ...]\n"
    )
    said("Proves it for the run that these settings describe, by runs like those of llmexp train.")
    print()
    flags = {
        "--steps N": "optimizer steps of each run (default: as many as the proof needs)",
        "--shrink": "2 layers, at most 64 tokens a sequence, small batches: for what is too large "
        "here",
    }
    for name, text in (WHAT | flags).items():
        said(f"  {name:<12}  {text}", " " * 16)
    print()
    said(
        "Exit code 0: PASS; 1: FAIL; 2: refused, or a run could not be made. The figures are in "
        "verify.json."
    )
