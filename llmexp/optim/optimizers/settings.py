"""The knobs that optimizers share. Standard library only: who composes a run imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from llmexp.config.rules import SCALING_RULES, Exponents, Reference
from llmexp.config.values import TINY, choice, knob, where


@dataclass(frozen=True)
class Group:
    """Multiply rate and weight decay of the parameters whose names a pattern matches."""

    match: str = knob("pattern of names, as in a shell; the first that matches", "*.mlp.*")
    lr: float = knob("factor on their rate", 0.3, at_least=0, default=1.0)
    weight_decay: float = knob("factor on their weight decay", 0.0, at_least=0, default=1.0)


class Knobs:
    rule = Annotated[
        str,
        choice(
            "how rate, batch, weight decay and beta2 follow from parameters N, tokens D, FLOPs C "
            "and tokens per step B",
            f"none | {' | '.join(SCALING_RULES)}",
            default="none",
        ),
    ]
    reference = Annotated[
        Reference,
        knob(
            "the tuned run that linear, sqrt, power_lines, t_epoch and reference start from, such "
            "as {lr: 1e-3, B: 4096}: lr, weight_decay, N, D, C, B",
            {"lr": 1e-3, "B": 4096},
            default={},
        ),
    ]
    exponents = Annotated[
        Exponents,
        knob(
            "power laws of optimizer.rule=reference, such as {lr: {N: -0.33}, B: {D: 0.38}}",
            {"lr": {"N": -0.33}},
            default={},
        ),
    ]
    groups = Annotated[
        list[Group],
        knob(
            "factors on rate and weight decay by pattern of parameter names; the first that "
            "matches counts",
            [{"match": "*.token_embedding.*", "lr": 0.3, "weight_decay": 0}],
            default=[],
        ),
    ]
    lr = Annotated[float, knob("base learning rate", 3e-4, above=0)]
    momentum = Annotated[float, knob("decay of the momentum; 0: none", 0.9, at_least=0, below=1)]
    nesterov = Annotated[
        bool, knob("Nesterov's form of momentum", acts=where("optimizer.momentum"))
    ]
    weight_decay = Annotated[
        float,
        knob("weight decay on matrices: decoupled, times lr; of sgd added to the gradient", 0.1,
             at_least=0),
    ]  # fmt: skip
    beta1 = Annotated[float, knob("AdamW's decay of the first moment", 0.9, at_least=0, below=1)]
    beta2 = Annotated[float, knob("AdamW's decay of the second moment", 0.95, at_least=0, below=1)]
    eps = Annotated[float, knob("added to the root of AdamW's second moment", 1e-8, at_least=TINY)]
