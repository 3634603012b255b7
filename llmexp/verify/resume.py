"""`llmexp verify resume`: check that a run that is killed again and again ends as an unbroken one.

It is killed (SIGKILL) at random moments, and has to be equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from llmexp.checkpoint import loading
from llmexp.checkpoint.folders import checkpoint_folders
from llmexp.runs import rundir
from llmexp.runs.steps import STEPS_BIN
from llmexp.settings.config import Config
from llmexp.verify import record, runs
from llmexp.verify.checks import Check, none_differ
from llmexp.verify.kills import Broken, Kill, kill_again_and_again
from llmexp.verify.pair import RunPair, joined, unequal

_STEPS = 12
POSITION = ("data_digest", "tokens_seen", "epoch")


def verify(
    config: Config, path: Path, *, steps: int | None = None, shrink: bool = False
) -> list[Check]:
    """Compare an unbroken run with one that is killed three times, in folders under `path`.

    Raises ConfigError.
    """
    plan = plan_to_break(config, steps or _STEPS, shrink)
    unbroken, broken = path / "unbroken", path / "broken"
    print(f"an unbroken run of {plan.train.max_steps} steps", flush=True)
    runs.train_recorded(unbroken, plan)
    wanted = kinds(unbroken)
    try:
        kills = kill_again_and_again(broken, plan, unbroken, wanted)
    except Broken as error:
        return [Check("the run goes on after each kill", False, note=str(error))]
    return [*hits(kills, wanted, record.starts(broken)), *compare_ends(unbroken, broken)]


def plan_to_break(config: Config, steps: int, shrink: bool) -> Config:
    """Return the config as the run to break, with many checkpoints. Raises ConfigError."""
    saves = {"every": max(1, min(3, steps // 4)), "keep": 2}
    # Restarts are ours: else the agent would go on by itself after the loss of one rank.
    return runs.watched(config, steps, shrink, checkpoint=saves, parallelism={"max_restarts": 0})


def kinds(unbroken: Path) -> tuple[str, ...]:
    """Return what to kill in which order.

    The save is last, because the last step ends with one more.
    """
    several = len(list((unbroken / "verify").glob("rank-*.jsonl"))) > 1
    return "step", "rank" if several else "step", "save"


def hits(kills: Sequence[Kill], wanted: Sequence[str], starts: Sequence[int]) -> list[Check]:
    """Check that the kills came where they had to, and that the run went on.

    Without a kill, or a resume, nothing is proven. `starts`: the steps at which the run began, each
    time.
    """
    come = ", ".join(map(str, kills)) or "the run was over too soon each time"
    checks = [Check("killed with SIGKILL", bool(kills), len(kills), note=come)]
    checks += [
        Check(f"no kill of this kind: {kind}", None, note="it was over too soon each time")
        for kind in dict.fromkeys(wanted)
        if not any(k.kind == kind and k.hit for k in kills)
    ]
    if kills:
        note = "after " + ", ".join(f"step {step - 1}" for step in starts[1:])
        went_on = [max(starts[k.starts : k.starts + 1], default=0) > k.saved for k in kills]
        anew = [str(k.saved) for k, on in zip(kills, went_on, strict=True) if not on]
        saved = any(k.saved for k in kills)
        if not saved:
            note += ": it began anew each time, which proves nothing; more --steps, for example "
            note += "--steps 40"
        elif anew:
            note += f"; but there was a checkpoint of step {', '.join(anew)}"
        what = "resumed from its newest checkpoint, one after step 0"
        checks.append(Check(what, saved and not anew, note=note))
    if lone := [k.alone for k in kills if k.rank is not None]:
        what = "the other ranks end by themselves when one is killed"
        checks.append(Check(what, all(lone), f"{sum(lone)} of {len(lone)} times"))
    return checks


def compare_ends(unbroken: Path, broken: Path) -> list[Check]:
    """Return everything that two finished and recorded runs have left, bit by bit."""
    loaded = []
    for run in (unbroken, broken):
        try:
            loaded.append(loading.read_checkpoint(checkpoint_folders(run / rundir.CHECKPOINTS)[-1]))
        except (loading.CheckpointError, IndexError) as error:
            why = "there is none" if isinstance(error, IndexError) else str(error)
            return [Check("both runs have left a checkpoint", False, note=f"{run}: {why}")]
    a, b = loaded
    pair = RunPair.of(unbroken, broken)

    def at_end(what: str, part: str) -> Check:
        return none_differ(
            f"{what} at the end", *unequal(*(stored(c.tensors.get(part, {})) for c in loaded))
        )

    def of_states(*parts: str) -> tuple[list[str], int]:
        return unequal(*(leaves({part: c.state.get(part) for part in parts}) for c in loaded))

    more = sorted({*a.tensors, *b.tensors} - {"model", "optimizer"})
    others = sorted({*a.state, *b.state} - {"optimizers", "scaler"})
    scaler = Check("loss scaler", None, note="only fp16 has one")
    if a.state["scaler"] or b.state["scaler"]:
        found = joined(of_states("scaler"), pair.columns("loss_scale"))
        scaler = none_differ("loss scaler: its state, and the scale in each row", *found)
    return [
        *(at_end(f"tensors of {kind}", kind) for kind in more),
        at_end("parameters", "model"),
        pair.recorded("parameters after each step, each rank", "parameters"),
        at_end("moments", "optimizer"),
        pair.recorded("moments after each step, each rank", "optimizer"),
        none_differ("settings of the optimizer at the end", *of_states("optimizers")),
        scaler,
        pair.figures("schedule: the learning rate in each row", "lr"),
        pair.recorded("RNG after each step, each rank", "rng"),
        pair.figures("position: the data and the tokens of each row", *POSITION),
        none_differ("counters and measurements at the end", *of_states(*others)),
        each_once(*pair.rows),
        pair.figures("metrics rows, but for times and memory"),
        Check("what each step came to (steps.bin)", len({*map(_steps, (unbroken, broken))}) == 1),
    ]


def _steps(run: Path) -> bytes:
    return file.read_bytes() if (file := run / STEPS_BIN).exists() else b""


def each_once(unbroken: list[dict[str, Any]], broken: list[dict[str, Any]]) -> Check:
    """Return whether the broken run has the steps of the other, each once and in order."""
    expected, steps = ([row["step"] for row in rows] for rows in (unbroken, broken))
    times = {step: steps.count(step) for step in sorted({*expected, *steps})}
    wrong = [f"step {step}: {n} rows" for step, n in times.items() if n != 1]
    wrong += [] if wrong or steps == expected else ["their order"]
    return none_differ("metrics rows: each step once", wrong, len(expected))


def stored(pieces: dict[str, list[Any]]) -> dict[str, str]:
    """Return a digest of each tensor of a checkpoint, of one kind (`Loaded.tensors`).

    A split tensor has one for each piece.
    """
    found = {}
    for name, boxes in pieces.items():
        for box in boxes:
            with safe_open(box.file, framework="pt") as file:
                where = f" from {box.offset}" if len(boxes) > 1 else ""
                found[f"{name}{where}"] = record.digest(file.get_tensor(name))
    return found


def leaves(tree: Any, prefix: str = "") -> dict[str, str]:
    """Return the values of nested containers as texts by dotted name; tensors as digests."""
    if not isinstance(tree, dict | list | tuple):
        text = record.digest(tree) if isinstance(tree, Tensor) else repr(tree)
        return {prefix.removeprefix("."): text}
    found: dict[str, str] = {}
    for name, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        found |= leaves(value, f"{prefix}.{name}")
    return found
