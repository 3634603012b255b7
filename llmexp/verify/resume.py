"""`llmexp verify resume`: check that a run that is killed again and again ends as an unbroken one.

It is killed (SIGKILL) at random moments, and has to be equal bit for bit.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmexp.checkpoint.folders import checkpoint_folders
from llmexp.checkpoint.loading import CheckpointError
from llmexp.config.sections import Config
from llmexp.config.values import ConfigError
from llmexp.folders import rundir
from llmexp.system.child import DONE, ended, family, kill_family, send
from llmexp.verify import record, runs
from llmexp.verify.checks import Check, none_differ
from llmexp.verify.determinism import EACH, ROWS, Remains, TextColumn, same_bits

_STEPS = 12
POSITION = ("data_digest", "tokens_seen", "epoch")
SCALES = ("rows", "loss_scale")
_TRIES = 3
ALONE_S = 90.0  # for the other ranks to end after one of them was killed


def verify(config: Config, path: Path, steps: int | None, shrink: bool) -> list[Check]:
    """Compare an unbroken run with one that is killed three times, in folders under `path`.

    Raises ConfigError.
    """
    plan = plan_to_break(config, steps or _STEPS, shrink)
    unbroken, broken = path / "unbroken", path / "broken"
    runs.train_recorded(unbroken, plan)
    # the save is the last to be killed, because the last step ends with one more
    several = len(record.read_records(unbroken)) > 1
    wanted, kills = ("step", "rank" if several else "step", "save"), list[Kill]()
    there = False  # it has come to its end once
    try:
        for attempt in range(1, _TRIES + 1):
            left, kills = list(wanted), list[Kill]()
            while left:
                missed = sum(not k.hit for k in kills)
                part, hurry = (len(kills), len(kills) + len(left)), missed > 0 or attempt > 1
                if (kill := strike(broken, plan, unbroken, left[0], part, hurry)) is None:
                    break
                print(f"killed {kill}", flush=True)
                kills.append(kill)
                if kill.hit or missed + 1 == _TRIES:
                    left.pop(0)
            if not left or attempt == _TRIES:
                break
            print("the run ended before it could be killed again; trying again", flush=True)
            there = True
            shutil.rmtree(broken)
        runs.train_recorded(broken, plan)
    except ConfigError as error:
        if not (kills or there):  # it could not be made at all
            raise
        return [Check("the run continues after each kill", False, note=str(error))]
    return [*hits(kills, wanted, record.starts(broken)), *compare_ends(unbroken, broken)]


def plan_to_break(config: Config, steps: int, shrink: bool) -> Config:
    """Return the config as the run to break, with many checkpoints. Raises ConfigError."""
    saves = {"every": max(1, min(3, steps // 4)), "keep": 2}
    # Restarts are ours: else the agent would go on by itself after the loss of one rank.
    return runs.watched(config, steps, shrink, checkpoint=saves, parallelism={"max_restarts": 0})


def hits(kills: Sequence[Kill], wanted: Sequence[str], starts: Sequence[int]) -> list[Check]:
    """Check that the kills came where they had to, and that the run went on.

    Without a kill, or a resume, nothing is proven. `starts`: the steps at which the run began, each
    time.
    """
    late = "it was over too soon each time"
    come = ", ".join(map(str, kills)) or late
    checks = [Check("killed with SIGKILL", bool(kills), len(kills), note=come)]
    for kind in dict.fromkeys(wanted):
        if not any(k.kind == kind and k.hit for k in kills):
            checks.append(Check(f"no kill of this kind: {kind}", None, note=late))
    if kills:
        note = "after " + ", ".join(f"step {step - 1}" for step in starts[1:])
        newer = [k.saved for k in kills if max(starts[k.starts :][:1], default=0) <= k.saved]
        saved = any(k.saved for k in kills)
        if not saved:
            note += ": each attempt began at step 0, which proves nothing; for example "
            note += "--steps 40"
        elif newer:
            note += f"; but there was a checkpoint of step {', '.join(map(str, newer))}"
        what = "resumed from its newest checkpoint, one after step 0"
        checks.append(Check(what, saved and not newer, note=note))
    if lone := [k.alone for k in kills if k.rank is not None]:
        what = "the other ranks end by themselves when one is killed"
        checks.append(Check(what, all(lone), f"{sum(lone)} of {len(lone)} times"))
    return checks


def compare_ends(unbroken: Path, broken: Path) -> list[Check]:
    """Return everything that two finished and recorded runs have left, bit by bit."""
    a, b = Remains(unbroken), Remains(broken)
    for run in (a, b):
        try:
            run.loaded  # noqa: B018 (is read)
        except (CheckpointError, IndexError) as error:
            why = "none was saved" if isinstance(error, IndexError) else str(error)
            return [Check("both runs have left a checkpoint", False, note=f"{run.path}: {why}")]
    more = sorted({*a.loaded.tensors, *b.loaded.tensors} - {"model", "optimizer"})
    others = sorted({*a.loaded.state, *b.loaded.state} - {"optimizers", "scaler"})
    scaled = a.loaded.state["scaler"] or b.loaded.state["scaler"]
    columns: list[TextColumn] = [
        *((f"tensors of {kind} at the end", ("tensors", kind)) for kind in more),
        ("parameters at the end", ("tensors", "model")),
        (f"parameters {EACH}", ("steps", "parameters")),
        ("moments at the end", ("tensors", "optimizer")),
        (f"moments {EACH}", ("steps", "optimizer")),
        ("settings of the optimizer at the end", ("state", "optimizers")),
        ("loss scaler: its state, and the scale in each row", ("state", "scaler"), SCALES),
        ("schedule: the learning rate in each row", ("rows", "lr")),
        (f"RNG {EACH}", ("steps", "rng")),
        ("position: the data and the tokens of each row", ("rows", *POSITION)),
        ("counters and measurements at the end", ("state", *others)),
        ROWS,
        ("what each step came to (steps.bin)", ("step_file",)),
    ]
    wanted, steps = ([row["step"] for row in run.read_rows] for run in (a, b))
    counts = {step: steps.count(step) for step in sorted({*wanted, *steps})}
    wrong = [f"step {step}: {n} rows" for step, n in counts.items() if n != 1]
    wrong += [] if wrong or steps == wanted else ["their order"]
    return [
        none_differ("metrics rows: each step once", wrong, len(wanted)),
        *same_bits([column for column in columns if scaled or SCALES not in column], a, b),
        *([] if scaled else [Check("loss scaler", None, note="only fp16 has one")]),
    ]


@dataclass(frozen=True)
class Kill:
    """A SIGKILL, and the state that it left behind."""

    kind: str  # what was waited for: "step", "save" or "rank"
    step: int  # the step under way: the one after the last row
    saving: int | None  # the step of the checkpoint that was half written
    rank: int | None = None  # the only one that was killed
    alone: bool = True  # its worker then ended by itself
    saved: int = 0  # the step of the newest whole checkpoint, from which the run must go on
    starts: int = 0  # how often the run had begun to train until then

    def __str__(self) -> str:
        where = f"step {self.step}" if self.saving is None else f"the save of step {self.saving}"
        late = "" if self.kind != "save" or self.saving is not None else " just after a save"
        if self.rank is None:
            return f"in {where}{late}"
        killed = f"had to be killed after {ALONE_S:g} s"
        others = "ended by themselves" if self.alone else killed
        return f"in {where} (rank {self.rank} only; the others {others})"

    @property
    def hit(self) -> bool:
        return self.kind != "save" or self.saving is not None


def strike(
    path: Path, plan: Config, unbroken: Path, kind: str, part: tuple[int, int], hurry: bool
) -> Kill | None:
    """Start the run in `path` and kill it once, in a random step of a part of the run.

    `part` is (number, of how many). After a miss, in a `hurry`, kill as soon as there is something
    to hit. None when the run came to its end before. Raises ConfigError when it ended otherwise.
    """
    steps, (number, of), rng = plan.train.max_steps or 0, part, random.SystemRandom()
    low = 1 + number * steps // of
    high = max(low, min((number + 1) * steps // of, steps - 1))  # the last one is soon over
    target = low if hurry else rng.randint(low, high)
    root, rank, alone = path / rundir.CHECKPOINTS, None, False
    before = _written(path)
    process = runs.start_run(path, plan, **record.recorder_environment(path))
    with runs.ended_with_us(process):
        # A resumed run writes its rows anew, once what an earlier one has left is cleaned away.
        there = _wait(process, lambda: _written(path) != before)
        there = there and _wait(process, lambda: _last(path) >= target - 1)
        if kind == "rank":
            there = there and _wait(process, lambda: bool(_ranks(path, family(process.pid))))
        tree = family(process.pid)  # now: a save may be over in a few milliseconds
        ranks = _ranks(path, tree)
        if there and kind == "save":
            there = _wait(process, lambda: _saving(root) is not None, pause_s=0.0002)
        if there and not hurry:
            time.sleep(rng.random() * _moment(unbroken, kind))
        gone = kind == "rank" and not ranks  # the last step is behind them
        if not there or gone or process.poll() is not None:
            if process.wait() == DONE:
                return None
            words = f"{path}: ended with exit code {process.returncode}: {runs.last_words(path)}"
            raise ConfigError("cannot_verify", words)
        if kind == "rank":
            rank, pid = rng.choice(sorted(ranks.items()))
            send(pid, signal.SIGKILL)
            over = time.monotonic() + ALONE_S  # it has to find out, and to end the others
            _wait(process, lambda: time.monotonic() > over, pause_s=0.01)
        alone = process.poll() is not None
        _kill_all(process, tree)
    if rundir.read_status(path).get("state") == "finished":  # it was only about to leave
        return None
    starts = len(record.starts(path))
    saved = rundir.newest_step(path) or 0
    return Kill(kind, _last(path) + 1, _saving(root), rank, alone, saved, starts)


def _moment(unbroken: Path, kind: str) -> float:
    """Return for how many seconds, at most, to wait in what was met: a step, or half of a save."""
    if kind == "save":  # it took from the first of its files to the last
        newest = checkpoint_folders(unbroken / rundir.CHECKPOINTS)[-1]
        times = [file.stat().st_mtime for file in newest.iterdir()]
        return (max(times) - min(times)) / 2
    return statistics.median(row["step_time"] for row in runs.read_run_rows(unbroken))


def _wait(
    process: subprocess.Popen[str], until: Callable[[], bool], pause_s: float = 0.001
) -> bool:
    """Wait; False when the process ended before."""
    while not until():
        if process.poll() is not None:
            return False
        time.sleep(pause_s)
    return True


def _written(path: Path) -> int:
    """Return when the rows of a run last changed."""
    with contextlib.suppress(FileNotFoundError):
        # not their inode, which the file system may use again
        return (path / rundir.METRICS).stat().st_ctime_ns
    return 0


def _last(path: Path) -> int:
    """Return the step of the run's last row, 0 where there is none."""
    rows = runs.read_run_rows(path)
    return int(rows[-1]["step"]) if rows else 0


def _saving(root: Path) -> int | None:
    """Return the step of the checkpoint that is half written under `root`."""
    with contextlib.suppress(OSError):
        found = [re.fullmatch(r"\.step_(\d+)\.tmp", name) for name in os.listdir(root)]
        return max((int(match[1]) for match in found if match), default=None)
    return None


def _ranks(path: Path, tree: Sequence[int]) -> dict[int, int]:
    """Return the running process of each rank below a worker."""
    known = record.processes(path).items()
    return {rank: pid for rank, pid in known if pid in tree[1:] and not ended(pid)}


def _kill_all(process: subprocess.Popen[str], known: Sequence[int]) -> None:
    """Kill a worker and all under it at once (SIGKILL), at first those `known`.

    Returns when they are gone.
    """
    if process.poll() is None:
        send(process.pid, signal.SIGSTOP)  # it must not see its ranks die
    for pid in known[1:]:
        send(pid, signal.SIGKILL)
    gone = {*known[1:], *(kill_family(process.pid)[1:] if process.poll() is None else ())}
    process.wait()
    for pid in gone:
        while not ended(pid):
            time.sleep(0.001)
