from __future__ import annotations

from llmexp.compare.document import Cell, Row, Section
from llmexp.compare.page import number_cells, runs
from llmexp.compare.records import Result


def section(c: Result) -> Section:
    """Return the gradient noise scale of each run beside its batch."""
    rows = []
    for colour, name, record in runs(c):
        if noise := record.status.get("noise"):
            known = map(noise.get, ("noise_scale", "low", "high", "measurements"))
            cells = number_cells(record.facts.get("real_batch_size"), *known, digits=4)
            rows.append(Row(colour, name, [*cells, Cell(str(noise.get("verdict") or ""))]))
    return Section(
        "noise",
        "Gradient noise scale",
        (),
        ["Run", "Real batch", "Noise scale", "low", "high", "Measurements", "Verdict"],
        rows,
        "In sequences (McCandlish et al. 2018, the simple estimator): a batch far below it trains "
        "nearly as well per token as a small one, one far above it wastes tokens.",
        folded=True,
    )
