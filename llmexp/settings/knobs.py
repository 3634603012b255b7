"""Effects of knobs: where each acts and what it changes. All lists of keys come from here. Standard
library only.

Resuming, telling the points of a sweep apart, comparing and refusing ask here. A knob that would
change nothing in the chosen option is refused when it is set; left at its default it is no part of
what tells two runs apart.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from llmexp.settings.config import OPEN_SECTIONS, Config
from llmexp.settings.values import NO_DEFAULT, Knob, knobs_of

RANKS = ("ddp", "fsdp", "hsdp", "tp", "fsdp_tp")


@dataclass(frozen=True)
class Acts:
    """A knob acts where one of `keys` has one of `values`; without values, where one of them is on:
    not null, 0, false.

    Of an open section this holds for our own functions.
    """

    keys: tuple[str, ...]
    values: tuple[Any, ...] = ()

    def holds(self, flat: Mapping[str, Any]) -> bool:
        there = [flat[key] for key in self.keys if key in flat]
        if self.values:
            return not there or any(value in self.values for value in there)
        return not there or any(there)

    def why(self, flat: Mapping[str, Any]) -> tuple[str, str]:
        """Return (why the knob does nothing, what else could be done)."""
        key = " or ".join(self.keys)
        if not self.values:
            return f"does nothing without {key}", f"give {key} too"
        if self.values == (None,):
            return f"does nothing beside {key}={flat[key]}", f"leave {key} out"
        section, _, name = key.rpartition(".")
        shown = section if name == "kind" else key  # an option of the group, named as its kind
        return (
            f"does nothing with {shown}={flat[key]}",
            f"choose {shown}={' or '.join(map(str, self.values))}",
        )


def _where(key: str, *values: Any) -> Acts:
    return Acts((key,), values)


ACTS = {
    "model.init_grow": Acts(("model.init_from",)),
    "model.residual": _where("precision.kind", "auto", "bf16", "fp16"),
    "fork.step": Acts(("fork.run",)),
    "fork.moments": Acts(("fork.run",)),
    "batch.memory_gib": _where("batch.micro_batch_size", "auto"),
    "train.tail": Acts(("train.max_epochs", "train.max_tokens")),  # steps are whole
    "train.sample_every": Acts(("train.sample_tokens",)),
    "train.tasks_every": Acts(("train.tasks",)),
    "train.tasks_folder": Acts(("train.tasks",)),
    "train.profile_steps": Acts(("train.profile_start",)),
    "metrics.outlier_window": Acts(("metrics.outlier_sigma",)),
    "metrics.skip_outliers": Acts(("metrics.outlier_sigma",)),
    "data.val_ratio": _where("data.val_files", None),
    "data.seed": _where("data.val_files", None),
    "optimizer.nesterov": Acts(("optimizer.momentum",)),
    "optimizer.reference_batch": _where("optimizer.lr_rule", "linear", "sqrt"),
    "schedule.warmup_ratio": _where("schedule.warmup_steps", None),
    "schedule.decay_ratio": _where("schedule.decay_steps", None),
    "schedule.end_ratio": Acts(("schedule.decay_ratio",)),
    "clip.max_norm": _where("clip.kind", "norm"),
    "clip.max_value": _where("clip.kind", "value"),
    "precision.init_scale": _where("precision.kind", "fp16"),
    "precision.growth_interval": _where("precision.kind", "fp16"),
    "parallelism.tensor_parallel_size": _where("parallelism.kind", "tp", "fsdp_tp"),
    "parallelism.replicate_size": _where("parallelism.kind", "hsdp"),
    "parallelism.fsdp_communication": _where("parallelism.kind", "fsdp", "hsdp", "fsdp_tp"),
    "parallelism.backend": _where("parallelism.kind", *RANKS),
    "parallelism.start_timeout_s": _where("parallelism.kind", *RANKS),
    "parallelism.timeout_s": _where("parallelism.kind", *RANKS),
    "parallelism.max_restarts": _where("parallelism.kind", *RANKS),
    "tracker.mode": _where("tracker.kind", "wandb"),
    "tracker.start_timeout_s": _where("tracker.kind", "wandb"),
    "tracker.finish_timeout_s": Acts(
        ("tracker.kind",), ("wandb", "tensorboard", "trackio", "mlflow")
    ),
}


# Knobs of the open sections that change no result, whatever the function; and the values of keys
# that a config does not list, such as that of an older run.
OPEN_AFFECTS = {
    "data.cache_dir": "nothing",
    "data.max_epochs": "nothing",
    "data.on_bad_record": "nothing",
    "tokenizer.download_timeout_s": "nothing",
}
OPEN_DEFAULTS = {
    "optimizer.lr_rule": "none",
    "optimizer.reference_batch": None,
    "model.init_from": None,
    "model.init_grow": False,
    "model.residual": "full",
    "model.gelu": "tanh",
}


@functools.cache
def fields() -> dict[str, Knob]:
    """Return the knobs of the closed sections, by their dotted keys."""
    found = dict(knobs_of(Config))
    for name, section in typing.get_type_hints(Config).items():
        if dataclasses.is_dataclass(section):
            usual = getattr(section, "AFFECTS", "")
            for key, knob in knobs_of(typing.cast(type, section)).items():
                found[f"{name}.{key}"] = dataclasses.replace(knob, affects=knob.affects or usual)
    return found


def affects(key: str) -> str:
    """Return what another value of the key changes: the `result`, its `rounding`, or `nothing`.
    Unknown keys: the result."""
    if key in fields():
        return fields()[key].affects or "result"
    return OPEN_AFFECTS.get(key, "result")


# A knob that changes a result only where this holds, and in words; elsewhere it is recorded, or
# checked as a limit.
_SKIPPING = (
    lambda flat: bool(flat.get("metrics.skip_outliers")),
    "with metrics.skip_outliers; else a figure in the rows",
)
SOMETIMES: dict[str, tuple[Callable[[Mapping[str, Any]], bool], str]] = {
    "metrics.outlier_sigma": _SKIPPING,
    "metrics.outlier_window": _SKIPPING,
    "model.max_position_embeddings": (
        lambda flat: flat.get("model._target_") != "llmexp.models.llama.Llama",
        "where the model has a table of positions; for Llama it is a limit that is checked",
    ),
}


@functools.cache
def defaults() -> Mapping[str, Any]:
    """Return the values of the knobs that a config need not list, by their dotted keys."""
    closed = {key: knob.default for key, knob in fields().items()}
    given = {key: value for key, value in closed.items() if value not in (NO_DEFAULT, {})}
    return given | OPEN_DEFAULTS


def default_of(key: str) -> Any:
    """Return the value of a knob that a config does not list; None for one without a default."""
    return defaults().get(key)


def differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the keys in which two flat configs differ, in order. A key that one of them does not
    have yet has its default there."""
    return [
        key
        for key in sorted(old.keys() | new.keys())
        if old.get(key, default_of(key)) != new.get(key, default_of(key))
    ]


def is_record(key: str) -> bool:
    """Return whether the key names, records or times a run and changes no bit of its result."""
    return affects(key) == "nothing"


def may_change(key: str) -> bool:
    """Return whether a resumed run may have another value. What hooks do, and read in the
    section user, is up to the user; a twin is one from its start."""
    return key.partition(".")[0] in ("hooks", "user") or (
        affects(key) != "result" and key != "train.twin"
    )


def dead(flat: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return the knobs of a flat config that do nothing beside its other values: (why, what else
    could be done)."""
    found = {}
    for key, acts in ACTS.items():
        section = key.partition(".")[0]
        own = section not in OPEN_SECTIONS or str(flat.get(f"{section}._target_")).startswith(
            "llmexp."
        )
        if key in flat and own and not acts.holds(flat):
            found[key] = acts.why(flat)
    return found


def _unlimited(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return what clipping without a limit amounts to: no clipping."""
    kind = flat.get("clip.kind")
    return (
        {"clip.kind": "none"} if kind != "none" and flat.get(f"clip.max_{kind}", 0) is None else {}
    )


def _unscaled(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a rule for the rate amounts to where the real batch is its reference: no rule."""
    real, reference = flat.get("batch.real_batch_size"), flat.get("optimizer.reference_batch")
    rule = flat.get("optimizer.lr_rule", "none") != "none"
    return {"optimizer.lr_rule": "none"} if rule and real is not None and real == reference else {}


def essence(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a flat config can change a bit of the result, beside its other values. Equal
    ones make equal runs.

    A knob that the config does not list, such as that of an older run, has its default.
    """
    flat = {**defaults(), **flat}
    flat = {**flat, **_unlimited(flat), **_unscaled(flat)}
    without = {*dead(flat), *(key for key, (holds, _) in SOMETIMES.items() if not holds(flat))}
    if not flat.get("hooks"):  # only hooks read the section user
        without |= {key for key in flat if key.startswith("user.")}
    return {key: value for key, value in flat.items() if key not in without and not is_record(key)}
