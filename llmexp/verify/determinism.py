"""`llmexp verify determinism`: the same run twice, compared bit by bit after each step."""

from __future__ import annotations

from pathlib import Path

from llmexp.settings.config import Config
from llmexp.verify import runs
from llmexp.verify.checks import Check
from llmexp.verify.pair import EACH, ROWS, Remains, TextColumn, same_bits

_STEPS = 8
NO_TWIN = "train.deterministic=true names an operation that has no deterministic implementation"
# in the order in which a step does it
COLUMNS: tuple[TextColumn, ...] = (
    ("the data of each step", ("rows", "data_digest", "target_tokens")),
    ("loss and gradient norm of each step", ("rows", "train/loss", "grad_norm")),
    (f"parameters {EACH}", ("steps", "parameters")),
    (f"moments {EACH}", ("steps", "optimizer")),
    (f"RNG {EACH}", ("steps", "rng")),
    ROWS,
)


def verify(config: Config, path: Path, steps: int | None, shrink: bool) -> list[Check]:
    """Compare two runs in folders under `path`, of the same config. Raises ConfigError."""
    saves = {"every": None, "save_initial": False}
    plan = runs.watched(config, steps or _STEPS, shrink, checkpoint=saves)
    for name in ("first", "second"):
        runs.train_recorded(path / name, plan)
    checks = same_bits(COLUMNS, Remains(path / "first"), Remains(path / "second"))
    if any(check.passed is False for check in checks) and not config.train.deterministic:
        print(NO_TWIN, flush=True)
    return checks
