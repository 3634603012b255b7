"""Print an answer: lines for the terminal, JSON for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from llmexp.laws import words
from llmexp.laws.answer import Answer
from llmexp.laws.figures import big, flops_text, plain, sized
from llmexp.laws.fitting import Optimum, Surface
from llmexp.laws.gain import Need
from llmexp.laws.isoflop import Parabolas
from llmexp.laws.law import HoldOut
from llmexp.laws.power import Power
from llmexp.system.text import loss_text, padded

HEADS = ("FLOPs", "runs", "best N", "tokens", "tokens/N", "val loss", "lowest run", "its N")
_DROPPED = (4, 7, 6, 1, 3)  # columns that give way in a narrow terminal, the first one first


def show(answer: Answer, to: TextIO, width: int, why: bool = False) -> None:
    """Print the answer in a line, a table of each ladder, and what must be known."""
    console = Console(file=to, width=width, highlight=False, markup=False, emoji=False)
    console.print(Text(words.headline(answer), style="bold"))
    for law in answer.laws:
        if len(answer.laws) > 1:
            console.print(Text(law.ladder.name, style="bold"))
        for i, line in enumerate(_aligned(rows(law), width)):
            console.print(Text(line, style="" if i else "dim"), no_wrap=True, overflow="ellipsis")
    for line in (*words.notes(answer), *(words.why(answer) if why else ())):
        console.print(Text(line))


def _aligned(table: list[list[str]], width: int) -> Iterator[str]:
    dropped: list[int] = []
    for column in (None, *(c for c in _DROPPED if c < len(table[0]))):
        dropped += [] if column is None else [column]
        kept = [[cell for i, cell in enumerate(row) if i not in dropped] for row in table]
        lines = ["  ".join(row).rstrip() for row in padded(kept, ())]
        if max(map(len, lines)) <= width:
            break
    yield from lines


def rows(law: Surface | Power) -> list[list[str]]:
    """Return the table of a law, its titles first."""
    if isinstance(law, Power):
        found = [[big(x), str(n), loss_text(loss), plain(at)] for x, n, loss, at in law.rows()]
        if law.target is not None:
            found.append([big(law.target), "", "", plain(law.loss_at(law.target))])
        return [[law.by, "runs", "val loss", "by the law"], *found]
    return [list(HEADS), *(_row(o, law.edge) for o in _optima(law))]


def values(law: Surface | Power) -> list[list[float | None]]:
    """Return the numbers in the rows of the table, without the first column."""
    if isinstance(law, Power):
        more = [law.loss_at(law.target)] if law.target is not None else []
        found: list[list[float | None]] = [[n, loss, at.value] for _, n, loss, at in law.rows()]
        return [*found, *([None, None, at.value] for at in more)]
    return [
        [o.runs, o.size.value, o.tokens.value, o.tokens.value / o.size.value, o.loss.value,
         *(o.lowest or (None, None))]
        for o in _optima(law)
    ]  # fmt: skip


def _optima(law: Surface) -> list[Optimum]:
    return [*law.optima, *([law.predicted] if law.target is not None else [])]


def _row(o: Optimum, edge: str) -> list[str]:
    loss, size = o.lowest or (None, None)
    best = [sized(o.size), sized(o.tokens), f"{o.tokens.value / o.size.value:.3g}", plain(o.loss)]
    return [
        flops_text(o.flops),
        str(o.runs or ""),
        *(["edge", "", "", ""] if edge else best),
        "" if loss is None else loss_text(loss),
        "" if size is None else big(size),
    ]


def to_json(answer: Answer) -> str:
    """Return the answer as JSON."""
    return json.dumps(data(answer), indent=2, allow_nan=False) + "\n"


def data(answer: Answer) -> dict[str, Any]:
    """Return everything that was found, as plain values."""
    beside = iter(answer.parabolas)
    return {
        "headline": words.headline(answer),
        "notes": list(words.notes(answer)),
        "why": list(words.why(answer)),
        "problems": list(answer.problems),
        "form": answer.form,
        "count": answer.count,
        "ladders": [
            _power(law) if isinstance(law, Power) else _surface(law, next(beside))
            for law in answer.laws
        ],
        "gains": [
            {
                "change": g.change,
                "baseline": g.baseline,
                "common": _need(g.common),
                "further": g.further and _need(g.further),
                "trend": g.trend or None,
                "curve": [_need(n) for n in g.curve],
            }
            for g in answer.gains
        ],
    }


def _need(need: Need) -> dict[str, Any]:
    return {"flops": need.flops, **need.ratio.data, "shown": need.real}


def _common(law: Surface | Power) -> dict[str, Any]:
    held = law.held_out
    return {
        "name": law.ladder.name,
        "runs": len(law.losses),
        "law": {name: e.data for name, e in law.numbers.items()},
        "knows_e": law.knows_e,
        "noise": law.ensemble.noise,
        "draws": len(law.ensemble.laws),
        "held_out": held and _held(held),
        "left_out": {reason: names for reason, names in law.ladder.out.items() if names},
    }


def _held(held: HoldOut) -> dict[str, Any]:
    return {
        "what": held.what,
        "runs": held.runs,
        "predicted": held.predicted.data,
        "measured": held.measured,
        "miss": held.miss,
        "inside": held.inside,
    }


def _power(law: Power) -> dict[str, Any]:
    named = ("x", "runs", "loss", "law")
    return _common(law) | {
        "by": law.by,
        "points": [dict(zip(named, (*row[:3], row[3].data), strict=True)) for row in law.rows()],
        "prediction": None
        if law.target is None
        else {"x": law.target, "loss": law.loss_at(law.target).data},
    }


def _surface(law: Surface, beside: Parabolas | None) -> dict[str, Any]:
    return _common(law) | {
        "edge": law.edge or None,
        "exponent": None if law.edge else law.exponent.data,
        "exponents": {c: e.data for c, e in law.other_counts().items()},
        "rungs": [
            {"what": r.what, **_optimum(o, law.edge)}
            for r, o in zip(law.rungs, law.optima, strict=True)
        ],
        "prediction": {**_optimum(law.predicted, law.edge), "decades_beyond": law.decades},
        "parabolas": beside and _parabolas(beside),
    }


def _optimum(o: Optimum, edge: str) -> dict[str, Any]:
    loss, size = o.lowest or (None, None)
    return {
        "flops": o.flops,
        "runs": o.runs,
        "parameters": None if edge else o.size.data,
        "tokens": None if edge else o.tokens.data,
        "loss": None if edge else o.loss.data,
        "lowest_loss": loss,
        "lowest_parameters": size,
    }


def _parabolas(found: Parabolas) -> dict[str, Any]:
    minima = [
        {
            "flops": math.exp(p.rung.compute),
            "parameters": p.size,
            "loss": p.loss,
            "inside": p.inside,
        }
        for p in found.each
    ]
    return {
        "exponent": found.exponent.data,
        "exponent_bias": found.bias,
        "parameters": found.size and found.size.data,
        "parameters_bias": found.size_bias,
        "minima": minima,
    }
