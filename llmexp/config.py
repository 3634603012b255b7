"""The typed configuration: closed sections as frozen dataclasses, one line of documentation per
field.

Values live in conf/ (every knob is listed there), never here. `build` turns the mapping that Hydra
composed, or that a run's config.yaml holds, into a `Config`; it is strict about keys and types and
explains what it refuses. This file imports the standard library and `values` only.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from llmexp.values import NAMED, VARIABLE, ConfigError, fill, hint, nearest, refuse


def knob(
    doc: str,
    example: Any,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    above: float | None = None,
    choices: tuple[str, ...] | None = None,
    affects: str | None = None,
    default: Any = dataclasses.MISSING,
) -> Any:
    """Return a documented field: `doc` with its unit, a valid `example`, and the range that is
    checked.

    `affects` says what another value changes: the `result`, its last digits (`rounding`), or
    `nothing` but names, records and time. It is the only place that says so; default: that of the
    section, else `result`. `default` is the value of a knob that some options do not list, because
    it does nothing there (`knobs.ACTS`), or that the config of an older run does not have yet.
    """
    metadata = dict(locals())
    if default == {}:
        return dataclasses.field(default_factory=dict, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Batch:
    micro_batch_size: int | None = knob(
        "sequences in one forward/backward on one rank", 8, at_least=1, affects="rounding"
    )
    gradient_accumulation_steps: int | None = knob(
        "micro-batches per rank per optimizer step", 4, at_least=1, affects="rounding"
    )
    real_batch_size: int | None = knob(
        "sequences per optimizer step over all ranks", 32, at_least=1
    )
    sequence_length: int = knob("tokens per sequence", 128, at_least=1)


@dataclass(frozen=True, kw_only=True)
class Train:
    max_steps: int | None = knob("budget in optimizer steps (give one budget)", 300, at_least=1)
    max_epochs: float | None = knob("budget in passes over the training sequences", 1.5, above=0)
    max_tokens: int | None = knob("budget in target tokens", 1_000_000, at_least=1)
    tail: str = knob(
        "what happens to a last window that the data do not fill",
        "keep",
        choices=("keep", "drop"),
        default="keep",
    )
    seed: int = knob(
        "seed of initialisation, order and dropout", 1234, at_least=0, at_most=2**63 - 1
    )
    twin: int = knob(
        "number of a twin, which differs in the last bits of its initial weights; 0: none",
        1,
        at_least=0,
        affects="rounding",
        default=0,
    )
    device: str = knob(
        "where to compute", "auto", choices=("auto", "cpu", "cuda"), affects="rounding"
    )
    log_every: int = knob("optimizer steps between rows", 10, at_least=1, affects="nothing")
    eval_every: int | None = knob(
        "optimizer steps between evaluations; null: only at the end",
        50,
        at_least=1,
        affects="nothing",
    )
    eval_tokens: int | None = knob(
        "validation tokens per evaluation; null: all of them", 65536, at_least=1
    )
    sample_every: int | None = knob(
        "optimizer steps between text samples; null: only at the end",
        100,
        at_least=1,
        affects="nothing",
        default=None,
    )
    sample_tokens: int = knob(
        "tokens per text sample; 0: no sample", 120, at_least=0, affects="nothing"
    )
    compile: bool = knob("compile the model with torch.compile", True, affects="rounding")
    data_digest: bool = knob(
        "put a digest of each window's tokens into its row", True, affects="nothing"
    )
    max_consecutive_skips: int = knob(
        "stop after more skipped updates in a row than this", 50, at_least=0, affects="nothing"
    )
    stop_step: int | None = knob(
        "save and stop after this step, as a signal does; null: never",
        100,
        at_least=1,
        affects="nothing",
    )
    profile_start: int | None = knob(
        "first step of a torch.profiler trace; null: no trace", 10, at_least=1, affects="nothing"
    )
    profile_steps: int = knob("steps in the trace", 3, at_least=1, affects="nothing", default=3)


@dataclass(frozen=True, kw_only=True)
class Metrics:
    noise_scale_every: int | None = knob(
        "optimizer steps between measurements of the gradient noise scale; null: never",
        10,
        at_least=1,
        affects="nothing",
    )
    outlier_sigma: float | None = knob(
        "an outlier's loss or norm is this many standard deviations off its trailing window; null: "
        "no check",
        6.0,
        above=0,
    )
    outlier_window: int = knob("steps in the trailing window", 128, at_least=8, default=128)
    skip_outliers: bool = knob("skip the update of an outlier step", True, default=False)
    single_rank_rates: str | None = knob(
        "folder of a throughput grid with the rate of one rank, for scaling_efficiency in the "
        "rows; null: none",
        "outputs/throughput_grid/2030-01-01_12-00-00",
        affects="nothing",
        default=None,
    )
    picture: bool = knob(
        "draw the curves into loss.png at the end of the run", False, affects="nothing"
    )


@dataclass(frozen=True, kw_only=True)
class Clip:
    kind: str = knob(
        "how gradients are clipped, once per step", "norm", choices=("norm", "value", "none")
    )
    max_norm: float | None = knob(
        "limit of the global gradient norm; null: no limit", 1.0, above=0, default=None
    )
    max_value: float | None = knob(
        "limit of each gradient entry; null: no limit", 0.5, above=0, default=None
    )


@dataclass(frozen=True, kw_only=True)
class Precision:
    kind: str = knob(
        "arithmetic of the forward and backward pass",
        "bf16",
        choices=("auto", "fp32", "tf32", "bf16", "fp16", "fp64"),
    )
    init_scale: float = knob("first loss scale", 65536.0, above=0, default=65536.0)
    growth_interval: int = knob(
        "optimizer steps in a row without an overflow before the loss scale doubles",
        2000,
        at_least=1,
        default=2000,
    )


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    AFFECTS: ClassVar[str] = "rounding"
    kind: str = knob(
        "how ranks share the work",
        "ddp",
        choices=("single", "ddp", "fsdp", "hsdp", "tp", "fsdp_tp"),
    )
    nproc_per_node: int | None = knob(
        "ranks on each host; null: every CUDA device, or 1 on a CPU", 2, at_least=1
    )
    nnodes: int = knob("hosts", 2, at_least=1)
    tensor_parallel_size: int | None = knob(
        "ranks that share each layer; null: all (tp), all of a host (fsdp_tp)",
        2,
        at_least=1,
        default=None,
    )
    replicate_size: int | None = knob(
        "copies of the sharded model; null: one a host", 2, at_least=1, default=None
    )
    fsdp_communication: str = knob(
        "how often a step gathers parameters and reduces gradients",
        "every_micro_batch",
        choices=("every_micro_batch", "once"),
        default="every_micro_batch",
    )
    activation_checkpointing: str = knob(
        "what backward computes again instead of keeping it",
        "full",
        choices=("none", "full", "selective"),
    )
    backend: str | None = knob(
        "what ranks talk through; null: nccl on CUDA, gloo on a CPU",
        "gloo",
        choices=("nccl", "gloo"),
        default=None,
    )
    start_timeout_s: float = knob(
        "seconds that the hosts and ranks have to come together",
        600.0,
        above=0,
        at_most=1_000_000,
        affects="nothing",
        default=600.0,
    )
    timeout_s: float = knob(
        "seconds that a rank waits for the others in a step before it gives up",
        600.0,
        above=0,
        at_most=1_000_000,
        affects="nothing",
        default=600.0,
    )
    max_restarts: int = knob(
        "times that a group which lost a rank starts again from its checkpoint",
        3,
        at_least=0,
        affects="nothing",
        default=0,
    )


@dataclass(frozen=True, kw_only=True)
class Tracker:
    AFFECTS: ClassVar[str] = "nothing"
    kind: str = knob("where rows are mirrored to", "wandb", choices=("wandb", "none"))
    project: str | None = knob("wandb project; null: $WANDB_PROJECT, else llmexp", "my-project")
    entity: str | None = knob(
        "wandb user or team; null: $WANDB_ENTITY, else that of the login", "my-team", default=None
    )
    name: str | None = knob(
        "name of the run; null: $WANDB_NAME, else made from the overrides", "my-run"
    )
    group: str | None = knob(
        "group of the run; null: $WANDB_RUN_GROUP, else the sweep's folder", "my-group"
    )
    tags: list[str] = knob("tags, cut at 64 characters; []: those of $WANDB_TAGS", ["baseline"])
    notes: str | None = knob("free text; null: $WANDB_NOTES", "first try")
    mode: str = knob(
        "auto: online when a login is there",
        "offline",
        choices=("auto", "online", "offline"),
        default="auto",
    )
    start_timeout_s: float = knob(
        "seconds for the tracker to start before the run goes on offline",
        10.0,
        above=0,
        at_most=1_000_000,
        default=10.0,
    )
    finish_timeout_s: float = knob(
        "seconds for the tracker to finish", 15.0, above=0, at_most=1_000_000, default=15.0
    )


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    AFFECTS: ClassVar[str] = "nothing"
    every: int | None = knob(
        "optimizer steps between checkpoints; null: only at the end", 100, at_least=1
    )
    async_: bool = knob("write in the background, after copying the state to host memory", True)
    keep: int | None = knob("checkpoints kept, the newest ones; null: all", 2, at_least=2)
    resume: str = knob(
        "what to do with a folder that holds a run", "auto", choices=("auto", "never", "must")
    )
    save_initial: bool = knob("also save step 0, before any update", True)
    max_failures: int = knob(
        "saves in a row that may fail before the run stops; the last one may not", 3, at_least=0
    )


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything a run depends on. The open sections (dicts) name a function in `_target_` and its
    arguments."""

    name: str = knob(
        "first part of the run folder: outputs/<name>/<stamp>", "default", affects="nothing"
    )
    batch: Batch
    train: Train
    metrics: Metrics
    model: dict[str, Any]
    data: dict[str, Any]
    tokenizer: dict[str, Any]
    optimizer: dict[str, Any]
    schedule: dict[str, Any]
    clip: Clip
    precision: Precision
    parallelism: Parallelism
    tracker: Tracker
    checkpoint: Checkpoint
    hooks: list[Any] = knob(
        "your own functions, called at the events of a step (README)", "[mymodel.watch]"
    )
    user: dict[str, Any] = knob("keys of your own, for hooks and experiments", "{}", default={})


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """How the points of a sweep are run; no part of a run's own config."""

    resume: str | None = knob(
        "folder of a sweep to go on with; null: a new one", "outputs/default/2030-01-01_12-00-00"
    )
    max_parallel: int | None = knob(
        "points at the same time; null: one for each slot of devices, 1 on a CPU", 2, at_least=1
    )
    devices_per_run: int | None = knob(
        "CUDA devices of each point; null: what its ranks need", 1, at_least=1
    )
    on_infeasible: str = knob(
        "what a point that cannot run does", "skip", choices=("refuse", "skip")
    )
    max_retries: int = knob(
        "times that failed points are started again once the others are through", 1, at_least=0
    )
    stop_on_failure: bool = knob("start no further point after one has failed", True)
    silence_s: float | None = knob(
        "seconds without a sign of life after which a point is ended; null: never", 1800.0, above=0
    )
    halving: float | None = knob(
        "successive halving: share of its steps that each point gets at first; null: all",
        0.125,
        above=0,
        at_most=1,
    )
    halving_keep: float = knob(
        "share of the points that goes on after each rung", 0.5, above=0, at_most=1, default=0.5
    )
    twins: int = knob(
        "times that the leading setting is trained once more at the end, different in rounding "
        "only",
        2,
        at_least=0,
    )
    negligible: float = knob(
        "nats of loss below which a difference is called negligible", 0.002, at_least=0
    )
    report: str = knob("table at the end", "throughput", choices=("runs", "throughput"))


OPEN_SECTIONS = (
    "model",
    "data",
    "tokenizer",
    "optimizer",
    "schedule",
    "hooks",
    "user",
)  # they may name variables
# What of an open section changes no result, whatever the function.
OPEN_AFFECTS = {"data.cache_dir": "nothing", "tokenizer.download_timeout_s": "nothing"}
# What an open section means by a key that it does not list, as the config of an older run.
OPEN_DEFAULTS = {"optimizer.lr_rule": "none", "optimizer.reference_batch": None}
MAX_VALUES = 10_000  # in a config; aliases make a short YAML file endless
FOLDER_NAME = re.compile(r"[^/\x00-\x1f\x7f.-][^/\x00-\x1f\x7f]{0,79}")


def conf_dir() -> Path:
    """conf/ of the source tree, or the copy inside an installed wheel."""
    package = Path(__file__).resolve().parent
    return package / "conf" if (package / "conf").is_dir() else package.parent / "conf"


def build(mapping: Mapping[str, Any]) -> Config:
    """Return a `Config` from a plain mapping. Raises ConfigError for unknown or missing keys, types
    and ranges.

    Texts keep their variables of the environment; numbers, switches and choices take their values.
    """
    _look_through(mapping)
    return _build(Config, mapping, "")


def _look_through(mapping: Mapping[str, Any]) -> None:
    """Remembers the variables that a config names. Raises ConfigError for one without an end, and
    for numbers that are not finite, which no JSON file holds."""
    waiting: list[tuple[Any, int, str]] = [(mapping, 0, "")]
    seen = 0
    while waiting:
        node, depth, key = waiting.pop()
        if isinstance(node, str):
            NAMED.update(VARIABLE.findall(node))
        if isinstance(node, float) and not math.isfinite(node):
            raise refuse(key, node, "a finite number is needed")
        named = (
            node.items()
            if isinstance(node, Mapping)
            else enumerate(node)
            if isinstance(node, list)
            else ()
        )
        children = [
            (child, depth + 1, f"{key}.{name}" if key else str(name)) for name, child in named
        ]
        seen += len(children)
        if seen > MAX_VALUES or depth > 50:
            raise ConfigError(
                f"this config has more than {MAX_VALUES:,} values, or nests deeper than 50 sections"
            )
        waiting += children


def plain(config: Config) -> dict[str, Any]:
    """Return the nested mapping that `build` takes, for files and pipes."""
    return dataclasses.asdict(
        config, dict_factory=lambda pairs: {k.removesuffix("_"): v for k, v in pairs}
    )


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= (
            flatten(value, f"{prefix}{key}.")
            if isinstance(value, Mapping)
            else {f"{prefix}{key}": value}
        )
    return flat


def key_of(field: dataclasses.Field) -> str:
    """Return a field's name in files and on the command line."""
    return field.name.removesuffix("_")  # `async` is a word of Python's


def build_sweep(mapping: Mapping[str, Any]) -> Sweep:
    """Return the `sweep` section. Raises ConfigError."""
    return typing.cast(Sweep, _build(Sweep, mapping, "sweep."))


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _build(cls: type, mapping: Any, prefix: str) -> Any:
    if not isinstance(mapping, Mapping):
        raise refuse(
            prefix.rstrip("."), mapping, "a section of keys is needed here, not a plain value"
        )
    hints = _hints(cls)
    fields = {key_of(f): f for f in dataclasses.fields(cls)}
    for key in mapping:
        if key not in fields:
            own = f" A key of your own goes into the section user: +user.{key}=..."
            near = nearest(str(key), fields)
            tail = f"{near}{own}" if near else f"{own}{hint(str(key), fields)}"
            raise ConfigError(f"{prefix}{key}: there is no such key.{tail}")
    values = {}
    for name, f in fields.items():
        if name not in mapping and (f.default, f.default_factory) != (
            dataclasses.MISSING,
            dataclasses.MISSING,
        ):
            continue
        if name not in mapping:
            raise ConfigError(
                f"{prefix}{name}: this key is missing ({f.metadata.get('doc', 'a section')})"
            )
        values[f.name] = _convert(hints[f.name], mapping[name], prefix + name, f.metadata)
    return cls(**values)


def _convert(hint: Any, value: Any, key: str, meta: Mapping[str, Any]) -> Any:
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast(type, hint), value, key + ".")
    if typing.get_origin(hint) is dict:
        if not isinstance(value, Mapping):
            text = "a section of keys is needed here"
            raise refuse(
                key, value, text if key == "user" else f"{text}, with `_target_` naming a function"
            )
        return dict(value)
    example = meta.get("example")
    if key == "hooks":
        if not isinstance(value, (list, tuple)) or not all(
            isinstance(v, (str, Mapping)) for v in value
        ):
            text = "a list of names of functions, or of sections with their arguments, is needed"
            raise refuse(key, value, text, "[mymodel.watch,{_target_:mymodel.count,every:10}]")
        return [dict(v) if isinstance(v, Mapping) else v for v in value]
    takes_text = not meta["choices"] and str in (hint, *typing.get_args(hint))
    if not takes_text and isinstance(value, str) and VARIABLE.search(value):
        found = fill(value, key)
        try:
            return _convert(hint, found, key, meta)
        except ConfigError:  # says what was found
            raise refuse(
                key, value, f"what the environment holds does not fit ({meta['doc']})", example
            ) from None
    if typing.get_origin(hint) is types.UnionType:
        if value is None:
            return None
        hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
    if typing.get_origin(hint) is list:
        if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
            raise refuse(key, value, "a list of texts is needed", "[one,two]")
        return list(value)
    value = _scalar(hint, value, key, example)
    choices, low, above = meta["choices"], meta["at_least"], meta["above"]
    if choices and value not in choices:
        hint_text = nearest(str(value), choices)
        raise refuse(key, value, f"must be one of {', '.join(choices)}.{hint_text}")
    if low is not None and value < low:
        raise refuse(key, value, f"must be at least {low:g} ({meta['doc']})", example)
    if meta["at_most"] is not None and value > meta["at_most"]:
        raise refuse(key, value, f"must be at most {meta['at_most']} ({meta['doc']})", example)
    if above is not None and not value > above:
        raise refuse(key, value, f"must be above {above:g} ({meta['doc']})", example)
    return value


def _scalar(kind: type, value: Any, key: str, example: Any) -> Any:
    """Return `value` as `kind`, without guessing: 2.5 is no int, "1e-3x" no float, False no
    text."""
    if kind is bool and not isinstance(value, bool):
        raise refuse(key, value, "true or false is needed", "true")
    if kind is str and not isinstance(value, str):
        yaml = (
            " (YAML reads off, no, on, yes without quotes as true or false)"
            if isinstance(value, bool)
            else ""
        )
        raise refuse(key, value, f"a text is needed, not {type(value).__name__}{yaml}", example)
    if kind is int:
        # 1e6 is meant as an int
        whole = isinstance(value, float) and math.isfinite(value) and value == int(value)
        if isinstance(value, bool) or not (isinstance(value, int) or whole):
            raise refuse(key, value, "a whole number is needed", example)
        return int(value)
    if kind is float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise refuse(key, value, "a number is needed", example)
        if not math.isfinite(value):
            raise refuse(key, value, "a finite number is needed", example)
        return float(value)
    return value
