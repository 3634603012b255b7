"""The closed sections that say how a run is executed and recorded.

Of these the arithmetic alone changes a result. See `config` for the others. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from llmexp.config.values import choice, count, knob, optional, time_limit, usual, where

_RANKS = where("parallelism.kind", "ddp", "fsdp", "hsdp", "tp", "fsdp_tp")  # several


@dataclass(frozen=True, kw_only=True)
class Precision:
    kind: str = choice(
        "arithmetic of the forward and backward pass; auto: bf16 where the device computes it, "
        "else fp32",
        "auto | fp32 | tf32 | bf16 | fp16 | fp64",
    )
    init_scale: float = usual(
        "first loss scale",
        65536.0,
        at_least=1,
        at_most=1e38,
        acts=where("precision.kind", "fp16"),
    )
    growth_interval: int = count(
        "optimizer steps in a row without an overflow before the loss scale doubles",
        2000,
        acts=where("precision.kind", "fp16"),
        default=2000,
    )


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    AFFECTS: ClassVar[str] = "rounding"
    kind: str = choice("how ranks share the work", "single | ddp | fsdp | hsdp | tp | fsdp_tp")
    nproc_per_node: int | None = count(
        "ranks on each host; null: every CUDA device, or 1 on a CPU", 2
    )
    nnodes: int = count("hosts", 2)
    tensor_parallel_size: int | None = count(
        "ranks that share each layer; null: all (tp), all of a host (fsdp_tp)",
        2,
        acts=where("parallelism.kind", "tp", "fsdp_tp"),
        default=None,
    )
    sequence_parallel: bool = knob(
        "these ranks also share the tokens between products: norms, dropout and what a block keeps",
        True,
        acts=where("parallelism.kind", "tp", "fsdp_tp"),
        default=False,
    )
    replicate_size: int | None = count(
        "copies of the sharded model; null: one a host",
        2,
        acts=where("parallelism.kind", "hsdp"),
        default=None,
    )
    fsdp_communication: str = choice(
        "how often a step gathers parameters and reduces gradients",
        "every_micro_batch | once",
        acts=where("parallelism.kind", "fsdp", "hsdp", "fsdp_tp"),
        default="every_micro_batch",
    )
    activation_checkpointing: str = choice(
        "what the backward pass computes again instead of keeping it; offload: nothing, what it "
        "needs waits in the host's memory (CUDA)",
        "none | full | selective | offload",
    )
    backend: str | None = choice(
        "what ranks talk through; null: nccl on CUDA, gloo on a CPU",
        "nccl | gloo",
        acts=_RANKS,
        default=None,
    )
    start_timeout_s: float = time_limit(
        "that the hosts and ranks have to come together", 600.0, affects="nothing", acts=_RANKS
    )
    timeout_s: float = time_limit(
        "that a rank waits for the others in a step before it gives up",
        600.0,
        affects="nothing",
        acts=_RANKS,
    )
    max_restarts: int = knob(
        "times that a group which lost a rank starts again from its newest checkpoint",
        3,
        at_least=0,
        affects="nothing",
        acts=_RANKS,
        default=0,
    )


@dataclass(frozen=True, kw_only=True)
class Tracker:
    AFFECTS: ClassVar[str] = "nothing"
    kind: str = choice("mirror of the rows", "wandb | tensorboard | trackio | mlflow | none")
    also: list[str] = knob("trackers besides that one", ["tensorboard"], default=[])
    project: str | None = knob("wandb project; null: $WANDB_PROJECT, else llmexp", "my-project")
    entity: str | None = optional(
        "wandb user or team; null: $WANDB_ENTITY, else that of the login", "my-team"
    )
    name: str | None = knob(
        "name of the run; null: $WANDB_NAME, else made from the overrides; a run of a sweep adds "
        "its label",
        "my-run",
    )
    group: str | None = knob(
        "group of the run; null: $WANDB_RUN_GROUP, else the sweep's folder", "my-group"
    )
    tags: list[str] = knob("tags, cut at 64 characters; []: those of $WANDB_TAGS", ["baseline"])
    notes: str | None = knob("free text; null: $WANDB_NOTES", "first try")
    mode: str = choice(
        "how to send; auto: $WANDB_MODE, else online when a login is there (WANDB_API_KEY or "
        "netrc), else only by llmexp sync",
        "auto | online | offline",
        acts=where("tracker.kind", "wandb"),
        default="auto",
    )
    start_timeout_s: float = time_limit(
        "for wandb to start before the run continues offline",
        10.0,
        acts=where("tracker.kind", "wandb"),
    )
    finish_timeout_s: float = time_limit(
        "that the end of a run waits for the last upload",
        15.0,
        acts=where("tracker.kind", "wandb", "tensorboard", "trackio", "mlflow"),
    )


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    AFFECTS: ClassVar[str] = "nothing"
    every: int | None = count(
        "optimizer steps between checkpoints; null: by time, or only at the end", 100
    )
    every_minutes: float | None = optional(
        "minutes after the last checkpoint until the next one, after the step that is under way; "
        "null: by steps only",
        30.0,
        above=0,
    )
    async_: bool | str = knob(
        "write in the background, after copying the state to host memory; auto: on CUDA",
        True,
        auto=True,
    )
    keep: int | None = knob("checkpoints kept, the newest ones; null: all", 2, at_least=2)
    keep_every: int | None = count("steps between checkpoints that stay", 1000, default=None)
    resume: str = choice("what to do with a folder that holds a run", "auto | never | must")
    save_initial: bool = knob("also save step 0, before any update")
    last: bool = knob(
        "save at the end of the run; false: what a finished run leaves is its rows, and the "
        "checkpoints of its intervals",
        default=True,
    )
    max_failures: int = knob(
        "saves in a row that may fail, with a warning, before the run stops; the last one may not",
        3,
        at_least=0,
    )
