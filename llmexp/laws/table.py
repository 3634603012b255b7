"""Print an answer: lines for the terminal, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TextIO

import numpy as np
from rich.console import Console
from rich.text import Text

from llmexp.compare.document import Cell
from llmexp.laws import words
from llmexp.laws.answer import Answer
from llmexp.laws.fitting import Surface
from llmexp.laws.law import Estimate
from llmexp.laws.power import Power
from llmexp.laws.words import big, bracketed, flops_text, sized
from llmexp.system.text import aligned, in_lines, loss_text

_HEADS = ("FLOPs", "runs", "best N", "tokens", "tokens/N", "val loss", "lowest run", "its N")
_MOST = 12  # rungs of a table
_DROPPED = (4, 7, 6, 1, 3)  # columns that give way in a narrow terminal, the first one first


def show(answer: Answer, to: TextIO, width: int, why: bool = False) -> None:
    """Print the answer in a line, a table of each ladder, and what must be known."""
    console = Console(file=to, width=width, highlight=False, markup=False, emoji=False)
    console.print(Text(in_lines(words.headline(answer), width), style="bold"))
    for law in answer.laws:
        if len(answer.laws) > 1:
            console.print(Text(law.ladder.name, style="bold"))
        for i, line in enumerate(_lines(law, width)):
            console.print(Text(line, style="" if i else "dim"), no_wrap=True, overflow="ellipsis")
    for line in (*words.notes(answer), *(words.why(answer) if why else ())):
        console.print(Text(in_lines(line, width)))


def _lines(law: Surface | Power, width: int) -> list[str]:
    table = [heads(law), *([cell.text for cell in row] for row in table_rows(law))]
    for dropped in range(len(_DROPPED) + 1):
        kept = [[c for i, c in enumerate(r) if i not in _DROPPED[:dropped]] for r in table]
        lines = aligned(kept, 0).splitlines()
        if max(map(len, lines)) <= width:
            break
    return lines


def heads(law: Surface | Power) -> list[str]:
    """Return the titles of the table of a law."""
    return [law.by, "runs", "val loss", "by the law"] if isinstance(law, Power) else list(_HEADS)


def table_rows(law: Surface | Power) -> list[list[Cell]]:
    """Return the rows of the table of a law, the prediction last.

    Of many rungs there are some, the last one with them.
    """
    none = Cell("")
    if isinstance(law, Power):
        places: list[tuple[float, Any, Any, Estimate]] = [*law.places]
        if law.target is not None:
            places.append((law.target, None, None, law.loss_at(law.target)))
        return [
            [_cell(x, big), _cell(runs, str), _cell(loss, loss_text), _cell(at, bracketed)]
            for x, runs, loss, at in places
        ]
    found, step = [], -(-len(law.optima) // _MOST)
    for o in [*law.optima[::-step][::-1], *([law.predicted] if law.target is not None else [])]:
        best = [Cell("edge"), none, none, none]
        if not law.edge:  # there the best size may be 0, or none
            ratio = o.tokens.value / o.parameters.value
            best = [_cell(o.parameters, sized), _cell(o.tokens, sized),
                    _cell(ratio, "{:.3g}".format), _cell(o.loss, bracketed)]  # fmt: skip
        lowest = [_cell(o.lowest_loss, loss_text), _cell(o.lowest_parameters, big)]
        found.append([_cell(o.flops, flops_text), _cell(o.runs or None, str), *best, *lowest])
    return found


def _cell(value: Any, shown: Callable[[Any], str]) -> Cell:
    """Return the cell of a number or an estimate, empty where there is none."""
    return Cell("" if value is None else shown(value), getattr(value, "value", value))


def to_json(answer: Answer) -> str:
    """Return the answer as JSON."""
    return json.dumps(data(answer), indent=2, allow_nan=False) + "\n"


def data(answer: Answer) -> dict[str, Any]:
    """Return everything that was found, as plain values; what is not finite is None."""
    found = {
        "headline": words.headline(answer),
        "notes": words.notes(answer),
        "why": words.why(answer),
        "problems": answer.problems,
        "form": answer.form,
        "count": answer.count,
        "ladders": [_ladder(law, answer) for law in answer.laws],
        "gains": answer.gains,
    }
    text = json.dumps(found, default=lambda v: v.item() if isinstance(v, np.generic) else vars(v))
    return dict(json.loads(text, parse_constant=lambda name: None))


def _ladder(law: Surface | Power, answer: Answer) -> dict[str, Any]:
    found = {
        "name": law.ladder.name,
        "runs": len(law.losses),
        "law": law.numbers,
        "knows_e": law.knows_e,
        "noise": law.ensemble.noise,
        "draws": len(law.ensemble.laws) - 1,
        "held_out": law.held_out,
        "left_out": law.ladder.out,
    }
    if isinstance(law, Power):
        at = law.target
        return found | {
            "by": law.by,
            "points": [place._asdict() for place in law.places],
            "prediction": None if at is None else {"x": at, "loss": law.loss_at(at)},
        }
    guesses = dict.fromkeys(("parameters", "tokens", "loss") if law.edge else ())
    decades = {"decades_beyond": np.log10(law.predicted.flops / law.ends[1][0])}
    return found | {
        "edge": law.edge or None,
        "exponent": None if law.edge else law.exponent,
        "exponents": law.other_counts,
        "rungs": [vars(o) | guesses for o in law.optima],
        "prediction": vars(law.predicted) | guesses | decades,
        "parabolas": answer.parabolas[law],
    }
