"""Make the table of a pretraining log: what each run's steps took.

It also shows what that is of what the device can do. A figure that was not or cannot be measured is
blank.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmexp.compare.reading import finite
from llmexp.compare.records import Record
from llmexp.system import fileio

# Titles of figures that are facts of a run, and of those that are medians of a column.
FACTS = {
    "model": "model", "precision": "precision", "ranks": "world_size",
    "micro-batch": "micro_batch_size", "accumulation": "gradient_accumulation_steps",
    "length": "sequence_length",
}  # fmt: skip
MEDIANS = {
    "s/it": "step_time", "tokens/s": "tokens_per_sec",
    "TFLOP/s per rank (exact)": "tflops_per_sec_per_rank", "share of peak": "mfu",
}  # fmt: skip
TITLES = (
    *FACTS, "it/s", "s/it", "tokens/s", "scaling efficiency", "peak memory (GiB)",
    "TFLOP/s per rank (6ND)", "TFLOP/s per rank (exact)", "share of peak", "verdict", "state",
)  # fmt: skip
_ORDER = ("model", "precision", "ranks", "length", "accumulation", "micro-batch")
# rate over that at half the micro-batch, below which a larger micro-batch brings nothing
SATURATED = 1.1
LAUNCH = 1.6  # the same, above which the device was waiting for the host
BUSY = 0.35  # share of the peak from which arithmetic is what limits
_Row = dict[str, Any]


def median(record: Record, key: str) -> float | None:
    """Return the median of a column without its first row, or with it where there is no other."""
    values = finite(record.columns, key)
    return float(np.median(values[len(values) > 1 :])) or None if len(values) else None


def rows_of(records: Sequence[Record]) -> list[_Row]:
    """Return a row a run by title, in the order of the grid, with verdicts; None: not known.

    Rates are medians over the rows, without the first one, which warms up.
    """
    rows = []
    for record in records:
        row = {title: record.facts.get(key) for title, key in FACTS.items()}
        row |= {title: median(record, key) for title, key in MEDIANS.items()}
        per_rank, size = median(record, "tokens_per_sec_per_rank"), record.facts.get("parameters")
        memory = finite(record.columns, "peak_memory_gib").tolist()
        row |= {
            "it/s": 1 / row["s/it"] if row["s/it"] else None,
            "TFLOP/s per rank (6ND)": 6 * size * per_rank / 1e12 if per_rank and size else None,
            "peak memory (GiB)": max(memory, default=None),
            "state": record.state,
        }
        rows.append(row)
    rows.sort(key=lambda row: [str(row[k] or "") if k in _ORDER[:2] else row[k] or 0
                               for k in _ORDER])  # fmt: skip
    for row in rows:
        row["verdict"], row["scaling efficiency"] = _verdict(row, rows), None
        # the rate of each rank as a share of that of one rank with the same work, if there is one
        alone = [other["tokens/s"] for other in _alike(row, rows, "ranks") if other["ranks"] == 1]
        if (row["ranks"] or 1) > 1 and alone and row["tokens/s"]:
            row["scaling efficiency"] = float(row["tokens/s"] / row["ranks"] / np.median(alone))
    return rows


def _alike(row: _Row, rows: Sequence[_Row], but: str) -> list[_Row]:
    """Return those with a rate that have the same facts but for one."""
    keys = [key for key in FACTS if key != but]
    return [other for other in rows if other["tokens/s"] and all(other[k] == row[k] for k in keys)]


def _verdict(row: _Row, rows: Sequence[_Row]) -> str | None:
    """Tell what limits the run, by its rate beside that at the next smaller micro-batch.

    launch-bound: the rate still grows nearly as fast as the micro-batch, so the device waits for
    the host's launches. compute-bound: it grows no more, at a high share of the peak. memory-bound:
    it grows no more, at a low share: the memory's bandwidth is what is used up. None where that
    is not known, as without a known peak.
    """
    micro, share, gain = row["micro-batch"] or 0, row["share of peak"], None
    others = _alike(row, rows, "micro-batch")
    smaller = [other for other in others if 0 < (other["micro-batch"] or 0) < micro]
    if smaller and row["tokens/s"] and share is not None:
        nearest = max(smaller, key=lambda other: other["micro-batch"])
        doublings = np.log2(micro / nearest["micro-batch"])
        gain = (row["tokens/s"] / nearest["tokens/s"]) ** (1 / doublings)  # for each doubling
        if gain >= LAUNCH:
            return "launch-bound"
    if (share or 0) >= BUSY:
        return "compute-bound"
    return "memory-bound" if gain is not None and gain < SATURATED else None


def write(records: Sequence[Record], where: Path) -> list[list[str]]:
    """Write throughput.csv into the folder; return its cells as they are printed.

    The file is in full precision, and blank where nothing was measured.
    """
    rows, out = rows_of(records), io.StringIO()
    titles = [title for title in TITLES if any(row[title] is not None for row in rows)]
    writer = csv.DictWriter(out, titles, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    fileio.write_whole(where / "throughput.csv", out.getvalue())
    forms = {"share of peak": ".1%", "scaling efficiency": ".1%", "tokens/s": ",.0f"}

    def text(title: str, value: Any) -> str:
        form = forms.get(title, ".4g") if isinstance(value, float) else ""
        return "" if value is None else format(value, form)

    return [titles, *([text(title, row[title]) for title in titles] for row in rows)]
