"""The typed configuration: closed sections as frozen dataclasses, one documented knob per field.

A field is the only place that says what a knob means, its unit, its range, what another value
changes and where it acts; --help, `llmexp explain`, the comments in conf/ and the lists of keys in
`knobs` follow. The knobs of open sections are declared in the same way (`parts`). Values live in
conf/ (every knob is listed there). `convert` makes these classes from plain values. Standard
library only.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from llmexp import features
from llmexp.config import forms
from llmexp.config.clipping import ClipRule
from llmexp.config.execution import Checkpoint, Parallelism, Precision, Tracker
from llmexp.config.values import Plain, Where, choice, count, knob, optional, where


@dataclass(frozen=True, kw_only=True)
class Batch:
    micro_batch_size: int | str | None = count(
        "sequences in one forward/backward on one rank; null: solved, or 8; auto: the largest that "
        "fits, found by trying before the run starts",
        8,
        auto=True,
        affects="rounding",
    )
    gradient_accumulation_steps: int | None = count(
        "micro-batches per rank per optimizer step; null: solved, or 1", 4, affects="rounding"
    )
    real_batch_size: int | None = count(
        "sequences per optimizer step over all ranks; null: the product", 32
    )
    tokens_per_step: int | None = count(
        "tokens per optimizer step over all ranks, in place of real_batch_size; null: the product",
        4096,
        default=None,
    )
    ramp: str | None = optional(
        "sequences per optimizer step from so many tokens on, such as {0: 32, 1e6: 64}; the "
        "accumulation of each stage follows; null: real_batch_size throughout",
        "{0:32,1e6:64}",
        form=forms.ramp,
    )
    sequence_length: int = count("tokens per sequence", 128)
    memory_gib: float | None = optional(
        "GiB of a rank for auto; null: nine tenths",
        16.0,
        above=0,
        affects="rounding",
        acts=where("batch.micro_batch_size", "auto"),
    )
    document_mask: bool = knob("keep attention and targets inside documents", True, default=False)


@dataclass(frozen=True, kw_only=True)
class CoreTrain:
    max_steps: int | None = count("budget in optimizer steps; give one budget", 300)
    max_epochs: float | None = knob(
        "budget in passes over the training sequences, fractions allowed", 1.5, above=0
    )
    max_tokens: int | None = count("budget in tokens", 1_000_000)
    max_flops: float | None = optional(
        "budget in floating-point operations, as the model counts them for a token",
        1e14,
        above=0,
    )
    tokens_per_parameter: float | None = optional(
        "budget in tokens for each parameter of the model, its head with them, tables of "
        "embeddings without",
        20.0,
        above=0,
    )
    tail: str = choice(
        "what happens to a last batch that the data do not fill",
        "keep | drop",
        acts=Where(  # steps are whole
            (
                "train.max_epochs",
                "train.max_tokens",
                "train.max_flops",
                "train.tokens_per_parameter",
            )
        ),
        default="keep",
    )
    seed: int = knob(
        "seed of initialisation, order and dropout", 1234, at_least=0, at_most=2**63 - 1
    )
    twin: int = knob(
        "number of a twin: the same run but for the last bits of its initial weights, to measure "
        "what rounding makes; 0: none",
        1,
        at_least=0,
        affects="rounding",
        default=0,
    )
    device: str = choice("where to compute", "auto | cpu | cuda", affects="rounding")
    log_every: int = count("optimizer steps between rows", 10, affects="nothing")
    eval_every: int | None = count(
        "optimizer steps between evaluations; null: only at the end", 50, affects="nothing"
    )
    eval_every_tokens: int | None = count(
        "tokens between evaluations, in place of eval_every", 65536, affects="nothing", default=None
    )
    eval_tokens: int | None = count("validation tokens per evaluation; null: all of them", 65536)
    compile: bool | str = knob(
        "compile the model with torch.compile; auto: on CUDA with Triton and a C compiler",
        True,
        auto=True,
        affects="rounding",
    )
    deterministic: bool = knob(
        "only deterministic algorithms, for bit-equal runs on CUDA; slower there",
        affects="rounding",
        default=False,
    )
    max_consecutive_skips: int = knob(
        "stop after more skipped updates in a row than this; outliers alone stop no run",
        50,
        at_least=0,
        affects="nothing",
    )
    stop_step: int | None = count(
        "save and stop after this optimizer step; null: never", 100, affects="nothing", a_step=True
    )


CLIP_RULES: dict[str, ClipRule] = {
    "norm": ClipRule(limit="max_norm", max_norm=True),
    **features.merged("config", "CLIP_RULES"),
    "none": ClipRule(),
}


@dataclass(frozen=True, kw_only=True)
class CoreClip:
    kind: str = choice(
        "how gradients are clipped, once per optimizer step, after unscaling",
        " | ".join(CLIP_RULES),
    )
    max_norm: float | None = optional(
        "limit of the global gradient norm; beside zscore and quantile an upper bound; null: none",
        1.0,
        above=0,
        acts=where("clip.kind", *(name for name, rule in CLIP_RULES.items() if rule.max_norm)),
    )


@dataclass(frozen=True, kw_only=True)
class CoreMetrics:
    """Have no knobs but those of features."""


def _with_features(section: str, core: type) -> type:
    """Return a section with the knobs of the features that join it."""
    joining = [part for part in features.parts("config") if section == part.SECTION]
    bases = (*(part.Knobs for part in reversed(joining) if hasattr(part, "Knobs")), core)
    return dataclasses.make_dataclass(section, [], bases=bases, frozen=True, kw_only=True)


if TYPE_CHECKING:
    Train = CoreTrain
    Clip = CoreClip
    Metrics = CoreMetrics
else:
    Train, Metrics = _with_features("train", CoreTrain), _with_features("metrics", CoreMetrics)
    Clip = _with_features("clip", CoreClip)


@dataclass(frozen=True, kw_only=True)
class Fork:
    run: str | None = optional("parent, RUN or RUN@STEP; null: none", "outputs/trunk")
    step: int | None = optional(
        "step of the parent's checkpoint; null: the newest",
        4000,
        at_least=0,
        acts=where("fork.run"),
    )
    reset_optimizer: bool = knob(
        "begin with fresh moments in place of the parent's",
        True,
        acts=where("fork.run"),
        default=False,
    )


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything a run depends on. An open section (a dict) names a function in `_target_`."""

    name: str = knob("first part of outputs/<name>/<stamp>", "default", affects="nothing")
    batch: Batch
    train: Train
    metrics: Metrics
    model: Plain
    data: Plain
    tokenizer: Plain
    optimizer: Plain
    schedule: Plain
    clip: Clip
    precision: Precision
    parallelism: Parallelism
    tracker: Tracker
    checkpoint: Checkpoint
    fork: Fork
    hooks: list[Any] = knob(
        "your own functions, called at the events of a step",
        "[mymodel.watch]",
        form=forms.hooks,
    )
    user: Plain = knob("keys of your own, for hooks and experiments", "{}", default={})


_T = TypeVar("_T")


def knobs_of(config: Config, kind: type[_T]) -> _T:
    """Return the section of which the knobs of a feature are a part."""
    return next(section for section in vars(config).values() if isinstance(section, kind))


# They may name variables.
OPEN_SECTIONS = ("model", "data", "tokenizer", "optimizer", "schedule", "hooks", "user")
FOLDER_NAME = re.compile(r"[^/\x00-\x1f\x7f.-][^/\x00-\x1f\x7f]{0,79}")


def conf_dir() -> Path:
    """Return conf/ of the source tree, or the copy inside an installed wheel."""
    package = Path(__file__).resolve().parents[1]
    return package / "conf" if (package / "conf").is_dir() else package.parent / "conf"


def plain(config: Config) -> Plain:
    """Return the nested mapping that `convert.build` takes, for files and pipes."""
    return dataclasses.asdict(
        config, dict_factory=lambda pairs: {k.removesuffix("_"): v for k, v in pairs}
    )
