"""Hooks that look at a run, each with what it has seen in the working folder or in its rows."""

import os
import time

import numpy as np
import torch


def note(event, context):
    """Note each event, draw random numbers, and return figures."""
    with open("events.txt", "a") as f:
        print(event, context.step, "-" if context.row is None else sorted(context.row)[0], file=f)
    torch.rand(3), np.random.rand(3)
    noise = torch.nn.functional.dropout(torch.ones(5), 0.5)
    if event == "step_end":
        largest = float(next(context.model.parameters()).detach().abs().max())
        return {"mine/weight": largest, "mine/noise": noise.sum()}


def every(event, context, every: int, name: str = "mine/seen"):
    """Return a figure of the section `user` in some steps."""
    if event == "step_end" and context.step % every == 0:
        return {name: context.user["scale"] * context.step}


every.better = {"mine/seen": "lower", "b": "higher"}


def look(event, context):
    """Keep each window, and its gradient."""
    gradients = [p.grad for p in context.model.parameters() if p.grad is not None]
    rank = os.environ.get("RANK", "0")
    if event in ("step_start", "saved"):
        assert context.micro_batches is None
    elif event == "step_end":
        pairs = [torch.cat(both) for both in zip(*context.micro_batches, strict=True)]
        torch.save(pairs, f"window {context.step} of {rank}.pt")
    else:
        assert len(context.micro_batches) == context.run.gradient_accumulation_steps
    if event == "backward_start":
        return {"mine/before": sum(float(g.abs().sum()) for g in gradients)}
    if event == "backward_end":
        whole = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in gradients]
        flat = torch.cat([g.detach().flatten().double() for g in whole])
        if rank == "0":
            torch.save(flat, f"gradient {context.step}.pt")
        return {"mine/norm": flat.norm()}


def halve(event, context):
    if event == "backward_end":
        for p in context.model.parameters():
            p.grad.mul_(0.5)


def plant(event, context):
    """Let the gradient of one module of one layer grow fourfold with each step from 46 on."""
    if event == "backward_end" and 45 < context.step < 60:
        for name, p in context.model.named_parameters():
            if name == "blocks.1.mlp.up_proj.weight":
                p.grad.mul_(4.0 ** (context.step - 45))


def show_recompiles(event, context):
    """Have torch show recompiles."""
    torch._logging.set_logs(recompiles=True)


def slow_disk(event, context, seconds=0.2, fsync=os.fsync):
    """Have each flush to the disk take a while, so that a save can be met."""
    os.fsync = lambda file: (time.sleep(seconds), fsync(file))[1]
