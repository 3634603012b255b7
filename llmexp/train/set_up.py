"""Build what a rank trains with, from the parts of its run."""

from __future__ import annotations

import torch

from llmexp import features, mesh
from llmexp.config.values import ConfigError
from llmexp.models.loss import SummedLoss, evaluation_mode
from llmexp.models.operands import IGNORE_INDEX
from llmexp.optim import precision, updating
from llmexp.run import Run
from llmexp.train.assembly.assemble import Parts
from llmexp.train.clipping import rule_of
from llmexp.train.hooks import of_hooks
from llmexp.train.step import Setup


def set_up(parts: Parts, joined: mesh.Mesh, fresh: bool = True) -> Setup:
    """Build what this rank trains with, on its device. `fresh` false: a checkpoint follows."""
    config = parts.config
    if config.train.deterministic:  # before the device computes anything
        precision.make_deterministic()
    precision.apply(parts.precision)
    # A model of ours is built without memory: each rank fills its parts alone. Others are built on
    # the CPU, the same on each rank, and split from whole tensors.
    model = parts.build_model()
    if not joined.sharded:
        parts.begin_model(model, joined.device, fresh)
    loss = SummedLoss(model)
    if config.parallelism.activation_checkpointing == "offload":
        from llmexp.models.offload import offload_blocks

        offload_blocks(model, joined.tensor.size() if joined.tensor and joined.sequence else 1)
    module = mesh.wrap(
        joined,
        loss,
        activation_checkpointing=config.parallelism.activation_checkpointing,
        compiled=config.train.compile is True,
        gather_dtype=torch.bfloat16 if parts.precision == "bf16" else None,
    )
    if joined.sharded:
        parts.begin_model(model, joined.device, fresh)
    parameters = updating.trained(model)
    if module is loss:  # not under DDP, which has them in buckets
        # Gradients live as long as the run: born between activations they would fragment the heap,
        # and accumulation would cost memory. One that a window does not touch is 0, not none.
        for p in parameters:
            p.grad = torch.zeros_like(p)
    setup = Setup(
        mesh=joined,
        model=model,
        loss=loss,
        module=module,
        parameters=parameters,
        optimizers=(optimizers := parts.build_optimizers(model)),
        scaler=precision.Scaler(
            parts.precision,
            joined.device,
            config.precision.init_scale,
            config.precision.growth_interval,
        ),
        clipping=rule_of(config)(config.clip, joined, model, optimizers),
        arithmetic=parts.precision,
        rate_factor=parts.rate_factor,
        stage_rate=lambda step: parts.run.stage_at(step).rate,
    )
    hooks = of_hooks(parts.hooks, setup) if parts.hooks else []
    setup.features.extend([setup.clipping, *hooks])
    if joined.dp_size > 2 and module is not loss:
        settle_buckets(setup, parts.run)
    for part in features.asked_for(config, "train"):
        setup.features.append(part.make(parts, setup))  # one may need those before it
    if len(marking := setup.features.acting("mark")) > 1:
        names = " and ".join(feature.name for feature in marking)
        text = "one feature at most can mark what is read; leave one out, for example hooks=[]"
        raise ConfigError("conflict", f"hooks: {names}: {text}")
    return setup


def settle_buckets(setup: Setup, run: Run) -> None:
    """Have DDP lay out its buckets of gradients before the first step, by a pass without targets.

    It orders them as the first backward pass gives gradients, and how a sum over three ranks or
    more is rounded depends on its place in a bucket: a run that goes on would round its first step
    otherwise than one that never stopped. (Two ranks have one order.)
    """
    tokens_bt = torch.zeros(
        (run.micro_batch_size, run.sequence_length), dtype=torch.int64, device=setup.mesh.device
    )
    with evaluation_mode(setup.model):
        setup.model.train()  # what a step compiles
        with mesh.micro_step(setup.mesh, setup.module, last=True):
            with precision.autocast(setup.arithmetic, setup.mesh.device):
                nll = setup.module(tokens_bt, torch.full_like(tokens_bt, IGNORE_INDEX))
            nll.backward()
    setup.zero_gradients()
