"""Write the answer as an HTML page, in the manner of the page of a comparison."""

from __future__ import annotations

from llmexp.compare.document import Row, document
from llmexp.compare.plotting import palette
from llmexp.laws import plots, words
from llmexp.laws.answer import Answer
from llmexp.laws.fitting import Surface
from llmexp.laws.power import Power
from llmexp.laws.table import heads, rows
from llmexp.settings.labels import plural


def page(a: Answer) -> str:
    """Return the page with everything inside."""
    surfaces, powers = a.surfaces, [law for law in a.laws if isinstance(law, Power)]
    isoflops = [plots.isoflops(s, a.parabolas[s]) for s in surfaces]
    sections = [
        ("gain", "Compute at equal loss", [plots.gains(a.gains)] if a.gains else []),
        ("power", "The law", [plots.power_curve(p) for p in powers]),
        ("frontier", "The frontier", [plots.frontiers(surfaces)] if surfaces else []),
        ("isoflop", "Loss over size", isoflops),
        ("contours", "Over size and tokens", [plots.contours(s) for s in surfaces]),
        ("residuals", "Runs about the law", [plots.residuals(law) for law in a.laws]),
    ]
    tables = []
    for law in a.laws:
        lines = rows(law)
        colours = ["transparent"] * len(lines)
        if isinstance(law, Surface) and len(law.rungs) <= len(lines):
            colours[: len(law.rungs)] = palette(len(law.rungs))
        named = [Row(colour, line[0].text, line[1:])
                 for colour, line in zip(colours, lines, strict=True)]  # fmt: skip
        tables.append((law.ladder.name if len(a.laws) > 1 else "Figures", heads(law), named))
    runs = sum(len(law.losses) for law in a.laws)
    return document(
        "llmexp.laws", [plot for _, _, found in sections for plot in found],
        title=f"Scaling laws of {plural(runs, 'run')}",
        about=" · ".join(law.ladder.name for law in a.laws), headline=words.headline(a),
        notes=words.notes(a), why=words.why(a), problems=a.problems,
        sections=[section for section in sections if section[2]], tables=tables,
    )  # fmt: skip
