"""`llmexp verify resume`: a run that is killed (SIGKILL) at random moments ends bit-equal to an
unbroken one."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmexp import rundir
from llmexp.checkpoint import loading
from llmexp.child import DONE, ended, family, kill_family, send
from llmexp.config import Config, ConfigError, refuse
from llmexp.metrics.keys import TIMINGS
from llmexp.verify import record, runs
from llmexp.verify.checks import Check, equal

STEPS, TRIES = 12, 3
EVAL_SEQUENCES = 16
ALONE_S = 90.0  # for the other ranks to end after one of them was killed


@dataclass(frozen=True)
class Kill:
    """What was found after a SIGKILL."""

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
        others = (
            "the others ended by themselves"
            if self.alone
            else f"the others had to be killed after {ALONE_S:g} s"
        )
        return f"in {where} (rank {self.rank} only; {others})"

    @property
    def hit(self) -> bool:
        return self.kind != "save" or self.saving is not None


class Broken(RuntimeError):
    """A run that cannot go on after a kill; the text has its last words."""


def verify(
    config: Config, path: Path, *, steps: int | None = None, shrink: bool = False
) -> list[Check]:
    """Compare an unbroken run with one that is killed three times, in folders under `path`. Raises
    ConfigError."""
    plan = planned(config, steps or STEPS, shrink)
    unbroken, broken = path / "unbroken", path / "broken"
    print(f"an unbroken run of {plan.train.max_steps} steps", flush=True)
    runs.train(unbroken, plan, **record.environment(unbroken))
    try:
        kills = kill_again_and_again(broken, plan, unbroken)
    except Broken as error:
        return [Check("the run goes on after each kill", False, note=str(error))]
    return [*hits(kills, kinds(unbroken), record.starts(broken)), *compare(unbroken, broken)]


def planned(config: Config, steps: int, shrink: bool) -> Config:
    """Return the config as the run to break, with many checkpoints. Raises ConfigError."""
    every = max(1, min(3, steps // 4))
    # Restarts are ours: else the agent would go on by itself after the loss of one rank.
    return watched(
        config,
        steps,
        shrink,
        checkpoint={"every": every, "keep": 2},
        parallelism={"max_restarts": 0},
    )


def watched(config: Config, steps: int, shrink: bool, **sections: dict[str, Any]) -> Config:
    """Return the config as a trial run with the recorder and a short evaluation. Raises ConfigError
    for several hosts."""
    if config.parallelism.nnodes > 1:
        raise refuse(
            "parallelism.nnodes",
            config.parallelism.nnodes,
            "a verification runs on this host alone",
            1,
        )
    if shrink:
        config = runs.shrunk(config)
    most = EVAL_SEQUENCES * config.batch.sequence_length
    short = {"train": {"eval_tokens": min(config.train.eval_tokens or most, most)}}
    return record.recorded(runs.trial(config, steps, **short, **sections))


def kinds(unbroken: Path) -> tuple[str, ...]:
    """Return what to kill in which order: the save last, because the last step ends with one
    more."""
    several = len(list((unbroken / "verify").glob("rank-*.jsonl"))) > 1
    return "step", "rank" if several else "step", "save"


def kill_again_and_again(path: Path, plan: Config, unbroken: Path) -> list[Kill]:
    """Start the run in `path`, kills it, starts it again, ..., and let it come to its end; what was
    hit.

    Raises Broken when it does not go on after a kill, ConfigError when it could not be made at all.
    """
    for attempt in range(1, TRIES + 1):
        wanted, kills = list(kinds(unbroken)), list[Kill]()
        while wanted:
            missed = sum(not k.hit for k in kills)
            part = len(kills), len(kills) + len(wanted)
            kill = strike(path, plan, unbroken, wanted[0], part, hurry=missed > 0 or attempt > 1)
            if kill is None:
                break
            print(f"killed {kill}", flush=True)
            kills.append(kill)
            if kill.hit or missed + 1 == TRIES:
                wanted.pop(0)
        if not wanted or attempt == TRIES:
            break
        print("the run ended before it could be killed again; once more from the start", flush=True)
        shutil.rmtree(path)
    try:
        runs.train(path, plan, **record.environment(path))
    except ConfigError as error:
        raise Broken(str(error)) from None
    return kills


def strike(
    path: Path, plan: Config, unbroken: Path, kind: str, part: tuple[int, int], hurry: bool
) -> Kill | None:
    """Start the run in `path` and kill it once, in a random step of part (number, of how many) of
    the run; after a miss, in a `hurry`, as soon as there is something to hit.

    None when the run came to its end before. Raises Broken or ConfigError when it ended otherwise.
    """
    steps, (number, of), rng = plan.train.max_steps or 0, part, random.SystemRandom()
    low = 1 + number * steps // of
    high = max(low, min((number + 1) * steps // of, steps - 1))  # the last one is soon over
    target = low if hurry else rng.randint(low, high)
    rows, root = path / rundir.METRICS, path / rundir.CHECKPOINTS
    before = _written(rows)

    def started() -> (
        bool
    ):  # a resumed run writes its rows anew, once what an earlier one has left is cleaned away
        return _written(rows) != before

    process = runs.start(path, plan, **record.environment(path))
    with _nothing_left(process):
        there = _wait(process, started) and _wait(process, lambda: _last(path) >= target - 1)
        if kind == "rank":
            there = there and _wait(process, lambda: bool(_ranks(family(process.pid))))
        tree, rank = family(process.pid), None  # now: a save may be over in a few milliseconds
        ranks = _ranks(tree) if kind == "rank" else {}
        if there and kind == "save":
            there = _wait(process, lambda: _saving(root) is not None, pause_s=0.0002)
            time.sleep(0.0 if hurry else rng.random() / 2 * _save_s(unbroken))
        elif there and not hurry:
            time.sleep(
                rng.random() * statistics.median(row["step_time"] for row in runs.rows(unbroken))
            )
        gone = kind == "rank" and not ranks  # the last step is behind them
        if not there or gone or process.poll() is not None:
            if process.wait() == DONE:
                return None
            words = f"{path}: ended with exit code {process.returncode}: {runs.last_words(path)}"
            raise Broken(words) if number else ConfigError(words)
        if kind == "rank":
            rank, pid = rng.choice(sorted(ranks.items()))
            send(pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(ALONE_S)  # it has to find out, and to end the others
        alone = process.poll() is not None
        _kill_all(process, tree)
    if rundir.read_status(path).get("state") == "finished":  # it was only about to leave
        return None
    return Kill(
        kind, _last(path) + 1, _saving(root), rank, alone, _saved(root), len(record.starts(path))
    )


def hits(kills: Sequence[Kill], wanted: Sequence[str], starts: Sequence[int]) -> list[Check]:
    """Return whether the kills came where they had to, and what followed; without a kill, or a
    resume, nothing is proven. `starts`: the steps at which the run began, each time."""
    come = ", ".join(map(str, kills))
    checks = [
        Check(
            "killed with SIGKILL",
            bool(kills),
            len(kills),
            note=come or "the run was over too soon each time",
        )
    ]
    checks += [
        Check(f"no kill of this kind: {kind}", None, note="it was over too soon each time")
        for kind in dict.fromkeys(wanted)
        if not any(k.kind == kind and k.hit for k in kills)
    ]
    if kills:
        note = "after " + ", ".join(f"step {step - 1}" for step in starts[1:])
        anew = [
            k.saved
            for k in kills
            if not any(step > k.saved for step in starts[k.starts : k.starts + 1])
        ]
        if not any(k.saved for k in kills):
            note += (
                ": it began anew each time, which proves nothing; more --steps, for example "
                "--steps 40"
            )
        elif anew:
            note += f"; but there was a checkpoint of step {', '.join(map(str, anew))}"
        passed = any(k.saved for k in kills) and not anew
        checks.append(
            Check("resumed from its newest checkpoint, one after step 0", passed, note=note)
        )
    if lone := [k.alone for k in kills if k.rank is not None]:
        found = f"{sum(lone)} of {len(lone)} times"
        checks.append(
            Check("the other ranks end by themselves when one is killed", all(lone), found)
        )
    return checks


def compare(unbroken: Path, broken: Path) -> list[Check]:
    """Return everything that two finished and recorded runs have left, bit by bit."""
    loaded = []
    for run in (unbroken, broken):
        try:
            loaded.append(loading.load(loading.steps(run / rundir.CHECKPOINTS)[-1]))
        except (loading.CheckpointError, IndexError) as error:
            why = "there is none" if isinstance(error, IndexError) else str(error)
            return [Check("both runs have left a checkpoint", False, note=f"{run}: {why}")]
    a, b = loaded
    seen = record.read(unbroken), record.read(broken)
    rows = runs.rows(unbroken), runs.rows(broken)
    optimizers = leaves(a.state["optimizers"]), leaves(b.state["optimizers"])
    scaler = leaves(a.state["scaler"]), leaves(b.state["scaler"])
    counters = [
        leaves({k: v for k, v in c.state.items() if k not in ("optimizers", "scaler")})
        for c in (a, b)
    ]
    scales = columns(*rows, "loss_scale")
    return [
        equal("parameters at the end", *unequal(stored(a.model), stored(b.model))),
        equal("parameters after each step, each rank", *record.differences(*seen, "parameters")),
        equal("moments at the end", *unequal(stored(a.optimizer), stored(b.optimizer))),
        equal("moments after each step, each rank", *record.differences(*seen, "optimizer")),
        equal("settings of the optimizer at the end", *unequal(*optimizers)),
        equal(
            "loss scaler: its state, and the scale in each row", *joined(unequal(*scaler), scales)
        )
        if scaler[0] or scaler[1]
        else Check("loss scaler", None, note="only fp16 has one"),
        equal("schedule: the learning rate in each row", *columns(*rows, "lr")),
        equal("RNG after each step, each rank", *record.differences(*seen, "rng")),
        equal(
            "position: the data and the tokens of each row",
            *columns(*rows, "data_digest", "tokens_seen", "epoch"),
        ),
        equal("counters and measurements at the end", *unequal(*counters)),
        each_once(*rows),
        equal("metrics rows, but for times and memory", *columns(*rows)),
    ]


Found = tuple[list[str], int]  # what differs, of how many


def unequal(a: dict[str, str], b: dict[str, str]) -> Found:
    """Return the keys with values that differ, or that only one of them has, of how many."""
    keys = list(dict.fromkeys([*a, *b]))
    return [key for key in keys if a.get(key) != b.get(key)], len(keys)


def joined(*found: Found) -> Found:
    return [name for names, _ in found for name in names], sum(count for _, count in found)


def columns(a: list[dict[str, Any]], b: list[dict[str, Any]], *keys: str) -> Found:
    """Return the figures that differ between two runs' rows, by step: these `keys`, or all but the
    timings."""

    def figures(rows: list[dict[str, Any]]) -> dict[str, str]:
        return {
            f"step {row['step']}, {key}": repr(value)  # the digits of a float give it back exactly
            for row in rows
            for key, value in row.items()
            if (key in keys if keys else key not in TIMINGS)
        }

    return unequal(figures(a), figures(b))


def each_once(unbroken: list[dict[str, Any]], broken: list[dict[str, Any]]) -> Check:
    """Return whether the broken run has the steps of the other, each once and in order."""
    expected, steps = [row["step"] for row in unbroken], [row["step"] for row in broken]
    wrong = [
        f"step {s}: {steps.count(s)} rows"
        for s in sorted({*expected, *steps})
        if steps.count(s) != 1
    ]
    wrong += [] if wrong or steps == expected else ["their order"]
    return equal("metrics rows: each step once", wrong, len(expected))


def stored(pieces: dict[str, list[Any]]) -> dict[str, str]:
    """Digest of a checkpoint's tensors (`Loaded.model` or `.optimizer`) by name; of a split one by
    its pieces'."""
    from safetensors import safe_open

    found = {}
    for name, boxes in pieces.items():
        for box in boxes:
            with safe_open(box.file, framework="pt") as file:
                where = f" from {box.offset}" if len(boxes) > 1 else ""
                found[f"{name}{where}"] = record.digest(file.get_tensor(name))
    return found


def leaves(tree: Any, prefix: str = "") -> dict[str, str]:
    """Return the values of nested containers as texts by dotted name; tensors as digests."""
    if isinstance(tree, dict | list | tuple):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return {
            key: text
            for name, value in items
            for key, text in leaves(value, f"{prefix}.{name}").items()
        }
    return {prefix.removeprefix("."): record.digest(tree) if hasattr(tree, "numel") else repr(tree)}


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
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_ctime_ns  # not its inode, which the file system may use again
    return 0


def _last(path: Path) -> int:
    """Return the step of the run's last row, 0 where there is none."""
    rows = runs.rows(path)
    return int(rows[-1]["step"]) if rows else 0


def _saving(root: Path) -> int | None:
    """Return the step of the checkpoint that is half written under `root`."""
    with contextlib.suppress(OSError):
        names = [
            n
            for n in os.listdir(root)
            if n.startswith(".step_") and n.endswith(".tmp") and ".old" not in n
        ]
        return max((int(n[len(".step_") : -len(".tmp")]) for n in names), default=None)
    return None


def _saved(root: Path) -> int:
    """Return the step of the newest whole checkpoint under `root`, 0 where there is none."""
    there = loading.steps(root)
    return int(there[-1].name.removeprefix("step_")) if there else 0


def _save_s(unbroken: Path) -> float:
    """About how long a save took: from the first of its files to the last."""
    times = [
        f.stat().st_mtime for f in max((unbroken / rundir.CHECKPOINTS).glob("step_*")).iterdir()
    ]
    return max(times) - min(times)


def _ranks(tree: Sequence[int]) -> dict[int, int]:
    """Return the process of each rank, of a worker's tree, that is still there: the first that has
    its number."""
    found: dict[int, int] = {}
    for pid in tree[1:]:
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                name, _, value = entry.partition(b"=")
                if name == b"RANK" and not ended(pid):
                    found.setdefault(int(value), pid)
    return found


def _kill_all(process: subprocess.Popen[str], known: Sequence[int]) -> None:
    """SIGKILL for a worker and all under it at once, at first those `known`; returns when they are
    gone."""
    if process.poll() is None:
        send(process.pid, signal.SIGSTOP)  # it must not see its ranks die
    for pid in known[1:]:
        send(pid, signal.SIGKILL)
    gone = {*known[1:], *(kill_family(process.pid)[1:] if process.poll() is None else ())}
    process.wait()
    for pid in gone:
        while not ended(pid):
            time.sleep(0.001)


@contextlib.contextmanager
def _nothing_left(process: subprocess.Popen[str]) -> Iterator[None]:
    """Pass signals on to a worker; in the end neither it nor its ranks are there. A signal is a
    KeyboardInterrupt, whatever became of the worker."""
    with runs.ended_with_us(process) as stopped_by:
        try:
            yield
        finally:
            if process.poll() is None:
                _kill_all(process, family(process.pid))
            if stopped_by:
                raise KeyboardInterrupt
