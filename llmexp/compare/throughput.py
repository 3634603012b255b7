"""The table of a pretraining log: what each run's steps took, and what that is of what the device
can do.

A figure that was not or cannot be measured is blank.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmexp import fileio
from llmexp.compare import reading
from llmexp.compare.records import Record
from llmexp.config import flatten

TITLES = (
    "model", "precision", "ranks", "micro-batch", "accumulation", "length", "it/s", "s/it",
    "tokens/s",
    "scaling efficiency", "peak memory (GiB)", "TFLOP/s per rank (6ND)", "TFLOP/s per rank "
                                                                         "(exact)", "share of peak",
    "verdict", "state",
)  # fmt: skip
# rate over that at half the micro-batch, below which a larger micro-batch brings nothing
SATURATED = 1.1
LAUNCH = 1.6  # the same, above which the device was waiting for the host
BUSY = 0.35  # share of the peak from which arithmetic is what limits


def row_of(record: Record) -> dict[str, Any]:
    """Return the figures of one run, by title. Rates are medians over the rows, without the first
    one, which warms up."""
    facts = record.facts
    found: dict[str, Any] = {
        "model": facts.get("model"),
        "precision": facts.get("precision"),
        "ranks": facts.get("world_size"),
        "micro-batch": facts.get("micro_batch_size"),
        "accumulation": facts.get("gradient_accumulation_steps"),
        "length": facts.get("sequence_length"),
        "state": record.state,
    }
    step_time, rate = median(record, "step_time"), median(record, "tokens_per_sec")
    per_rank = median(record, "tokens_per_sec_per_rank")
    if step_time:
        found |= {"it/s": 1 / step_time, "s/it": step_time}
    if rate:
        found["tokens/s"] = rate
    if per_rank and facts.get("parameters"):
        found["TFLOP/s per rank (6ND)"] = 6 * facts["parameters"] * per_rank / 1e12
    for title, key in (
        ("TFLOP/s per rank (exact)", "tflops_per_sec_per_rank"),
        ("share of peak", "mfu"),
    ):
        if (value := median(record, key)) is not None:
            found[title] = value
    memory = record.columns.get("peak_memory_gib", np.zeros(0))
    if np.isfinite(memory).any():
        found["peak memory (GiB)"] = float(np.nanmax(memory))
    return {k: v for k, v in found.items() if v is not None}


def median(record: Record, key: str) -> float | None:
    """Return the median of a column without its first row, or with it where there is no other."""
    values = record.columns.get(key, np.zeros(0))
    values = values[np.isfinite(values)]
    return float(np.median(values[1:] if len(values) > 1 else values)) if len(values) else None


def rows_of(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return a row a run, in the order of the grid, with verdicts."""
    rows = [row_of(record) for record in records]
    order = ("model", "precision", "ranks", "length", "accumulation", "micro-batch")
    rows.sort(key=lambda row: tuple((str(row.get(k, "")), 0) if isinstance(row.get(k),
    str) else ("", row.get(k, 0))
                                    for k in order))  # fmt: skip
    for row in rows:
        if text := verdict(row, rows):
            row["verdict"] = text
        if (share := efficiency(row, rows)) is not None:
            row["scaling efficiency"] = share
    return rows


def efficiency(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> float | None:
    """Return the rate of each rank as a share of that of one rank with the same work, where the
    grid has one."""
    same = ("model", "precision", "length", "micro-batch", "accumulation")
    alone = [r["tokens/s"] for r in rows if r.get("ranks") == 1 and all(r.get(k) == row.get(k) for k in same)  # noqa: E501
             and r.get("tokens/s")]  # fmt: skip
    if row.get("ranks", 1) == 1 or not alone or not row.get("tokens/s"):
        return None
    return float(row["tokens/s"] / row["ranks"] / np.median(alone))


# What decides the rate of a rank besides the device, by config key or section: its work between two
# communications.
WORK = (
    "model.", "optimizer._target_", "clip.kind", "precision.kind", "train.compile",
    "batch.micro_batch_size",
    "batch.gradient_accumulation_steps", "batch.sequence_length",
    "parallelism.activation_checkpointing",
)  # fmt: skip


def single_rank_rate(
    where: str, config: dict[str, Any], facts: dict[str, Any]
) -> tuple[float | None, str]:
    """Return (tokens/s of the finished runs of one rank under the path that do the same work on the
    same device, what is missing in words). Their median where there are several."""
    records = [r for r in reading.read(reading.find([where])[0]) if r.facts.get("world_size") == 1]
    measured = [
        (r, rate)
        for r in records
        if r.state == "finished" and (rate := median(r, "tokens_per_sec"))
    ]
    if not measured:
        return None, "no finished run of one rank is there"
    wanted, differing = _work(flatten(config), facts), list[list[str]]()
    for record, _ in measured:
        there = _work(record.config, record.facts)
        differing.append(
            [
                f"{k} ({v} there, {wanted.get(k)} here)"
                for k, v in there.items()
                if v != wanted.get(k)
            ]
        )
    fitting = [rate for (_, rate), differs in zip(measured, differing, strict=True) if not differs]
    if fitting:
        return float(np.median(fitting)), ""
    nearest = ", ".join(min(differing, key=len)[:3])
    return (
        None,
        f"none of its runs of one rank does the same work; the nearest differs in {nearest}",
    )


def _work(config: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    found = {k: v for k, v in config.items() if k.startswith(WORK)}
    name = str(facts.get("device_name"))
    if facts.get("device") == "cpu":  # NAME, N threads
        found["threads"] = facts.get("threads_per_rank")
        name = name.rpartition(", ")[0]
    return found | {"device": name}


def verdict(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str | None:
    """Tell what limits the run, by how its rate compares with that at the next smaller micro-batch
    of the same grid.

    launch-bound: the rate still grows nearly as fast as the micro-batch, so the device waits for
    the host's launches. compute-bound: it grows no more, at a high share of the peak. memory-bound:
    it grows no more, at a low share: the memory's bandwidth is what is used up. None where that
    cannot be told, as without a known peak.
    """
    same = [k for k in ("model", "precision", "ranks", "accumulation", "length") if k in row]
    smaller = [
        other
        for other in rows
        if other.get("tokens/s")
        and other.get("micro-batch", 0) < row.get("micro-batch", 0)
        and all(other.get(k) == row.get(k) for k in same)
    ]
    if not smaller or not row.get("tokens/s") or "share of peak" not in row:
        return "compute-bound" if row.get("share of peak", 0) >= BUSY else None
    nearest = max(smaller, key=lambda other: other["micro-batch"])
    doublings = np.log2(row["micro-batch"] / nearest["micro-batch"])
    gain = (row["tokens/s"] / nearest["tokens/s"]) ** (1 / doublings)  # for each doubling
    if gain >= LAUNCH:
        return "launch-bound"
    if row["share of peak"] >= BUSY:
        return "compute-bound"
    return "memory-bound" if gain < SATURATED else None


def cell(title: str, value: Any) -> str:
    if value is None:
        return ""
    if title in ("share of peak", "scaling efficiency"):
        return f"{value:.1%}"
    if title == "tokens/s":
        return f"{value:,.0f}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def used(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the titles of which some row has a figure."""
    return [title for title in TITLES if any(title in row for row in rows)]


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    titles = used(rows)
    lines = [titles, ["---"] * len(titles)]
    lines += [[cell(title, row.get(title)).replace("|", "\\|") for title in titles] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def as_csv(rows: Sequence[dict[str, Any]]) -> str:
    """Full precision; blank where nothing was measured."""
    out = io.StringIO()
    writer = csv.DictWriter(out, used(rows), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def write(records: Sequence[Record], where: Path) -> str:
    """Write throughput.md, .csv and .png into the folder; the text of the first one."""
    rows = rows_of(records)
    text = markdown(rows)
    fileio.write_whole(where / "throughput.md", text)
    fileio.write_whole(where / "throughput.csv", as_csv(rows))
    heat_maps(rows, where / "throughput.png")
    return text


def heat_maps(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """tokens/s over micro-batch and accumulation, a panel for each length and precision."""
    measured = [
        row for row in rows if "tokens/s" in row and {"micro-batch", "accumulation"} <= row.keys()
    ]
    panels = list(
        dict.fromkeys(
            (row.get("precision"), row.get("length"), row.get("model")) for row in measured
        )
    )
    if not panels:
        return
    from matplotlib.figure import Figure

    across = min(4, len(panels))
    down = -(-len(panels) // across)
    figure = Figure(figsize=(3.6 * across, 3.0 * down), dpi=120, layout="constrained")
    axes = figure.subplots(down, across, squeeze=False)
    top = max(row["tokens/s"] for row in measured)
    image: Any = None
    for axis, panel in zip(axes.flat, panels, strict=False):
        precision, length, model = panel
        chosen = [
            r for r in measured if (r.get("precision"), r.get("length"), r.get("model")) == panel
        ]
        micro, accumulation = (
            sorted({r[k] for r in chosen}) for k in ("micro-batch", "accumulation")
        )
        grid = np.full((len(accumulation), len(micro)), np.nan)
        for r in chosen:
            grid[accumulation.index(r["accumulation"]), micro.index(r["micro-batch"])] = r[
                "tokens/s"
            ]
        image = axis.imshow(grid, aspect="auto", vmin=0, vmax=top, cmap="viridis", origin="lower")
        for i, j in np.argwhere(np.isfinite(grid)):
            colour = "black" if grid[i, j] > 0.6 * top else "white"
            axis.text(
                j, i, f"{grid[i, j]:,.0f}", ha="center", va="center", fontsize=7, color=colour
            )
        axis.set_xticks(range(len(micro)), [str(m) for m in micro])
        axis.set_yticks(range(len(accumulation)), [str(a) for a in accumulation])
        axis.set_xlabel("micro-batch", fontsize=8)
        axis.set_ylabel("accumulation", fontsize=8)
        several = len({p[2] for p in panels}) > 1
        axis.set_title(
            f"{precision}, length {length}" + (f"\n{model}" if several else ""), fontsize=9
        )
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    figure.colorbar(image, ax=axes, shrink=0.8, label="tokens/s, all ranks")
    out = io.BytesIO()
    figure.savefig(out, format="png")
    fileio.write_whole(path, out.getvalue())
