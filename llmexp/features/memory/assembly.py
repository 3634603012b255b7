from __future__ import annotations

import dataclasses

import torch

from llmexp import features
from llmexp.config.knobs import deciding_work
from llmexp.config.sections import Config, knobs_of
from llmexp.config.values import refuse
from llmexp.features.memory.config import Knobs
from llmexp.folders.remembered import MEMORY, remembered
from llmexp.optim.precision import parameter_dtype
from llmexp.run import Run
from llmexp.system import hardware
from llmexp.system.text import gib
from llmexp.train.assembly.assemble import Parts
from llmexp.train.assembly.building import draws_by_blocks

MORE = "llmexp plan plan.device=cpu prints what would fit"


def known(config: Config, run: Run) -> dict[str, str]:
    """Return in words what a run of this kind took, where one was measured."""
    found = remembered(MEMORY, deciding_work(config, run.device_name))
    if found is None or not isinstance(peak := found.get("peak_bytes"), (int, float)):
        return {}
    return {"memory": f"{gib(peak)} GiB a rank at its peak, measured before this run"}


def admit(parts: Parts) -> Parts:
    """Return the parts, with a warning where their ranks may not fit into this host's memory.

    Raises ConfigError where they cannot: on a CPU each holds its parameters and gradients, and a
    model that is not ours is built whole by each.
    """
    config, run, layout = parts.config, parts.run, parts.run.layout
    there = hardware.memory_bytes(torch.device("cpu"))
    if there is None or not knobs_of(config, Knobs).check_memory:
        return parts
    weights = run.parameters * parameter_dtype(parts.precision).itemsize
    share = weights / (layout.shard_size * layout.tensor_parallel_size)
    least = 2 * share if parts.device.type == "cpu" else 0.0
    if not draws_by_blocks(config.model):
        least = max(least, weights)
    ranks = f"{layout.nproc_per_node} ranks" if layout.nproc_per_node > 1 else "the run"
    if (needed := layout.nproc_per_node * least) > there:
        text = f"parameters and gradients of {ranks} take {gib(needed)} GiB of this host's memory"
        text += f", which has {gib(there)}; take more hosts, a smaller model or a GPU; {MORE}; "
        text += "train.check_memory=false starts it all the same"
        raise refuse("too_large", "train.check_memory", True, text)
    adamw = config.optimizer["_target_"] == "llmexp.optim.optimizers.adamw.adamw"
    more = sum(features.offered("config", "COPIES_OF_WEIGHTS", config))
    state = share * (1 + more + 2 * adamw)
    held = state + share if parts.device.type == "cpu" else 0.0
    about = layout.nproc_per_node * (held + state * config.checkpoint.async_)
    if about <= there:
        return parts
    text = f"{ranks} may not fit: with the optimizer's state, and the copy that a checkpoint in the"
    text += f" background makes, about {gib(about)} GiB of this host's {gib(there)}; {MORE}"
    return dataclasses.replace(parts, run=dataclasses.replace(run, warnings=(*run.warnings, text)))
