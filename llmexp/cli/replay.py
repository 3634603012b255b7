"""Run `llmexp replay RUN@STEP`: repeat a step, and show what made it unusual."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from llmexp.compose import command_line
from llmexp.runs import rundir
from llmexp.settings.values import ConfigError
from llmexp.system.child import DONE
from llmexp.system.text import aligned
from llmexp.verify.replay import ReplayOf, last_step, repeat

_SHOWN = 8  # sequences, and modules
_ARGUMENTS = {
    "run": ("RUN@STEP", "a run folder and the step to look into"),
    "--from": {
        "dest": "start",
        "type": int,
        "metavar": "STEP",
        "help": "look at the same window with the weights of this checkpoint, too (default: the "
        "newest before the step)",
    },
    "--lr": (None, "another learning rate for this step", float),
    "--clip": ("NORM", "another limit of the norm", float),
    "--skip": "go on without the step's window",
    "--after": ("N", "steps to take after it (default 0; --skip: 20)", int),
    "--text": "show how each document begins",
    "--json": "everything as JSON",
}
UNPROVEN = "no step of these has a row, so nothing proves that they came out as in the run"


def main(arguments: list[str]) -> int:
    """Repeat the step, print what it found, and return exit code 0. Raises ConfigError."""
    text = "Repeat a step of a run bit by bit and look into it."
    args = command_line.read("replay", text, _ARGUMENTS, arguments)
    found = repeat(wanted_of(args))
    print(json.dumps(found, indent=2, allow_nan=False) if args.json else _shown(found, args.text))
    return DONE


def wanted_of(args: Any) -> ReplayOf:
    """Return what the arguments ask for. Raises ConfigError."""
    name, at, step = args.run.rpartition("@")
    if not at or not step.isdecimal():
        run = name if name and not Path(args.run).exists() else args.run
        known = last_step(Path(run)) if rundir.is_run(Path(run)) else 400
        raise ConfigError(
            "missing_value",
            f"{args.run}: the step is missing; for example {shlex.quote(f'{run}@{known}')}",
        )
    rundir.check_plain(Path(name))
    rundir.read_config(Path(name))
    for flag, value in (("lr", args.lr), ("clip", args.clip)):
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(
                "out_of_range", f"--{flag} {value}: must be above 0; for example --{flag} 0.5"
            )
    if args.after is not None and args.after < 0:
        raise ConfigError(
            "out_of_range", f"--after {args.after}: must be at least 0; for example --after 20"
        )
    if args.skip and (args.lr is not None or args.clip is not None):
        raise ConfigError(
            "conflict", "--skip: leaves the step out; give --lr and --clip without it"
        )
    after = args.after if args.after is not None else 20 if args.skip else 0
    return ReplayOf(Path(name), int(step), args.start, args.lr, args.clip, args.skip, after)


def _shown(found: dict[str, Any], text: bool) -> str:
    """Return what was found, for the terminal."""
    here, parts = found["here"], [found["sentence"]]
    rows = len(found["equal"])
    proof = f"equal bit by bit to {rows} of its rows" if rows else UNPROVEN
    parts.append(f"repeated from step {found['repeated_from']:,}: {proof}")
    if "loss" in here:
        parts.append(_figures(here))
    if "ended" in found and not found["later"]:
        parts.append(found["ended"])
    parts.append("\n".join(["", sequences(here["sequences"], text)]))
    if "layers" in here:
        parts.append("\n".join(["", modules(here["layers"])]))
    if found["later"]:
        table = [(f"{step:,}", f"{loss:.4f}", f"{norm:.4g}") for step, loss, norm in found["later"]]
        parts.append("\n" + aligned([("step", "loss", "gradient norm"), *table], 0))
        if "ended" in found:
            parts.append(found["ended"])
    return "\n".join(parts)


def _figures(here: dict[str, Any]) -> str:
    """Return the figures of the step in a line."""
    text = f"loss {digits(here['loss'], '.4f')}, gradient norm {digits(here['grad_norm'], '.4g')}"
    if "skipped" in here:
        return f"{text}; the update was not made, as the step has {here['skipped']}"
    return (
        f"{text}, after clipping {here['grad_norm_post_clip']:.4g}; rate {here['lr']:.4g}; after "
        f"the update the loss on the same window is {digits(here['loss_after'], '.4f')}"
    )


def digits(value: float | None, digits: str) -> str:
    return "not finite" if value is None else format(value, digits)


def sequences(found: list[dict[str, Any]], text: bool) -> str:
    """Return the sequences with the largest shares of the gradient as a table.

    Those that are not finite come first.
    """

    def rank(one: dict[str, Any]) -> tuple[bool, float, float]:
        whole = one["loss"] is not None and one["grad_norm"] is not None
        return whole, -(one["share"] or 0), -(one["grad_norm"] or 0)

    order = sorted(found, key=rank)[:_SHOWN]
    head = ("sequence", "first token", "loss", "gradient norm", "share")
    lines = [
        (
            f"{one['sequence']:,}", f"{one['first_token']:,}", digits(one["loss"], ".4f"),
            digits(one["grad_norm"], ".4g"), "-" if one["share"] is None else f"{one['share']:.1%}",
        )
        for one in order
    ]  # fmt: skip
    table = aligned([head, *lines], 0).split("\n")
    if text:
        for number in range(len(order), 0, -1):
            documents = order[number - 1]["documents"]
            table[number + 1 : number + 1] = [
                f"    {'-' if d['loss'] is None else format(d['loss'], '.4f')}  {d['text'][:80]}"
                for d in documents
            ]
    if len(found) > _SHOWN:
        table.append(f"the {_SHOWN} of {len(found)} sequences with the largest shares; --json: all")
    return "\n".join(table)


def modules(layers: dict[str, Any]) -> str:
    """Return the modules with the largest gradients as a table."""
    norms, total = layers["grad_norm"], sum(x * x for x in layers["grad_norm"].values())
    lines = [
        (
            name, f"{norm:.4g}", f"{norm * norm / total if total else 0:.1%}",
            _ratio(layers, name),
        )
        for name, norm in sorted(norms.items(), key=lambda pair: -pair[1])[:_SHOWN]
    ]  # fmt: skip
    return aligned([("module", "gradient norm", "share", "update / weights"), *lines], 1)


def _ratio(layers: dict[str, Any], name: str) -> str:
    weight, update = (layers[key].get(name) for key in ("weight_norm", "update_norm"))
    return f"{update / weight:.3g}" if weight and update is not None else "-"
