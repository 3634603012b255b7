"""The command `llmexp verify WHAT`: composes the user's config, runs the proof, prints and records what it found."""

from __future__ import annotations

import dataclasses
import importlib
import shutil
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmexp import __version__, folder
from llmexp.config import ConfigError, nearest, plain
from llmexp.verify.checks import Check

WHAT = {
    "geometry": "one big batch, accumulation, ranks, masked targets and a tail compute the same",
    "resume": "a run that is killed again and again ends bit-equal to an unbroken one",
    "determinism": "the same run twice is bit-equal",
    "data": "every token in range, no overlap, each sequence once per epoch",
}
RECORD = "verify.json"
PASS, FAIL = 0, 1


def run(arguments: list[str]) -> int:
    """`llmexp verify geometry|resume|determinism|data [--shrink] [--steps N] [overrides]`; returns the exit code."""
    what, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if what in ("-h", "--help") or {"-h", "--help"} & set(rest):
        usage()
        return PASS
    if what not in WHAT:
        raise ConfigError(f"verify {what}: there is no such proof.{nearest(what, WHAT)} Known: {', '.join(WHAT)}")
    from llmexp import launch

    args = launch.parse("verify", rest)
    with launch.hydra_app(args.config_dir) as hydra:
        cfg, multirun = launch.compose(hydra, args.overrides, args.multirun)
        if multirun:
            raise ConfigError("verify: takes one config, not a sweep; leave out -m")
        config, wanted = launch.typed(cfg), launch.chosen_folder(cfg, "hydra.run.dir")
    if args.steps is not None and args.steps < 2:
        raise ConfigError(f"--steps {args.steps}: at least 2 optimizer steps are needed; for example --steps 8")
    folder.check_writable(wanted)
    fixed = launch.fixed_folder(args.overrides, "hydra.run.dir")
    if fixed and (wanted / RECORD).exists():
        raise ConfigError(f"hydra.run.dir={wanted}: holds the record of a verification already; choose another folder")
    path = folder.claim(wanted, fixed)
    print(textwrap.fill(f"verify {what}: {WHAT[what]}; its runs are in {path}", width()), flush=True)
    proof = importlib.import_module(f"llmexp.verify.{what}")
    began = time.monotonic()
    checks: list[Check] = proof.verify(config, path, steps=args.steps, shrink=args.shrink)
    return report(what, path, config, checks, time.monotonic() - began, args.overrides)


def report(
    what: str, path: Path, config: Any, checks: Sequence[Check], seconds: float, overrides: Sequence[str]
) -> int:
    """Prints the checks, a line each, and the verdict; writes verify.json. Returns the exit code."""
    from llmexp.metrics.hardware import commit, versions

    passed = bool(checks) and all(c.passed is not False for c in checks) and any(c.passed for c in checks)
    for check in checks:
        mark = {True: "PASS", False: "FAIL", None: "-   "}[check.passed]
        limit = "" if check.limit is None else f" (allowed: {_figure(check.limit)})"
        found = "" if check.found is None else f": {_figure(check.found)}{limit}"
        note = f"; {check.note}" if check.note else ""
        print(textwrap.fill(f"{mark}  {check.what}{found}{note}", width(), subsequent_indent=" " * 6))
    failed = sum(c.passed is False for c in checks)
    left = sum(c.passed is None for c in checks)
    unseen = f", {left} could not be looked at here" if left else ""
    print(f"{'PASS' if passed else 'FAIL'}: {what}, {failed} of {len(checks)} checks failed{unseen}, {seconds:.0f} s")
    record = {
        "format": 1,
        "verify": what,
        "passed": passed,
        "seconds": seconds,
        "overrides": list(overrides),
        "config": plain(config),
        "llmexp": __version__,
        "versions": versions(),
        "commit": commit(),
        "checks": [_strict(dataclasses.asdict(c)) for c in checks],
    }
    folder.write_json(path / RECORD, record)
    print(f"record  {path / RECORD}", flush=True)
    return PASS if passed else FAIL


def _figure(value: float | int | str) -> str:
    return f"{value:.3g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value


def _strict(check: dict[str, Any]) -> dict[str, Any]:
    """Without nan and infinities, which JSON does not have: they become text."""
    return {k: str(v) if isinstance(v, float) and v - v != 0 else v for k, v in check.items()}


def width() -> int:
    return min(110, max(40, shutil.get_terminal_size((110, 20)).columns))


def usage() -> None:
    print("usage: llmexp verify PROOF [--steps N] [--shrink] [GROUP=OPTION ...] [KEY=VALUE ...]\n")
    for name, text in WHAT.items():
        print(textwrap.fill(f"  {name:<12}  {text}", width(), subsequent_indent=" " * 16))
    print(
        "\nProves it for the run that these settings describe, in processes and folders like those of llmexp train."
        "\n  --steps N   optimizer steps of each run (default: as many as the proof needs)"
        "\n  --shrink    fewer layers, shorter sequences, smaller batches: for a model that is too large here"
        "\nExit code 0: PASS; 1: FAIL; 2: refused, or a run could not be made. The figures are in verify.json.",
        file=sys.stdout,
    )
