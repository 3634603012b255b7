"""Say what fits found: the answer, what must be known beside it, what it rests on."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from llmexp.compare.records import listed
from llmexp.laws.answer import Answer
from llmexp.laws.figures import big, factor, flops_text, plain, sized
from llmexp.laws.fitting import Surface
from llmexp.laws.gain import Gain, Need
from llmexp.laws.isoflop import Parabolas
from llmexp.laws.law import FAR, HoldOut, Law
from llmexp.laws.points import COUNTED
from llmexp.laws.power import Power
from llmexp.settings.labels import plural
from llmexp.system.text import loss_text, number


def headline(a: Answer) -> str:
    """Return the answer: what ladders are to each other, else what the one ladder says."""
    if a.gains:
        return " ".join(_gain(g) for g in a.gains)
    firsts = [_power(law) if isinstance(law, Power) else _law(law, a) for law in a.laws]
    return " ".join(firsts) if len(firsts) == 1 else _each(a, firsts)


def notes(a: Answer) -> tuple[str, ...]:
    """Return what must be known beside the answer."""
    found = []
    if a.gains:
        found += [_named(a, s, _law(s, a)) for s in a.surfaces]
    for law in a.laws:
        found += [_named(a, law, text) for text in _notes(law)]
    return tuple(dict.fromkeys(found))


def why(a: Answer) -> tuple[str, ...]:
    """Return what the answer rests on."""
    found = []
    for i, law in enumerate(a.laws):
        if isinstance(law, Power):
            of_law = list(_power_why(law))
        else:
            of_law = [*_surface_why(law), *_parabolas(a.parabolas[i], a.form == "isoflop")]
        found += [_named(a, law, text) for text in of_law]
    return tuple(dict.fromkeys(found))


def _named(a: Answer, law: Law, text: str) -> str:
    return f"{law.ladder.name}: {text}" if len(a.laws) > 1 else text


def _each(a: Answer, texts: list[str]) -> str:
    return " ".join(_named(a, law, text) for law, text in zip(a.laws, texts, strict=True))


def _law(s: Surface, a: Answer) -> str:
    """Return the answer of a ladder in a line."""
    if s.edge:
        return (
            f"No best size: at {flops_text(math.exp(s.largest))} FLOPs it lies, or may lie, beyond "
            f"the sizes that were tried; widen to {s.edge} N."
        )
    found = a.parabolas[a.laws.index(s)] if a.form == "isoflop" else None
    at = s.predicted
    place = f"At {flops_text(at.flops)} FLOPs"
    if s.target is None:
        place += f", the {s.last}"
    if found:
        return (
            f"{place}, by parabolas: {sized(found.parameters, 'parameters')}. "
            f"N* ~ C^{plain(found.exponent)}. Biased: {_bias(found)}; the surface, "
            f"as in the table, has "
            f"{sized(at.parameters, 'parameters')} and C^{plain(s.exponent)}."
        )
    return (
        f"{place}: {sized(at.parameters, 'parameters')}, {big(at.tokens.value)} tokens, val loss "
        f"{plain(at.loss)}. N* ~ C^{plain(s.exponent)}."
    )


def _notes(law: Surface | Power) -> Iterator[str]:
    """Say how far the prediction lies out, what was held out and left out."""
    off, rung = max((law.decades, f"beyond the {law.last}"), (law.below, f"below the {law.first}"))
    if law.target is not None and off > FAR and not (isinstance(law, Surface) and law.edge):
        yield (
            f"That is {off:.1f} decades {rung}: so far out a prediction rests on the form of the "
            "law, of which no interval knows."
        )
    if isinstance(law, Power) and (others := law.others()):
        yield (
            f"The runs differ in {' and '.join(others)} too, of which this law takes no account; a "
            "surface, without --form and --by, is over both parameters and tokens."
        )
    yield _held_out(law.held_out)
    if not law.knows_e:
        yield "E is not known from these runs: a law without it fits about as well."
    yield from _left_out(law)


def _held_out(held: HoldOut | None) -> str:
    if held is None:
        return "Held out: nothing, as the other runs are too few for a law of their own."
    return (
        f"Held out: the {held.what} ({plural(held.runs, 'run')}), predicted "
        f"{plain(held.predicted)}, measured {loss_text(held.measured)}: "
        f"{held.miss:+.2%}{'' if held.inside else ', outside the interval'}."
    )


def _left_out(law: Law) -> Iterator[str]:
    """Name what is no point, by reason."""
    out = {reason: names for reason, names in law.ladder.out.items() if names}
    parts = [f"{plural(len(n), 'run')}, {reason} ({listed(n)})" for reason, n in out.items()]
    if parts:
        yield f"Left out: {'; '.join(parts)}."
    yield from law.ladder.notes


def _surface_why(s: Surface) -> Iterator[str]:
    law = {k: factor(e) if k in "AB" else plain(e) for k, e in s.numbers.items()}
    yield (
        f"L(N, D) = E + A N^-alpha + B D^-beta: E {law['E']}, A {law['A']}, B {law['B']}, alpha "
        f"{law['alpha']}, beta {law['beta']}. N: {COUNTED[s.count]}."
    )
    yield f"{plural(len(s.rungs), s.rungs[0].what)}, {_noise(s)}"
    rules = {str(p.values.get("optimizer.rule") or "none") for p in s.ladder.points} - {"none"}
    if rules:
        yield f"optimizer.rule has set what it decides: {listed(sorted(rules))}."
    for count, exponent in s.other_counts().items():
        yield f"With N as {COUNTED[count]}: N* ~ C^{plain(exponent)}."
    if (miss := s.price.miss(s.sizes, s.flops / s.tokens)) > 1e-3:
        yield (
            "FLOPs a token are a smooth curve over N through those of the runs, "
            f"{miss:.1%} off at most."
        )
    worst = int(np.argmax(np.abs(s.rest)))
    yield f"Furthest from the law: {s.ladder.points[worst].name}, {s.rest[worst]:+.2%}."


def _parabolas(found: Parabolas | None, answered: bool) -> Iterator[str]:
    if found is not None and not answered:
        yield (
            f"By parabolas, one a budget: N* ~ C^{plain(found.exponent)}. They are biased: "
            f"{_bias(found)}."
        )
    elif found is None and answered:
        yield "Parabolas need two budgets with three sizes each and a lowest point."


def _bias(found: Parabolas) -> str:
    return (
        f"through losses of the fitted surface, without noise, they miss its exponent by "
        f"{found.exponent_bias:+.3f} and its N* by {found.parameters_bias:+.0%}"
    )


def _gain(g: Gain) -> str:
    """Return what a change needs, and how that changes with compute."""
    text = f"{g.change} needs {_times(g.common)} of the compute of {g.baseline}{_verdict(g.common)}"
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
    text = plain(need.ratio)
    return text.replace(" [", "x [", 1)


def _verdict(need: Need) -> str:
    return "" if need.shown else " (no difference is shown)"


def _power(p: Power) -> str:
    law = p.numbers
    text = f"val loss = {plain(law['E'])} + {factor(law['A'])} x {p.by}^-{plain(law['p'])}"
    if p.target is None:
        return f"{text}."
    place = f"{flops_text(p.target)} FLOPs" if p.by == "flops" else f"{big(p.target)} {p.by}"
    return f"At {place}: val loss {plain(p.loss_at(p.target))}; {text}."


def _power_why(p: Power) -> Iterator[str]:
    yield _noise(p)
    if p.by == "flops":
        yield "Of each budget the run with the lowest loss counts, which is low by luck too."


def _noise(law: Law) -> str:
    passes = max(number(p.values.get("max_epochs")) or 0.0 for p in law.ladder.points)
    again = (
        f" Up to {passes:.1f} passes over the data count as new tokens each." if passes > 1 else ""
    )
    return (
        f"{plural(len(law.losses), 'run')}; they lie {law.ensemble.noise:.2%} from the law "
        f"(standard deviation). Intervals hold 95 % of {len(law.ensemble.laws):,} draws of the "
        f"runs' noise, each fitted again.{again}"
    )
