"""Run `llmexp replay RUN@STEP`: repeat a step, and show what made it unusual."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from llmexp.config.values import ConfigError, knob
from llmexp.folders import rundir
from llmexp.system.text import aligned, tabled
from llmexp.verify.replay import ReplayOf, last_step, repeat

_SHOWN = 8  # sequences, and modules
UNPROVEN = "no step of these has a row, so nothing proves that they came out as in the run"


def replay(
    run: Annotated[str, "RUN@STEP", "a run folder and the step to repeat"],
    *,
    from_: Annotated[
        int | None,
        "STEP",
        "analyse the same sequences with the weights of this checkpoint, too (default: the newest "
        "before the step)",
    ] = None,
    lr: Annotated[float | None, knob("another learning rate for this step", 1e-3, above=0)] = None,
    clip: Annotated[float | None, knob("another limit of the norm", 0.5, above=0)] = None,
    skip: Annotated[bool, "go on without the step's sequences"] = False,
    after: Annotated[
        int | None, knob("steps to take after it (default: 0, with --skip 20)", 20, at_least=0)
    ] = None,
    text: Annotated[bool, "show how each document begins"] = False,
) -> Replayed:
    """Repeat a step of a run bit by bit and look into it."""
    name, at, step = run.rpartition("@")
    if not at or not step.isdecimal():
        path = Path(name if name and not Path(run).exists() else run)
        known = last_step(path) if rundir.is_run(path) else 400
        raise ConfigError(
            "missing_value",
            f"{run}: the step is missing; for example {shlex.quote(f'{path}@{known}')}",
        )
    rundir.check_plain(Path(name))
    rundir.read_config(Path(name))
    if skip and (lr is not None or clip is not None):
        raise ConfigError(
            "conflict", "--skip: leaves the step out; give --lr and --clip without it"
        )
    after = after if after is not None else 20 if skip else 0
    return Replayed(repeat(ReplayOf(Path(name), int(step), from_, lr, clip, skip, after)), text)


@dataclass(frozen=True)
class Replayed:
    """A step that was repeated: what `llmexp replay --json` prints."""

    data: Mapping[str, Any]
    text: bool = False

    def __str__(self) -> str:
        found, here, equal = self.data, self.data["here"], len(self.data["equal"])
        proof = f"equal bit by bit to {equal} of its rows" if equal else UNPROVEN
        parts = [found["sentence"], f"repeated from step {found['repeated_from']:,}: {proof}"]
        parts += [_figures(here)] if "loss" in here else []
        ended = [found["ended"]] if "ended" in found else []
        parts += [] if found["later"] else ended
        parts += ["", sequences(here["sequences"], self.text)]
        parts += ["", modules(here["layers"])] if "layers" in here else []
        if found["later"]:
            rows = [dict(zip(("step", "loss", "norm"), row, strict=True)) for row in found["later"]]
            columns = {"step": "{step:,}", "loss": "{loss:.4f}", "gradient norm": "{norm:.4g}"}
            parts += ["", tabled(rows, columns, 0), *ended]
        return "\n".join(parts)


def _figures(here: dict[str, Any]) -> str:
    """Return the figures of the step in a line."""
    text = f"loss {digits(here['loss'], '.4f')}, gradient norm {digits(here['grad_norm'], '.4g')}"
    if "skipped" in here:
        return f"{text}; the update was not made, as the step has {here['skipped']}"
    return (
        f"{text}, after clipping {here['grad_norm_post_clip']:.4g}; rate {here['lr']:.4g}; after "
        f"the update the loss on the same batch is {digits(here['loss_after'], '.4f')}"
    )


def digits(value: float | None, digits: str) -> str:
    return "not finite" if value is None else format(value, digits)


def sequences(found: Sequence[Mapping[str, Any]], text: bool) -> str:
    """Return the sequences with the largest shares of the gradient as a table.

    Those that are not finite come first.
    """

    def rank(one: Mapping[str, Any]) -> tuple[bool, float, float]:
        whole = one["loss"] is not None and one["grad_norm"] is not None
        return whole, -(one["share"] or 0), -(one["grad_norm"] or 0)

    order = sorted(found, key=rank)[:_SHOWN]
    columns = {
        "sequence": "{sequence:,}", "first token": "{first_token:,}", "loss": "{loss}",
        "gradient norm": "{grad_norm}", "share": "{share:.1%}",
    }  # fmt: skip
    digits_of = {"loss": ".4f", "grad_norm": ".4g"}
    rows = [{**one, **{k: digits(one[k], form) for k, form in digits_of.items()}} for one in order]
    table = tabled(rows, columns, 0, "-").split("\n")
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


def modules(layers: Mapping[str, Mapping[str, float]]) -> str:
    """Return the modules with the largest gradients as a table."""
    norms, total = layers["grad_norm"], sum(x * x for x in layers["grad_norm"].values())
    lines = [("module", "gradient norm", "share", "update / weights")]
    for name, norm in sorted(norms.items(), key=lambda pair: -pair[1])[:_SHOWN]:
        weight, update = (layers[key].get(name) for key in ("weight_norm", "update_norm"))
        ratio = f"{update / weight:.3g}" if weight and update is not None else "-"
        share = norm * norm / total if total else 0
        lines.append((name, f"{norm:.4g}", f"{share:.1%}", ratio))
    return aligned(lines, 1)
