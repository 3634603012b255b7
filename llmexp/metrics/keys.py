"""The keys of a row of metrics.jsonl: how each is called, rounded and judged, in one table.

Console, tables, page, proofs and tracker take it from here; docs/metrics.md says what they mean.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from typing import Any

from llmexp import features
from llmexp.config.keys import Key

_ALL = (
    Key("step", "optimizer steps so far"),
    Key("tokens_seen", "target tokens of all ranks so far", "tokens"),
    Key("epoch", "passes over the training sequences so far"),
    Key("train/loss", "mean loss per target token of this step, before its update",
        "train loss", better="lower", digits=5),
    Key("val/loss", "mean loss per target token of the validation data",
        "val loss", better="lower", digits=5),
    Key("val/ppl", "perplexity: exp of val/loss", "val ppl", better="lower"),
    Key("val/bits_per_byte", "bits per byte of the validation text, whatever the tokenizer",
        "val bits/byte", better="lower", digits=5, plot="Validation loss (bits per byte)"),
    Key("off_interval", "the evaluation came at a stop or at the end, and not by its interval"),
    Key("lr", "learning rate that this step used", plot="Learning rate"),
    Key("grad_norm", "L2 norm of the whole gradient, before clipping",
        plot="Gradient norm before clipping"),
    Key("grad_norm_post_clip", "L2 norm of the whole gradient, after clipping"),
    Key("clip_fraction", "1 where this step's update was clipped, else 0"),
    Key("clip_coefficient", "factor of clipping by norm on this step's gradient",
        plot="Clip coefficient"),
    Key("loss_scale", "loss scale that this step used, in fp16"),
    Key("skipped", "whether this step made no update"),
    Key("skipped_steps", "steps so far that made no update", "skipped steps", better="lower"),
    Key("target_tokens", "valid targets of this step"),
    Key("real_batch_size", "sequences of this step, all ranks; with batch.ramp",
        plot="Sequences per step"),
    Key("step_time", "mean seconds per step since the last row",
        unit="s", better="lower", digits=3, timing=True),
    Key("data_time", "part of step_time that was spent waiting for data",
        unit="s", better="lower", timing=True),
    Key("overhead_share", "share of the time since the last row that lies outside steps",
        better="lower", digits=3, timing=True),
    Key("tokens_per_sec", "tokens computed per second of step_time, of all ranks",
        "tokens/s", better="higher", timing=True, plot="Tokens per second, all ranks"),
    Key("tokens_per_sec_per_rank", "tokens_per_sec divided by the ranks",
        better="higher", timing=True),
    Key("tflops_per_sec_per_rank", "10^12 FLOPs per second and rank", better="higher", timing=True),
    Key("mfu", "model FLOPs utilization: share of the device's peak rate",
        better="higher", timing=True),
    Key("peak_memory_gib", "most memory of a rank so far: allocated on a GPU, resident on a CPU",
        "memory", "GiB", "lower", digits=3, timing=True),
    Key("amp", "1 where the step ran under autocast"),
    Key("eta", "seconds of training to go at this rate", unit="s", timing=True),
    *itertools.chain(*features.offered("config", "KEYS")),
)  # fmt: skip
ROW_KEYS = {key.name: key for key in _ALL}
TIMINGS = tuple(key.name for key in _ALL if key.timing)
# Of a checkpoint, beside the model that was trained. Each is named as a validation set is: of it,
# too, there is a loss apart.
OTHER_WEIGHTS: dict[str, tuple[str, str]] = features.merged("config", "WEIGHTS")
SCORES = "task/"  # begins the figures of tasks
# Those whose last values end a run's summary, before those of named validation sets and tasks.
LOSSES = ("train/loss", "val/loss", "val/ppl", "val/bits_per_byte")


def is_of_named_set(key: str) -> bool:
    """Tell whether a key is that of a loss on a named validation set: val/NAME/loss."""
    return key.count("/") == 2 and key.startswith("val/")


def is_of_weights(key: str) -> bool:
    """Tell whether a key is that of a loss of other weights than the model's."""
    return is_of_named_set(key) and key.split("/")[1] in OTHER_WEIGHTS


def is_score(key: str) -> bool:
    """Tell whether a key is that of a score, the share of the items that are right: task/NAME/acc.

    That is also one by the length of the answers: task/NAME/acc_norm."""
    return re.fullmatch(SCORES + r"[\w-]+/acc(_norm)?", key) is not None


def is_accuracy(key: str) -> bool:
    """Tell whether a key is that of the score of a task: task/NAME/acc."""
    return key.startswith(SCORES) and key.endswith("/acc")


def figures_in(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the keys of losses and scores that occur in the rows.

    They are LOSSES, losses on named validation sets, and scores of tasks.
    """
    known = dict.fromkeys(key for row in rows for key in row)
    return [*LOSSES, *filter(is_of_named_set, known), *filter(is_accuracy, known)]


def title_of(key: str) -> str:
    """Return the short name of a key, or of that of a named set: val code loss."""
    if is_of_named_set(key):
        val, name, what = key.split("/")
        return ROW_KEYS[f"{val}/{what}"].label.replace(val, f"{val} {name}")
    return ROW_KEYS[key].label
