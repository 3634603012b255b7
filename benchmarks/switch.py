"""How far a balance loss of each micro-batch, as Switch has it, moves a run between two cuts.

    python benchmarks/switch.py [--steps 20]

The same small mixture in float64, 16 sequences a step as one micro-batch and as sixteen, with the
loss of Switch (Fedus et al. 2022, equations 4 to 6, of a micro-batch) and with that of each
sequence. Printed: how much the gradient of the routers differs in the first step, and the losses
after the last one.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor

from llmexp import mesh
from llmexp.compose import app
from llmexp.models.experts import Experts, experts_of
from llmexp.train.assembly.assemble import assemble
from llmexp.train.set_up import set_up
from llmexp.train.step import train_step
from llmexp.train.windows import read_ahead

RUN = [
    "model=moe_tiny", "model.n_layers=2", "model.d_model=64", "model.d_expert=64",
    "model.balance=sequence", "data=synthetic", "precision=fp64", "tracker=none",
    "train.device=cpu",
    "batch.sequence_length=64", "batch.real_batch_size=16", "clip=none", "train.sample_tokens=0",
]  # fmt: skip


def of_micro_batch(one: Any, logits_bte: Tensor, scores_bte: Tensor, chosen_btk: Tensor) -> None:
    """Add the loss of Switch, which sees all tokens of a micro-batch at once."""
    experts = scores_bte.shape[-1]
    load_e = torch.bincount(chosen_btk.flatten(), minlength=experts) / chosen_btk.numel()
    balance = experts * (load_e * scores_bte.mean((0, 1))).sum()
    if one.added_losses is not None:
        one.added_losses.append(one.routing.balance_loss * balance.expand(len(scores_bte)))


def trained(micro: int, steps: int) -> tuple[Tensor, float]:
    """Return the routers' gradient of the first step, and the loss of the last."""
    with app.hydra_app(None) as hydra:
        given = [*RUN, f"batch.micro_batch_size={micro}", f"train.max_steps={steps}"]
        parts = assemble(app.typed_config(app.compose(hydra, given)[0]))
    setup = set_up(parts, mesh.join("cpu", "single", 1, 1, 1))
    gradient, loss = torch.zeros(0), 0.0
    routers = [one.router.weight for one in experts_of(setup.model).values()]
    for number, window in enumerate(read_ahead(parts, setup.mesh, 0)):
        starts = setup.features.on("backward_start")
        for act in starts:
            act(window)
        loss = train_step(setup, window, lambda n=number: n).read().loss
        if not number:  # the first moments of AdamW are gradients
            states = setup.optimizers[0].state
            gradient = torch.cat([states[p]["exp_avg"].flatten() for p in routers])
    return gradient, loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    ours = Experts._judge
    for name, judge in (("each sequence", ours), ("each micro-batch", of_micro_batch)):
        Experts._judge = judge  # type: ignore[method-assign]
        (one, loss), (other, other_loss) = trained(16, steps), trained(1, steps)
        apart = float((one - other).norm() / one.norm())
        print(f"{name}: routers' first gradient differs by {apart:.2g} of its norm")
        print(
            f"  loss after {steps} steps {loss:.6f} and {other_loss:.6f}: {loss - other_loss:.2g}"
        )


if __name__ == "__main__":
    main()
