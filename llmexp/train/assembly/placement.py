"""Choose where a run computes: device, ranks and arithmetic, checked against what is there."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from llmexp import mesh
from llmexp.config.kinds import Kind, kind_of_error
from llmexp.config.sections import Config
from llmexp.config.values import is_ours, refuse
from llmexp.models.loss import SummedLoss, blocks_of, is_shipped
from llmexp.optim import precision
from llmexp.optim.states import Traits
from llmexp.run.layout import Layout, check_split, check_tokens, solve_layout

# said of a run on a CPU
SAVES_NOTHING = (
    "parallelism.activation_checkpointing=offload saves nothing on a CPU: its memory is the host's"
)


@dataclass(frozen=True)
class Placement:
    """Hold where a run trains and how it computes there; `reason` says why in this precision."""

    device: torch.device
    layout: Layout
    precision: str
    reason: str
    compiled: bool
    compiled_because: str  # in words; empty where nobody asked and there is nothing to compile for


def placed(config: Config) -> Placement:
    """Return where a run computes.

    Raises ConfigError for what is not there, and for ranks that do not divide."""
    p, wanted, on_cuda = config.parallelism, config.train.device, torch.cuda.is_available()
    if wanted == "cuda" and not on_cuda:
        raise refuse("no_device", "train.device", wanted, "no CUDA device is visible", "cpu")
    device = torch.device("cuda" if on_cuda and wanted != "cpu" else "cpu")
    there = torch.cuda.device_count() if device.type == "cuda" else None
    ranks = p.nproc_per_node or (1 if p.kind == "single" else there) or 1
    if there is not None and ranks > there:
        text = f"there are {there} CUDA devices on this host"
        raise refuse("no_device", "parallelism.nproc_per_node", ranks, text, there)
    if p.backend == "nccl" and device.type != "cuda":
        text = f"needs CUDA devices; this run computes on {device.type}"
        raise refuse("no_device", "parallelism.backend", "nccl", text, "gloo")
    layout = solve_layout(p, ranks)
    if layout.nnodes == 1 and layout.world_size > 1 and "WORLD_SIZE" not in os.environ:
        try:
            mesh.check_loopback()
        except ValueError as error:
            raise refuse(
                kind_of_error(error, "wrong_ranks"), "parallelism.nproc_per_node", ranks, str(error)
            ) from None
    kind, reason = precision.choose(config.precision.kind, device)
    offload = p.activation_checkpointing == "offload"
    compiled = _compiled(config.train.compile, device, offload)
    return Placement(device, layout, kind, reason, *compiled)


def _compiled(wanted: bool | str, device: torch.device, offload: bool) -> tuple[bool, str]:
    """Return whether the model is compiled, and why, in words.

    A compiled block would hide what it keeps from `offload`.
    Raises ConfigError where it cannot be and was asked for.
    """
    if wanted is False or (wanted == "auto" and device.type == "cpu"):
        return False, ""
    why = "parallelism.activation_checkpointing=offload moves what blocks keep one by one"
    missing = why if offload else _missing_to_compile(device)
    if wanted == "auto":
        return not missing, f"off: {missing}" if missing else "on, chosen for this GPU"
    if missing:
        kind: Kind = "conflict" if offload else "missing_package"
        raise refuse(kind, "train.compile", True, missing, "false")
    return True, "on"


def _missing_to_compile(device: torch.device) -> str:
    """Return what torch.compile needs for the device and does not find; "" where all is there."""
    if device.type == "cpu":
        there = shutil.which("g++") or shutil.which("clang++") or os.environ.get("CXX")
        return "" if there else "compiling for the CPU needs a C++ compiler (g++)"
    if importlib.util.find_spec("triton") is None:
        return "compiling for CUDA needs Triton (the package triton)"
    if torch.cuda.get_device_capability(device) < (7, 0):
        return "Triton compiles for GPUs of compute capability 7.0 and above"
    # Triton builds a small extension of Python at its first kernel.
    if not any(map(shutil.which, ("gcc", "clang", "cc"))) and not os.environ.get("CC"):
        return "compiling for CUDA needs a C compiler (gcc)"
    if not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        return "compiling for CUDA needs the headers of Python (the package python3-dev)"
    return ""


def check_ranks(several: Sequence[Traits], layout: Layout) -> None:
    """Raise ConfigError for an optimizer with such traits that these ranks cannot share."""
    for traits in several:
        if layout.shard_size * layout.tensor_parallel_size > 1 and not traits.parts:
            why = "each rank would hold parts of tensors, and its update of a part may not be"
            text = f"{why} that part of the whole update; take parallelism=ddp or single"
            raise refuse("unsupported", traits.key, traits.name, text)
        if layout.dp_size > 1 and traits.draws:
            text = "draws random numbers, other ones on each rank; take parallelism=single"
            raise refuse("unsupported", traits.key, traits.name, text)


def check_parallel(config: Config, place: Placement, loss: SummedLoss) -> list[str]:
    """Refuse a model or an optimizer that the ranks cannot share; return what saves nothing.

    Raises ConfigError.
    """
    p, tp = config.parallelism, place.layout.tensor_parallel_size
    useless = p.activation_checkpointing == "offload" and place.device.type == "cpu"
    warnings = [SAVES_NOTHING] if useless else []
    if p.activation_checkpointing != "none" and not blocks_of(loss.model):
        text = "computes blocks again, and the model has no list of them named `blocks`"
        key = "parallelism.activation_checkpointing"
        raise refuse("unsupported", key, p.activation_checkpointing, text, "none")
    if tp > 1:
        _check_tensor_parallel(config, tp, loss)
    return warnings


def _check_tensor_parallel(config: Config, tp: int, loss: SummedLoss) -> None:
    """Raise ConfigError for a model or an optimizer that no plan splits over `tp` ranks."""
    from llmexp.mesh.sharding import tensor_parallel_plan

    p = config.parallelism
    check_split(config.model, tp)
    if p.sequence_parallel:
        check_tokens(config.batch.sequence_length, tp)
        if config.model.get("n_experts"):
            text = "experts and their losses need the whole sequences"
            raise refuse("unsupported", "parallelism.sequence_parallel", True, text, False)
        if not is_shipped(loss.model):
            text = f"{config.model['_target_']} is not one of the models that share tokens"
            raise refuse("unsupported", "parallelism.sequence_parallel", True, text, False)
    if config.model.get("qk_norm", "none") not in ("none", "head"):
        given = f"model.qk_norm={config.model['qk_norm']}"
        text = f"{given} normalizes all heads at once, and each rank holds only a part of them"
        raise refuse("unsupported", "parallelism", p.kind, text, "fsdp")
    if not tensor_parallel_plan(loss.model) or not loss.has_head():
        text = f"there is no plan for splitting the layers of {config.model['_target_']} over ranks"
        raise refuse("unsupported", "parallelism", p.kind, text, "fsdp")
    if not is_ours(target := config.optimizer.get("_target_")):
        mix = f"the mix of split and whole parameters of parallelism={p.kind}"
        text = f"{target} is not known to take {mix}"
        raise refuse(
            "unsupported",
            "optimizer._target_",
            target,
            text,
            "llmexp.optim.optimizers.adamw.adamw",
        )
