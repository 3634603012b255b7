"""Print an answer: lines for the terminal, JSON for programs."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from typing import Any, TextIO

import numpy as np
from rich.console import Console
from rich.text import Text

from llmexp.laws import words
from llmexp.laws.answer import Answer
from llmexp.laws.figures import big, flops_text, plain, sized
from llmexp.laws.fitting import Surface
from llmexp.laws.isoflop import Parabolas
from llmexp.laws.power import Power
from llmexp.system.text import loss_text, padded

HEADS = ("FLOPs", "runs", "best N", "tokens", "tokens/N", "val loss", "lowest run", "its N")
MOST = 12  # rungs of a table
_DROPPED = (4, 7, 6, 1, 3)  # columns that give way in a narrow terminal, the first one first


def show(answer: Answer, to: TextIO, width: int, why: bool = False) -> None:
    """Print the answer in a line, a table of each ladder, and what must be known."""
    console = Console(file=to, width=width, highlight=False, markup=False, emoji=False)
    console.print(Text(words.headline(answer), style="bold"))
    for law in answer.laws:
        if len(answer.laws) > 1:
            console.print(Text(law.ladder.name, style="bold"))
        for i, line in enumerate(_aligned(law, width)):
            console.print(Text(line, style="" if i else "dim"), no_wrap=True, overflow="ellipsis")
    for line in (*words.notes(answer), *(words.why(answer) if why else ())):
        console.print(Text(line))


def _aligned(law: Surface | Power, width: int) -> Iterator[str]:
    table = [heads(law), *([text for text, _ in row] for row in cells(law))]
    dropped: list[int] = []
    for column in (None, *(c for c in _DROPPED if c < len(table[0]))):
        dropped += [] if column is None else [column]
        kept = [[cell for i, cell in enumerate(row) if i not in dropped] for row in table]
        lines = ["  ".join(row).rstrip() for row in padded(kept, ())]
        if max(map(len, lines)) <= width:
            break
    yield from lines


def cells(law: Surface | Power) -> list[list[tuple[str, float | None]]]:
    """Return the rows of the table of a law, each cell with its number; titles are those of HEADS.

    Of many rungs there are some, the last one with them.
    """
    found: list[list[tuple[str, float | None]]] = []
    if isinstance(law, Power):
        found = [
            [(big(x), x), (str(n), n), (loss_text(loss), loss), (plain(at), at.value)]
            for x, n, loss, at in law.rows()
        ]
        if (x := law.target) is not None:
            at = law.loss_at(x)
            found.append([(big(x), x), ("", None), ("", None), (plain(at), at.value)])
        return found
    step = -(-len(law.optima) // MOST)
    for o in [*law.optima[::-step][::-1], *([law.predicted] if law.target is not None else [])]:
        best = [(sized(o.parameters), o.parameters.value), (sized(o.tokens), o.tokens.value),
                (f"{o.ratio:.3g}", o.ratio), (plain(o.loss), o.loss.value)]  # fmt: skip
        lowest = [(loss_text(o.lowest_loss or 0), o.lowest_loss),
                  (big(o.lowest_parameters or 0), o.lowest_parameters)]  # fmt: skip
        edge: list[tuple[str, float | None]] = [("edge", None), *[("", None)] * 3]
        runs = (str(o.runs or ""), o.runs)
        found.append([(flops_text(o.flops), o.flops), runs, *(edge if law.edge else best),
                      *(lowest if o.runs else [("", None)] * 2)])  # fmt: skip
    return found


def heads(law: Surface | Power) -> list[str]:
    """Return the titles of the table of a law."""
    return [law.by, "runs", "val loss", "by the law"] if isinstance(law, Power) else list(HEADS)


def to_json(answer: Answer) -> str:
    """Return the answer as JSON."""
    return json.dumps(data(answer), indent=2, allow_nan=False) + "\n"


def data(answer: Answer) -> dict[str, Any]:
    """Return everything that was found, as plain values."""
    beside = iter(answer.parabolas)
    found = {
        "headline": words.headline(answer),
        "notes": words.notes(answer),
        "why": words.why(answer),
        "problems": answer.problems,
        "form": answer.form,
        "count": answer.count,
        "ladders": [
            _power(law) if isinstance(law, Power) else _surface(law, next(beside))
            for law in answer.laws
        ],
        "gains": answer.gains,
    }
    return dict(_plain(found))


def _plain(value: Any) -> Any:
    """Return what JSON has of dataclasses, lists and numbers; what is not finite is null."""
    if dataclasses.is_dataclass(value):
        return _plain(vars(value))
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value


def _common(law: Surface | Power) -> dict[str, Any]:
    return {
        "name": law.ladder.name,
        "runs": len(law.losses),
        "law": law.numbers,
        "knows_e": law.knows_e,
        "noise": law.ensemble.noise,
        "draws": len(law.ensemble.laws),
        "held_out": law.held_out,
        "left_out": {reason: names for reason, names in law.ladder.out.items() if names},
    }


def _power(law: Power) -> dict[str, Any]:
    names, at = ("x", "runs", "loss", "law"), law.target
    return _common(law) | {
        "by": law.by,
        "points": [dict(zip(names, row, strict=True)) for row in law.rows()],
        "prediction": None if at is None else {"x": at, "loss": law.loss_at(at)},
    }


def _surface(law: Surface, beside: Parabolas | None) -> dict[str, Any]:
    guesses = dict.fromkeys(("parameters", "tokens", "loss") if law.edge else ())
    return _common(law) | {
        "edge": law.edge or None,
        "exponent": None if law.edge else law.exponent,
        "exponents": law.other_counts(),
        "rungs": [vars(o) | guesses for o in law.optima],
        "prediction": vars(law.predicted) | guesses | {"decades_beyond": law.decades},
        "parabolas": beside,
    }
