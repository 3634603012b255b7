"""Say what fits found: the answer, what must be known beside it, a table, all of it as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO

import numpy as np

from llmexp.config.labels import plural
from llmexp.scaling.answer import Fits
from llmexp.scaling.gain import Gain, Need
from llmexp.scaling.isoflop import Parabolas
from llmexp.scaling.ladders import GIVEN
from llmexp.scaling.law import Estimate, HoldOut, Law, Power, Surface
from llmexp.system.printing import Printer, Shown
from llmexp.system.text import Note, listed, loss_text, number, said

FAR = 2.05  # decades beyond the runs, past which a prediction is called far
_WIDE = 1e3  # by which the ends of an interval differ that tells nothing of a factor
_UNITS = ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k"), (1.0, ""))
COUNTED = {
    "all": "all parameters",
    "head": "parameters without embeddings, with the head",
    "blocks": "matrices inside blocks",
    GIVEN: "as the file has it",
}


def headline(a: Fits) -> str:
    """Return the answer: what ladders are to each other, else what the one ladder says."""
    return " ".join(map(_gain, a.gains) if a.gains else _named(a, lambda law: [_law(law, a)]))


def notes(a: Fits) -> tuple[str, ...]:
    """Return what must be known beside the answer."""
    laws = _named(a, lambda law: [_law(law, a)]) if a.gains else []
    return tuple(dict.fromkeys([*laws, *_named(a, lambda law: said(_notes(law)))]))


def reasons(a: Fits) -> tuple[str, ...]:
    """Return what the answer rests on."""
    return tuple(dict.fromkeys(_named(a, lambda law: said(_why(law, a)))))


def _named(a: Fits, lines: Callable[[Law], Iterable[str]]) -> list[str]:
    """Return lines of each law, with its name where there are several."""
    several = len(a.laws) > 1
    return [f"{law.ladder.name}: " * several + line for law in a.laws for line in lines(law)]


def _law(law: Law, a: Fits) -> str:
    """Return the answer of a ladder in a line: where it is read, the figures there, the law."""
    place = f"At {big(law.target or 0)} {law.axis}"
    if isinstance(law, Power):
        n = law.numbers
        text = f"{law.ladder.loss} = {bracketed(n['E'])} + {factor(n['A'])} x {law.axis}^-"
        text += f"{bracketed(n['p'])}."
        if law.target is None:
            return text
        place = f"At {flops_text(law.target)} FLOPs" if law.axis == "flops" else place
        return f"{place}: {law.ladder.loss} {bracketed(law.predicted.law)}; {text}"
    assert isinstance(law, Surface)
    asked = ""
    if law.place and law.there:
        size, tokens = map(big, law.place)
        asked = f"At {size} parameters and {tokens} tokens: {law.ladder.loss} "
        asked += f"{bracketed(law.there)}. "
    if law.edge:
        return (
            f"{asked}No best size: at {flops_text(law.ends[1][0])} FLOPs it lies, or may lie, "
            f"beyond the sizes that were tried; widen to {law.edge} N."
        )
    best, found = law.predicted, a.parabolas[law] if a.form == "isoflop" else None
    place = f"At {flops_text(best.flops)} FLOPs"
    place += "" if law.target is not None else f", the {law.ends[1][1]}"
    size, exponent = sized(best.parameters, "parameters"), f"C^{bracketed(law.exponent)}"
    if found:
        by = f"by parabolas: {sized(found.parameters, 'parameters')}. N* ~ "
        by += f"C^{bracketed(found.exponent)}. Biased: {_bias(found)}"
        return f"{asked}{place}, {by}; the surface, as in the table, has {size} and {exponent}."
    tokens, loss = big(best.tokens.value), bracketed(best.loss)
    return f"{asked}{place}: {size}, {tokens} tokens, {law.ladder.loss} {loss}. N* ~ {exponent}."


def _notes(law: Law) -> Iterator[Note]:
    """Yield how far the prediction lies out, what runs do not tell, what was held and left out."""
    target = law.target if not law.edge else None
    if isinstance(law, Surface) and law.place:
        size, tokens = law.place
        target = tokens * math.exp(float(law.frontier.price.at(np.log([size]))[0]))
    if target is not None:
        (low, first), (high, last) = law.ends
        beyond, below = math.log10(target / high), math.log10(low / target)
        off, where = max((beyond, f"beyond the {last}"), (below, f"below the {first}"))
        if off > FAR:
            rests = "the interval assumes that the form of the law holds so far out"
            yield "The prediction", f"{off:.1f} decades {where}; {rests}"
    if isinstance(law, Power) and (others := law.others()):
        way = "a surface, without --form and --by, is over parameters and tokens"
        yield "Not in this law", f"the {' and '.join(others)} of the runs, which differ; {way}"
    if held := law.held_out:
        text = f"the {held.what} ({plural(held.runs, 'run')}), {_held(held)}: {held.miss:+.2%}"
        yield "Held out", text + ", outside the interval" * (not held.inside)
    else:
        yield "Held out", "nothing: the other runs are too few for a law"
    if not law.knows_e:
        yield "E", "not known from these runs: a law without it fits as well"
    if isinstance(law, Power) and not _tells(law.numbers["A"]):
        way = f"runs further apart in {law.axis}, or more seeds of each, would decide"
        yield "Factor and exponent", f"a wide range of both fits these runs; {way}"
    out = law.ladder.out.items()
    left = (f"{plural(len(n), 'run')}, {reason} ({listed(n)})" for reason, n in out)
    yield "Left out", "; ".join(left)
    yield from law.ladder.notes


def _held(held: HoldOut) -> str:
    """Return what was predicted and measured, with the digits in which they differ."""
    both = held.predicted.value, held.measured
    digits = next((d for d in range(6) if len({f"{loss:.{d}f}" for loss in both}) > 1), 6)
    measured = max(loss_text(held.measured), f"{held.measured:.{digits}f}", key=len)
    return f"predicted {bracketed(held.predicted, digits=digits)}, measured {measured}"


def _why(law: Law, a: Fits) -> Iterator[Note]:
    runs = plural(len(law.losses), "run")
    if isinstance(law, Surface):
        numbers = [f"{k} {(factor if k in 'AB' else bracketed)(e)}" for k, e in law.numbers.items()]
        facts = f"{', '.join(numbers)}; N: {COUNTED[law.count]}"
        yield "L(N, D) = E + A N^-alpha + B D^-beta", facts
        runs = f"{plural(len(law.rungs), law.rungs[0].what)}, {runs}"
    draws = (
        f"95 % of {len(law.ensemble.laws) - 1:,} draws of the noise of {runs}, each fitted again"
    )
    away = f"they lie {law.ensemble.noise:.2%} from the law (standard deviation)"
    yield "Intervals", f"{draws}; {away}"
    passes = max(number(p.values.get("max_epochs")) or 0.0 for p in law.ladder.points)
    if passes > 1:
        yield "Passes over the data", f"up to {passes:.1f}; they count as new tokens each"
    if not isinstance(law, Surface):
        if law.axis == "flops":
            yield "Points", "of each budget the run with the lowest loss, which is low by luck too"
        return
    rules = {str(p.values.get("optimizer.rule") or "none") for p in law.ladder.points} - {"none"}
    yield "Rules of rates and batches (optimizer.rule)", listed(sorted(rules))
    for count, exponent in law.other_counts.items():
        yield f"With N as {COUNTED[count]}", f"N* ~ C^{bracketed(exponent)}"
    curve = law.frontier.price.at(np.log(law.sizes))
    if (miss := np.abs(np.expm1(curve - np.log(law.x / law.tokens))).max()) > 1e-3:
        yield ("FLOPs a token", f"a smooth curve over N through the runs', {miss:.1%} off at most")
    worst = int(np.argmax(np.abs(law.rest)))
    yield "Furthest from the law", f"{law.points[worst].name}, {law.rest[worst]:+.2%}"
    found = a.parabolas[law]
    if found and a.form != "isoflop":
        yield "Parabolas, one a budget", f"N* ~ C^{bracketed(found.exponent)}; {_bias(found)}"
    if not found and a.form == "isoflop":
        yield "Parabolas", "none: they need two budgets, each with three sizes and a minimum"


def _bias(found: Parabolas) -> str:
    off = f"{found.exponent_bias:+.3f} and its N* by {found.parameters_bias:+.0%}"
    return f"through losses of the surface, without noise, they miss its exponent by {off}"


def _gain(g: Gain) -> str:
    """Return what a change needs, and how that changes with compute."""
    text = f"{g.change} needs {_times(g.common)} of the compute of {g.baseline}"
    text += "" if g.common.shown else " (no difference is shown)"
    text += f" at {flops_text(g.common.flops)} FLOPs"
    if g.further is None:
        return f"{text}."
    text += f", and {_times(g.further)} at {flops_text(g.further.flops)}: "
    if not g.trend:
        return f"{text}whether that changes with compute is not known."
    if g.common.ratio.value < 1:
        return f"{text}the gain {g.trend}."
    return f"{text}the loss {'shrinks' if g.trend == 'grows' else 'grows'}."


def _times(need: Need) -> str:
    return bracketed(need.ratio).replace(" [", "x [", 1)


def flops_text(flops: float) -> str:
    """Return FLOPs with three digits at most: 1e16, 2.15e18."""
    mantissa, _, power = f"{flops:.2e}".partition("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(power)}"


def bracketed(e: Estimate, size: float = 1.0, unit: str = "", digits: int = 0) -> str:
    """Return `0.49 [0.45, 0.54]`, in units of a size; `any` for an end that there is not.

    It has one or two digits of the half width, and `digits` decimals at least.
    """
    half = (e.high - e.low) / size / 2
    if not math.isfinite(e.value + half):
        return f"{_short(e.value)} [{_short(e.low)}, {_short(e.high)}]"
    d = max(digits, min(6, math.ceil(-math.log10(half / 3)))) if half > 0 else 4
    value, low, high = (f"{v / size:,.{d}f}" for v in (e.value, e.low, e.high))
    return f"{value}{unit} [{low}, {high}]"


def sized(e: Estimate, what: str = "") -> str:
    """Return `8.2 M parameters [6.9, 9.8]`: ends in the unit of the value, if near enough."""
    (size, unit), what = _unit(e.value), f" {what}" if what else ""
    if e.value / 100 <= e.low and e.high < 100 * e.value:
        return bracketed(e, size, unit + what)
    return f"{big(e.value)}{what} [{big(e.low)}, {big(e.high)}]"


def factor(e: Estimate) -> str:
    """Return `406 [389, 789]`, with three digits; `406 [not known]` where anything is possible."""
    ends = f"{_short(e.low)}, {_short(e.high)}" if _tells(e) else "not known"
    return f"{_short(e.value)} [{ends}]"


def _tells(e: Estimate) -> bool:
    return e.high < _WIDE * e.low


def big(value: float) -> str:
    """Return `203 M`; with an exponent what is below 0.01 or above 10,000 T."""
    if not math.isfinite(value):
        return "any"
    size, unit = _unit(value)
    if not 0.01 <= value / size < 1e4:
        return f"{value:.1e}"
    return f"{float(f'{value / size:.3g}'):,.10g}{unit}"


def _unit(value: float) -> tuple[float, str]:
    return next(((s, u) for s, u in _UNITS if value >= 0.9995 * s), _UNITS[-1])


def _short(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "any"


_MOST = 12  # places of a table
# By the field of a place: the title and the text of its column.
_COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "flops": ("FLOPs", flops_text),
    "x": ("", big),
    "runs": ("runs", str),
    "parameters": ("best N", sized),
    "tokens": ("tokens", sized),
    "ratio": ("tokens/N", "{:.3g}".format),
    "loss": ("", lambda e: loss_text(e) if isinstance(e, float) else bracketed(e)),
    "law": ("by the law", bracketed),
    "lowest_loss": ("lowest run", loss_text),
    "lowest_parameters": ("its N", big),
}
# that give way in a narrow terminal, the first one first
_DROPPED = ("tokens/N", "its N", "lowest run", "runs", "tokens")


def show(answer: Fits, to: TextIO, width: int, why: bool = False) -> None:
    """Print the answer in a line, a table of each ladder, and what must be known."""
    printer = Printer(to, width)
    printer.say([headline(answer)], "bold")
    for law in answer.laws:
        printer.say([law.ladder.name] * (len(answer.laws) > 1), "bold")
        columns = table_of(law)
        for title in _DROPPED:
            if sum(column.width for column in columns) - 2 > printer.width:
                columns = [column for column in columns if column.title != title]
        printer.table(columns)
    printer.say([*notes(answer), *(reasons(answer) if why else ())])


def table_of(law: Law) -> list[Shown]:
    """Return the table of a law, the prediction last.

    Of many places there are some, the last one with them.
    """
    step = -(-len(law.places) // _MOST)
    places = [*law.places[::-step][::-1], *([law.predicted] if law.target is not None else [])]
    found, titles = [], {"x": law.axis, "loss": law.ladder.loss}
    for key, (title, shown) in _COLUMNS.items():
        if hasattr(places[0], key):
            values = [getattr(place, key) for place in places]
            missing = "edge" if law.edge and key == "parameters" else ""
            shown = flops_text if key == "x" and law.axis == "flops" else shown
            cells = [missing if v is None or v == 0 else shown(v) for v in values]
            plain = [getattr(v, "value", v) for v in values]
            found.append(Shown(title or titles[key], cells, plain))
    return found


def data(answer: Fits) -> dict[str, Any]:
    """Return everything that was found, as plain values; what is not finite is None."""
    found = {
        "headline": headline(answer),
        "notes": notes(answer),
        "why": reasons(answer),
        "problems": answer.problems,
        "form": answer.form,
        "count": answer.count,
        "ladders": [_ladder(law, answer) for law in answer.laws],
        "gains": answer.gains,
    }
    text = json.dumps(found, default=lambda v: v.item() if isinstance(v, np.generic) else vars(v))
    return dict(json.loads(text, parse_constant=lambda name: None))


def _ladder(law: Law, answer: Fits) -> dict[str, Any]:
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
    if not isinstance(law, Surface):
        at = law.predicted
        return found | {
            "by": law.axis,
            "points": [place._asdict() for place in law.places],
            "prediction": at and {"x": at.x, "loss": at.law},
        }
    decades, place = np.log10(law.predicted.flops / law.ends[1][0]), None
    if law.place:
        place = {"parameters": law.place[0], "tokens": law.place[1], "loss": law.there}
    return found | {
        "edge": law.edge or None,
        "exponent": None if law.edge else law.exponent,
        "exponents": law.other_counts,
        "rungs": law.places,
        "prediction": vars(law.predicted) | {"decades_beyond": decades},
        "place": place,
        "parabolas": answer.parabolas[law],
    }
