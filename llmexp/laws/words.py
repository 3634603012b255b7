"""Say what fits found: the answer, what must be known beside it, what it rests on."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from llmexp.laws.answer import Answer
from llmexp.laws.fitting import Surface
from llmexp.laws.gain import Gain, Need
from llmexp.laws.isoflop import Parabolas
from llmexp.laws.law import Estimate, Law
from llmexp.laws.points import GIVEN
from llmexp.laws.power import Power
from llmexp.settings.labels import plural
from llmexp.system.text import listed, loss_text, number

FAR = 2.05  # decades beyond the runs, past which a prediction is called far
_WIDE = 1e3  # by which the ends of an interval differ that tells nothing of a factor
_UNITS = ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k"), (1.0, ""))
COUNTED = {
    "all": "all parameters",
    "head": "parameters without embeddings, with the head",
    "blocks": "matrices inside blocks",
    GIVEN: "as the file has it",
}


def headline(a: Answer) -> str:
    """Return the answer: what ladders are to each other, else what the one ladder says."""
    if a.gains:
        return " ".join(map(_gain, a.gains))
    return " ".join(_named(a, law, _law(law, a)) for law in a.laws)


def notes(a: Answer) -> tuple[str, ...]:
    """Return what must be known beside the answer."""
    found = [_named(a, s, _law(s, a)) for s in a.surfaces if a.gains]
    found += [_named(a, law, text) for law in a.laws for text in _notes(law)]
    return tuple(dict.fromkeys(found))


def why(a: Answer) -> tuple[str, ...]:
    """Return what the answer rests on."""
    found = []
    for law in a.laws:
        of_law = _power_why(law) if isinstance(law, Power) else _surface_why(law, a)
        found += [_named(a, law, text) for text in of_law]
    return tuple(dict.fromkeys(found))


def _named(a: Answer, law: Law, text: str) -> str:
    return f"{law.ladder.name}: {text}" if len(a.laws) > 1 else text


def _law(law: Surface | Power, a: Answer) -> str:
    """Return the answer of a ladder in a line."""
    if isinstance(law, Power):
        n, at = law.numbers, law.target
        text = f"val loss = {bracketed(n['E'])} + {factor(n['A'])} x {law.by}^-{bracketed(n['p'])}"
        if at is None:
            return f"{text}."
        place = f"{flops_text(at)} FLOPs" if law.by == "flops" else f"{big(at)} {law.by}"
        return f"At {place}: val loss {bracketed(law.loss_at(at))}; {text}."
    if law.edge:
        return (
            f"No best size: at {flops_text(law.ends[1][0])} FLOPs it lies, or may lie, beyond "
            f"the sizes that were tried; widen to {law.edge} N."
        )
    best, found = law.predicted, a.parabolas[law] if a.form == "isoflop" else None
    place = f"At {flops_text(best.flops)} FLOPs"
    place += "" if law.target is not None else f", the {law.ends[1][1]}"
    size, exponent = sized(best.parameters, "parameters"), f"C^{bracketed(law.exponent)}"
    if found:
        return (
            f"{place}, by parabolas: {sized(found.parameters, 'parameters')}. "
            f"N* ~ C^{bracketed(found.exponent)}. Biased: {_bias(found)}; the surface, as in the "
            f"table, has {size} and {exponent}."
        )
    tokens, loss = big(best.tokens.value), bracketed(best.loss)
    return f"{place}: {size}, {tokens} tokens, val loss {loss}. N* ~ {exponent}."


def _notes(law: Surface | Power) -> Iterator[str]:
    """Say how far the prediction lies out, what runs do not tell, what was held and left out."""
    if law.target is not None and (isinstance(law, Power) or not law.edge):
        (low, first), (high, last) = law.ends
        beyond, below = math.log10(law.target / high), math.log10(low / law.target)
        off, where = max((beyond, f"beyond the {last}"), (below, f"below the {first}"))
        if off > FAR:
            yield (
                f"That is {off:.1f} decades {where}: so far out a prediction rests on the form of "
                "the law, of which no interval knows."
            )
    if isinstance(law, Power) and (others := law.others()):
        yield (
            f"The runs differ in {' and '.join(others)} too, of which this law takes no account; a "
            "surface, without --form and --by, is over both parameters and tokens."
        )
    if held := law.held_out:
        yield (
            f"Held out: the {held.what} ({plural(held.runs, 'run')}), predicted "
            f"{bracketed(held.predicted)}, measured {loss_text(held.measured)}: "
            f"{held.miss:+.2%}{'' if held.inside else ', outside the interval'}."
        )
    else:
        yield "Held out: nothing, as the other runs are too few for a law of their own."
    if not law.knows_e:
        yield "E is not known from these runs: a law without it fits about as well."
    if isinstance(law, Power) and not _tells(law.numbers["A"]):
        yield (
            "Factor and exponent cannot be told from these runs: a wide range of both fits. Runs "
            f"further apart in {law.by}, or more seeds of each, would tell."
        )
    out = law.ladder.out.items()
    if parts := [f"{plural(len(n), 'run')}, {reason} ({listed(n)})" for reason, n in out]:
        yield f"Left out: {'; '.join(parts)}."
    yield from law.ladder.notes


def _surface_why(s: Surface, a: Answer) -> Iterator[str]:
    law = [f"{k} {factor(e) if k in 'AB' else bracketed(e)}" for k, e in s.numbers.items()]
    yield f"L(N, D) = E + A N^-alpha + B D^-beta: {', '.join(law)}. N: {COUNTED[s.count]}."
    yield f"{plural(len(s.rungs), s.rungs[0].what)}, {_noise(s)}"
    rules = {str(p.values.get("optimizer.rule") or "none") for p in s.ladder.points} - {"none"}
    if rules:
        yield f"optimizer.rule has set what it decides: {listed(sorted(rules))}."
    for count, exponent in s.other_counts.items():
        yield f"With N as {COUNTED[count]}: N* ~ C^{bracketed(exponent)}."
    curve = s.frontier.price.at(np.log(s.sizes))
    if (miss := np.abs(np.expm1(curve - np.log(s.flops / s.tokens))).max()) > 1e-3:
        yield (
            "FLOPs a token are a smooth curve over N through those of the runs, "
            f"{miss:.1%} off at most."
        )
    worst = int(np.argmax(np.abs(s.rest)))
    yield f"Furthest from the law: {s.ladder.points[worst].name}, {s.rest[worst]:+.2%}."
    found = a.parabolas[s]
    if found and a.form != "isoflop":
        yield (
            f"By parabolas, one a budget: N* ~ C^{bracketed(found.exponent)}. They are biased: "
            f"{_bias(found)}."
        )
    if not found and a.form == "isoflop":
        yield "Parabolas need two budgets with three sizes each and a lowest point."


def _power_why(p: Power) -> Iterator[str]:
    yield _noise(p)
    if p.by == "flops":
        yield "Of each budget the run with the lowest loss counts, which is low by luck too."


def _noise(law: Law) -> str:
    passes = max(number(p.values.get("max_epochs")) or 0.0 for p in law.ladder.points)
    again = f" Up to {passes:.1f} passes over the data count as new tokens each."
    return (
        f"{plural(len(law.losses), 'run')}; they lie {law.ensemble.noise:.2%} from the law "
        f"(standard deviation). Intervals hold 95 % of {len(law.ensemble.laws) - 1:,} draws of the "
        f"runs' noise, each fitted again.{again if passes > 1 else ''}"
    )


def _bias(found: Parabolas) -> str:
    return (
        f"through losses of the fitted surface, without noise, they miss its exponent by "
        f"{found.exponent_bias:+.3f} and its N* by {found.parameters_bias:+.0%}"
    )


def _gain(g: Gain) -> str:
    """Return what a change needs, and how that changes with compute."""
    text = f"{g.change} needs {_times(g.common)} of the compute of {g.baseline}"
    text += "" if g.common.shown else " (no difference is shown)"
    text += f" at {flops_text(g.common.flops)} FLOPs"
    if g.further is None:
        return f"{text}."
    text += f", and {_times(g.further)} at {flops_text(g.further.flops)}: "
    if not g.trend:
        return f"{text}whether that changes with compute cannot be told."
    kind = "gain" if g.common.ratio.value < 1 else "loss"
    grows = g.trend == ("grows" if kind == "gain" else "shrinks")
    return f"{text}the {kind} {'grows' if grows else 'shrinks'}."


def _times(need: Need) -> str:
    return bracketed(need.ratio).replace(" [", "x [", 1)


def flops_text(flops: float) -> str:
    """Return FLOPs with three digits at most: 1e16, 2.15e18."""
    mantissa, _, power = f"{flops:.2e}".partition("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(power)}"


def bracketed(e: Estimate, size: float = 1.0, unit: str = "") -> str:
    """Return `0.49 [0.45, 0.54]`, in units of a size; `any` for an end that there is not."""
    half = (e.high - e.low) / size / 2
    if not math.isfinite(e.value + half):
        return f"{_short(e.value)} [{_short(e.low)}, {_short(e.high)}]"
    # one or two digits of the half width
    d = max(0, min(6, math.ceil(-math.log10(half / 3)))) if half > 0 else 4
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
