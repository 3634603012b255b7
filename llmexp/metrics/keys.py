"""The keys of a row of metrics.jsonl: how each is called, rounded and judged, in one table.

Console, tables, page, proofs and tracker take it from here; docs/semantics.md says what they mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Key:
    """`title` is the short name that a reader sees where it differs from the name, `plot` the title
    of its curve over training."""

    name: str
    title: str = ""
    unit: str = ""
    better: str = ""  # lower | higher, where one is
    digits: int = 4  # significant ones that are shown
    timing: bool = False  # it says something about the machine, and differs between equal runs
    plot: str = ""

    @property
    def label(self) -> str:
        """Return the short name."""
        return self.title or self.name

    @property
    def head(self) -> str:
        """Return the short name with the unit, for the head of a column."""
        return f"{self.label} ({self.unit})" if self.unit else self.label


_ALL = (
    Key("step"),
    Key("tokens_seen", "tokens"),
    Key("epoch"),
    Key("train/loss", "train loss", better="lower", digits=5),
    Key("val/loss", "val loss", better="lower", digits=5),
    Key("val/ppl", "val ppl", better="lower"),
    Key("val/bits_per_byte", "val bits/byte", better="lower", digits=5,
        plot="Validation loss (bits per byte)"),
    Key("lr", plot="Learning rate"),
    Key("grad_norm", plot="Gradient norm before clipping"),
    Key("grad_norm_post_clip"),
    Key("clipped_share"),
    Key("clip_coefficient", plot="Mean clip coefficient"),
    Key("noise_scale", "noise scale", digits=3),
    Key("noise_scale_low"),
    Key("noise_scale_high"),
    Key("outlier_steps", "outlier steps", better="lower"),
    Key("weight_norm"),
    Key("loss_scale"),
    Key("skipped"),
    Key("skipped_steps", "skipped steps", better="lower"),
    Key("target_tokens"),
    Key("data_digest"),
    Key("step_time", unit="s", better="lower", digits=3, timing=True),
    Key("data_time", unit="s", better="lower", timing=True),
    Key("outside_share", better="lower", digits=3, timing=True),
    Key("tokens_per_sec", "tokens/s", better="higher", timing=True,
        plot="Tokens per second, all ranks"),
    Key("tokens_per_sec_per_rank", better="higher", timing=True),
    Key("scaling_efficiency", better="higher", timing=True),
    Key("tflops_per_sec_per_rank", better="higher", timing=True),
    Key("mfu", better="higher", timing=True),
    Key("peak_memory_gib", "memory", "GiB", "lower", digits=3, timing=True),
    Key("amp"),
    Key("eta", unit="s", timing=True),
)  # fmt: skip
KEYS = {key.name: key for key in _ALL}
TIMINGS = tuple(key.name for key in _ALL if key.timing)
# The average of the weights is named as a validation set is: of it, too, there is a loss apart.
EMA = "val/ema"
# Those whose last values end a run's summary, before those of named validation sets and tasks.
LOSSES = ("train/loss", "val/loss", "val/ppl", "val/bits_per_byte")


def is_of_named_set(key: str) -> bool:
    """Tell whether a key is that of a loss on a named validation set: val/NAME/loss."""
    return key.count("/") == 2 and key.startswith("val/")


def is_accuracy(key: str) -> bool:
    """Tell whether a key is that of the score of a task: task/NAME/acc."""
    return key.startswith("task/") and key.endswith("/acc")


def figures_in(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return LOSSES, and the keys of the losses on named validation sets and of the scores of tasks
    in the rows."""
    known = dict.fromkeys(key for row in rows for key in row)
    return [*LOSSES, *filter(is_of_named_set, known), *filter(is_accuracy, known)]


def title_of(key: str) -> str:
    """Return the short name of a key, or of that of a named set: val code loss."""
    if is_of_named_set(key):
        val, name, what = key.split("/")
        return KEYS[f"{val}/{what}"].label.replace(val, f"{val} {name}")
    return KEYS[key].label
