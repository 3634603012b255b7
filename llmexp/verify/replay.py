"""Repeat a step of a run, and say whether the data or the state made it unusual."""

from __future__ import annotations

import math
import re
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmexp.config.convert import with_knobs
from llmexp.config.values import ConfigError
from llmexp.folders import rundir
from llmexp.folders.rows import LINEAGE, read_rows
from llmexp.metrics.robust import middle
from llmexp.system.fileio import read_json, write_json
from llmexp.verify import runs

UNUSUAL = 2  # times the usual gradient norm
UNUSUAL_LOSS = 6  # robust standard deviations above the usual loss
LEAST_SPREAD = 0.01  # of the usual loss: what a standard deviation is at least
BEFORE, FEWEST = 32, 4  # steps before, whose median norm is the usual one; known at least
BEFORE_LOSS = 8  # the same for the loss, which falls


@dataclass(frozen=True)
class ReplayOf:
    """Hold what to repeat, and what to change: see `llmexp replay --help`."""

    run: Path
    step: int
    start: int | None = None
    lr: float | None = None
    max_norm: float | None = None
    skip: bool = False
    after: int = 0


def repeat(wanted: ReplayOf) -> dict[str, Any]:
    """Return what the step was made of, with a verdict.

    Raises ConfigError where the step cannot be repeated, or is not what the run recorded.
    """
    saved, last = rundir.saved_steps(wanted.run), last_step(wanted.run)
    parent = rundir.read_run(wanted.run).get("parent") or {"step": 0}
    first = parent["step"] + 1
    if not first <= wanted.step <= last:
        text = f"{wanted.run}@{wanted.step}: the run took the steps {first} to {last}"
        again = rundir.command_on(wanted.run, "replay", Path(f"{wanted.run}@{last}"))
        raise ConfigError("out_of_range", f"{text}; for example {again}")
    if wanted.start is not None and wanted.start not in [0, *saved]:
        there = ", ".join(map(str, saved)) or "none"
        raise ConfigError(
            "no_checkpoint",
            f"--from {wanted.start}: there is no checkpoint of that step; there are those of "
            f"{there}, and 0, the beginning",
        )
    near = max((step for step in saved if step < wanted.step), default=0)
    later = wanted.start is not None and wanted.start >= wanted.step
    begin = near if wanted.start is None or later else wanted.start
    found = _worker(wanted, begin, only_look=False)
    found["repeated_from"] = found["from"]  # of a fork that begins, the step of its parent
    if later and wanted.start is not None:
        found["start"] = _worker(wanted, wanted.start, only_look=True)["start"]
        found["from"] = wanted.start
    if (bad := found["differs"]) is not None:
        raise ConfigError(
            "cannot_verify",
            f"{wanted.run}: step {bad['step']} differs from what the run recorded: "
            f"{bad['figure']} {bad['replayed']!r}, in its row {bad['row']!r}; a replay needs the "
            "machine, the versions and the code of the run, and on a GPU a run with "
            "train.deterministic=true (llmexp verify determinism)",
        )
    rows = read_rows(wanted.run / rundir.METRICS)
    norms = usual_of(wanted.step, rows, "grad_norm", found.pop("norms"))
    losses = usual_of(wanted.step, rows, "train/loss", found.pop("losses"))[-BEFORE_LOSS:]
    return {"step": wanted.step} | found | verdict(wanted.step, found, norms, losses, saved)


def usual_of(
    step: int, rows: list[dict[str, Any]], key: str, repeated: dict[str, float]
) -> list[float]:
    """Return a figure of the updates before a step, from rows and from steps that were repeated."""
    known = {row["step"]: row[key] for row in rows if key in row and "grad_norm" in row}
    known |= {int(number): value for number, value in repeated.items()}
    return [known[number] for number in sorted(known) if step - BEFORE <= number < step]


def last_step(run: Path) -> int:
    """Return the last step that the run took, that which ended it with it, as far as is known."""
    rows, error = read_rows(run / rundir.METRICS), rundir.read_status(run).get("error")
    ended_at = re.search(r"\bstep ([\d,]{1,20})\b", str(error))
    steps = [row["step"] for row in rows[-1:]] + [rundir.newest_step(run) or 0]
    return max(*steps, int(ended_at[1].replace(",", "")) if ended_at else 0)


def verdict(
    step: int,
    found: dict[str, Any],
    norms: list[float],
    losses: list[float],
    saved: Sequence[int] = (),
) -> dict[str, Any]:
    """Return `cause` and a sentence, from gradient norms and losses at two states.

    `times_here` is the norm of the step over the median of the `norms` before it; `times_there` is
    that of its window with the weights of the start over the median of other windows there. A step
    is unusual from UNUSUAL times on, or by its loss. The cause is the data where `times_there` is
    nearer to `times_here` than to 1, on a logarithmic scale, or where more than half of the loss's
    rise is there, too. Else it is the state, unless the start cannot tell: see `by_loss`. What is
    not finite counts as infinite, and is None. `saved`: steps of checkpoints.
    """
    start, here, begin = found["start"], found["here"], found["from"]
    window = infinite(start["window"][1])
    median = statistics.median([norm for _, norm in start["others"]] or [window])
    usual = statistics.median(norms) if len(norms) >= FEWEST else median
    figures: dict[str, Any] = {"usual_norm": usual}
    if not (usual > 0 and median > 0):
        text = f"step {step:,} cannot be judged: the steps near it have gradients of norm 0."
        return {"cause": None, **figures, "sentence": text}
    if "grad_norm" not in here:
        later = [norm / usual for _, _, norm in found["later"]]
        went = "no step follows"
        if later:
            went = f"the next {len(later)} steps come to {max(later):.3g} times the usual "
            went += f"gradient norm, at step {found['later'][later.index(max(later))][0]:,}"
        text = f"without the batch of step {step:,}: {went}."
        return {"cause": None, **figures, "sentence": text}
    times, times_there = infinite(here["grad_norm"]) / usual, window / median
    known, odd, far = by_loss(step, found, losses, saved)
    rise, rise_there = (known[k] if odd else None for k in ("rise_here", "rise_there"))
    # no number is near one that is not finite
    least = math.sqrt(times) if math.isfinite(times) else UNUSUAL
    cause, spike = "state", not times < UNUSUAL
    if not spike and not odd:
        cause = "none"
    elif (spike and times_there > least) or (odd and known["rise_there"] > known["rise_here"] / 2):
        cause = "data"
    elif far:
        cause = ""
    named = {"none": "no spike", "": "no verdict"}.get(cause, f"the {cause}")
    text = f"{named}: step {step:,} has {_sizes(times, rise)}; with the weights of step {begin:,} "
    text += f"its batch has {_sizes(times_there, rise_there)}"
    figures |= {"times_here": times, "times_there": times_there, **known}
    figures = {k: v if math.isfinite(v) else None for k, v in figures.items()}
    return figures | {"cause": cause or None, "sentence": f"{text}{'' if cause else far}."}


def by_loss(
    step: int, found: dict[str, Any], before: list[float], saved: Sequence[int]
) -> tuple[dict[str, float], bool, str]:
    """Return by how much losses of the window are above the usual ones, here and there.

    Beside it whether the step's is unusual: UNUSUAL_LOSS robust standard deviations (1.4826 times
    the median distance from the median) or more; and why the weights of the start cannot tell that
    the state is the cause, "" if they can. Nothing of it is known where there are few losses
    `before`, or the step's is not finite.

    Weights that have learned little find every window alike: their loss of other windows is above
    the usual one by more than half of the step's rise, and more than chance. Those of the steps
    that the usual loss is of are near enough. Nor can they where the window's loss is unusual there
    without being half as much so.
    """
    start, here, begin = found["start"], found["here"], found["from"]
    there = [loss for loss, _ in start["others"]]
    if len(before) < FEWEST or not there or here["loss"] is None:
        return {}, False, ""
    (usual, spread), (median, spread_there) = middle(before), middle(there)
    rise, rise_there = here["loss"] - usual, infinite(start["window"][0]) - median
    figures = {"usual_loss": usual, "rise_here": rise, "rise_there": rise_there}
    unusual, gap = UNUSUAL_LOSS * max(spread, LEAST_SPREAD * usual), median - usual
    text = "; that is too little for the data, and unusual"
    if rise_there <= UNUSUAL_LOSS * max(spread_there, LEAST_SPREAD * median):
        if begin >= step - 1 - BEFORE_LOSS or gap <= max(rise / 2, unusual):
            return figures, rise > unusual, ""
        text = f"; there any batch's loss is {gap:.3g} above the usual one, so none stands out"
    nearer = [s for s in saved if begin < s < step][-1:] or [s for s in saved if s >= step][:1]
    way = "no nearer one is kept: a run with a smaller checkpoint.every has them"
    if nearer:
        way = f"compare with a nearer one: --from {nearer[0]}"
    return figures, rise > unusual, f"{text}; {way}"


def infinite(figure: float | None) -> float:
    return math.inf if figure is None else figure


def _sizes(times: float, rise: float | None) -> str:
    """Return a gradient norm in usual ones, and how far a loss is above the usual one."""
    text = f"{times:.3g} times the usual gradient norm"
    text = text if math.isfinite(times) else "a gradient that is not finite"
    return text if rise is None else f"{text} and a loss {rise:+.3g} beside the usual one"


def _worker(wanted: ReplayOf, begin: int, *, only_look: bool) -> dict[str, Any]:
    """Do it in a folder beside the run's, on the run's ranks. Raises ConfigError."""
    config = rundir.built_config(wanted.run)
    runs.refuse_hosts(config, "a replay")
    config = runs.of_features(runs.quiet(config), "replay", wanted.step)
    config = with_knobs(config, checkpoint={"save_initial": False, "last": False})
    rows = read_rows(wanted.run / rundir.METRICS)
    where = (wanted.run / rundir.CHECKPOINTS).absolute()
    with tempfile.TemporaryDirectory(prefix="llmexp-replay-") as folder:
        path = Path(folder, "run")
        path.mkdir()
        for name in (rundir.CONFIG, rundir.RUN, LINEAGE):
            if (wanted.run / name).exists():
                shutil.copy(wanted.run / name, path / name)
        rundir.write_status(path, "preempted")
        repeated = {row["step"]: row for row in rows if begin < row["step"] <= wanted.step}
        asked = vars(wanted) | {"run": str(wanted.run), "mode": "replay", "rows": repeated}
        asked |= {"begin": (str(where), begin), "only_look": only_look}
        write_json(path / rundir.ASKED, asked)
        try:
            runs.train_folder(path, config)
        except ConfigError:
            words = runs.last_words(path).removeprefix("llmexp: ")
            text = words.partition("; the logs of all ranks are in")[0]  # they go with the folder
            text = text.replace(str(path), str(wanted.run))
            raise ConfigError(
                "cannot_verify", f"{wanted.run}: it cannot be repeated: {text}"
            ) from None
        return read_json(path / rundir.FOUND)
