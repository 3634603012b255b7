"""`llmexp verify determinism`: the same run twice, compared bit by bit after each step."""

from __future__ import annotations

from pathlib import Path

from llmexp.settings.config import Config
from llmexp.verify import runs
from llmexp.verify.checks import Check
from llmexp.verify.pair import RunPair

_STEPS = 8
NO_TWIN = "train.deterministic=true names an operation that has no deterministic implementation"


def verify(
    config: Config, path: Path, *, steps: int | None = None, shrink: bool = False
) -> list[Check]:
    """Compare two runs in folders under `path`, of the same config. Raises ConfigError."""
    saves = {"every": None, "save_initial": False}
    plan = runs.watched(config, steps or _STEPS, shrink, checkpoint=saves)
    first, second = path / "first", path / "second"
    for run in (first, second):
        print(f"the {run.name} run of {plan.train.max_steps} steps", flush=True)
        runs.train_recorded(run, plan)
    checks = compare_steps(RunPair.of(first, second))
    if any(check.passed is False for check in checks) and not config.train.deterministic:
        print(NO_TWIN, flush=True)
    return checks


def compare_steps(pair: RunPair) -> list[Check]:
    """Return what two recorded runs computed, bit by bit, in the order in which a step does it."""
    return [
        pair.figures("the data of each step", "data_digest", "target_tokens"),
        pair.figures("loss and gradient norm of each step", "train/loss", "grad_norm"),
        pair.recorded("parameters after each step, each rank", "parameters"),
        pair.recorded("moments after each step, each rank", "optimizer"),
        pair.recorded("RNG after each step, each rank", "rng"),
        pair.figures("metrics rows, but for times and memory"),
    ]
