"""Write the answer as an HTML page, in the manner of the page of a comparison."""

from __future__ import annotations

from llmexp.compare.document import Cell, Row, document
from llmexp.compare.plotting import Plot
from llmexp.laws import words
from llmexp.laws.answer import Answer
from llmexp.laws.fitting import Surface
from llmexp.laws.plots import budget_colours, frontiers, gains, isoflops, power_curve, residuals
from llmexp.laws.plots import contours as contour_plot
from llmexp.laws.power import Power
from llmexp.laws.table import cells, heads
from llmexp.settings.labels import plural


def page(a: Answer) -> str:
    """Return the page with everything inside."""
    sections: list[tuple[str, str, list[Plot]]] = []
    surfaces, powers = a.surfaces, [law for law in a.laws if isinstance(law, Power)]
    if a.gains:
        sections.append(("gain", "Compute at equal loss", [gains(a.gains)]))
    if powers:
        sections.append(("power", "The law", [power_curve(p) for p in powers]))
    if surfaces:
        sections.append(("frontier", "The frontier", [frontiers(surfaces)]))
        pairs = zip(surfaces, a.parabolas, strict=True)
        sections.append(("isoflop", "Loss over size", [isoflops(s, p) for s, p in pairs]))
        sections.append(("contours", "Over size and tokens", [contour_plot(s) for s in surfaces]))
    sections.append(("residuals", "Runs about the law", [residuals(law) for law in a.laws]))
    runs = sum(len(law.losses) for law in a.laws)
    plots = [plot for _, _, found in sections for plot in found]
    return document(
        "llmexp.laws", plots, title=f"Scaling laws of {plural(runs, 'run')}",
        about=" · ".join(law.ladder.name for law in a.laws), headline=words.headline(a),
        notes=words.notes(a), why=words.why(a), problems=a.problems, sections=sections,
        tables=[_table(a, i) for i in range(len(a.laws))],
    )  # fmt: skip


def _table(a: Answer, which: int) -> tuple[str, list[str], list[Row]]:
    """Return the table of a law: its name, its titles, its rows in the colours of their budgets."""
    law = a.laws[which]
    lines = cells(law)
    colours = ["transparent"] * len(lines)
    if isinstance(law, Surface) and len(law.rungs) <= len(lines):
        colours[: len(law.rungs)] = budget_colours(law)
    found = [
        Row(colour, line[0][0], [Cell(*cell) for cell in line[1:]])
        for colour, line in zip(colours, lines, strict=True)
    ]
    return (law.ladder.name if len(a.laws) > 1 else "Figures"), heads(law), found
