"""`llmexp verify resume`: check that a run that is killed again and again ends as an unbroken one.

It is killed (SIGKILL) at random moments, and has to be equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llmexp.checkpoint.loading import CheckpointError
from llmexp.settings.config import Config
from llmexp.verify import record, runs
from llmexp.verify.checks import Check, none_differ
from llmexp.verify.kills import Broken, Kill, kill_again_and_again
from llmexp.verify.pair import EACH, ROWS, Remains, TextColumn, same_bits

_STEPS = 12
POSITION = ("data_digest", "tokens_seen", "epoch")
SCALES = ("rows", "loss_scale")


def verify(config: Config, path: Path, steps: int | None, shrink: bool) -> list[Check]:
    """Compare an unbroken run with one that is killed three times, in folders under `path`.

    Raises ConfigError.
    """
    plan = plan_to_break(config, steps or _STEPS, shrink)
    unbroken, broken = path / "unbroken", path / "broken"
    runs.train_recorded(unbroken, plan)
    # the save is the last to be killed, because the last step ends with one more
    several = len(record.read_records(unbroken)) > 1
    wanted = "step", "rank" if several else "step", "save"
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
            note += ": it began anew each time, which proves nothing; more --steps, for example "
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
            why = "there is none" if isinstance(error, IndexError) else str(error)
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
