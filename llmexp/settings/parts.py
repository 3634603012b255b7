"""The knobs of parts: arguments that several models, optimizers, schedules and data sources share.

A function takes them by these names: `def sgd(model, lr: OptimizerKnobs.lr)`. An argument of one
function only is declared there, with `Annotated` and `knob`. Also here are knobs that llmexp itself
reads beside the function (`COMMON`), and those of which resume, sweep and compare need to know more
than that another value changes the result. Standard library only.
"""

from __future__ import annotations

import functools
import importlib
import typing
from typing import Annotated, Any

from llmexp.settings import rules
from llmexp.settings.values import TINY, Knob, Where, choice, count, knob, optional, where

# Knobs that llmexp reads itself: no arguments of the functions.
COMMON = {
    "model": ("init_from", "init_grow", "size", "depth", "shape_rule"),
    "data": ("shuffle", "ignore_id"),
    "optimizer": ("rule", "reference", "exponents", "groups"),
}


class ModelKnobs:
    init_from = Annotated[
        str | None,
        optional(
            "weights to begin with: a Hugging Face folder, a run's folder, or FOLDER@STEP of a "
            "run; null: drawn by train.seed",
            "outputs/trunk@4000",
        ),
    ]
    init_grow = Annotated[
        bool,
        knob(
            "take weights with a smaller vocabulary or fewer positions; the rows that are missing "
            "are drawn",
            acts=where("model.init_from"),
            default=False,
        ),
    ]
    size, depth, shape_rule = rules.size, rules.depth, rules.shape_rule
    parametrization = Annotated[
        str,
        choice(
            "how initial weights, rates and logits follow the width; with mup the best rate hardly "
            "moves",
            "standard | mup",
            default="standard",
        ),
    ]
    base_width = Annotated[
        int | None,
        count(
            "features; the d_model at which mup is the standard parametrization; needed with mup",
            256,
            acts=where("model.parametrization", "mup"),
            default=None,
        ),
    ]
    vocab_size = Annotated[
        int, count("tokens; null: the tokenizer's, rounded up to a multiple of 64", 50304)
    ]
    max_position_embeddings = Annotated[
        int,
        count(
            "tokens; the longest sequence",
            1024,
            decides=where(
                "model._target_",
                "llmexp.models.gpt2.GPT2",
                words="where the model has a table of positions; for Llama it is a limit that is "
                "checked",
            ),
        ),
    ]
    n_layers = Annotated[int, count("transformer blocks", 12, at_most=10_000)]
    n_heads = Annotated[int, count("query heads; must divide d_model", 12)]
    d_model = Annotated[int, count("features; width of the residual stream", 768)]
    d_ff = Annotated[
        int | None, count("features; width of the MLP; null: 4 x d_model, of Llama 8/3", 3072)
    ]
    dropout = Annotated[
        float,
        knob(
            "probability on the embedding, attention weights and residual branches; GPT-2's: 0.1",
            0.1,
            at_least=0,
            below=1,
        ),
    ]
    gelu = Annotated[
        str,
        choice(
            "tanh: the approximation of GPT-2 and of transformers; exact: nanoGPT's, faster on a "
            "CPU",
            "tanh | exact",
            default="tanh",
        ),
    ]
    residual = Annotated[
        str,
        choice(
            "autocast: residual stream in the precision of products (bf16), less to move on a "
            "GPU, less exact",
            "full | autocast",
            acts=where("precision.kind", "auto", "bf16", "fp16"),
            default="full",
        ),
    ]


class OptimizerKnobs:
    rule, reference, exponents = rules.rule, rules.reference, rules.exponents
    groups = rules.groups
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


DECAYS = Where(("schedule.decay_ratio", "schedule.decay_steps", "schedule.decay_start"))


class ScheduleKnobs:
    warmup_steps = Annotated[
        int | None,
        knob("updates of linear warm-up; null: warmup_ratio decides", 100, at_least=0),
    ]
    warmup_ratio = Annotated[
        float | None,
        knob(
            "share of all updates that is warm-up; give one of the two",
            0.05,
            at_least=0,
            at_most=1,
            acts=where("schedule.warmup_steps", None),
        ),
    ]
    decay_start = Annotated[
        int | None,
        knob(
            "update at which the decay starts; null: fork.step in a fork with schedule=cooldown, "
            "else the last decay_steps or decay_ratio",
            1000,
            at_least=0,
        ),
    ]
    decay_steps = Annotated[int | None, count("updates of the decay; null: to the end", 200)]
    decay_ratio = Annotated[
        float,
        knob(
            "share of all updates that is decay; without a budget on the command line this ends a "
            "fork with schedule=cooldown",
            0.2,
            at_least=0,
            at_most=1,
            acts=where("schedule.decay_steps", None),
        ),
    ]
    decay_shape = Annotated[
        str,
        choice(
            "how the rate falls in the decay",
            "linear | sqrt | one_minus_sqrt | cosine",
            acts=DECAYS,
            default="linear",
        ),
    ]
    end_ratio = Annotated[
        float,
        knob(
            "rate at the last update, as a share of the rate before the decay",
            0.1,
            at_least=0,
            at_most=1,
            acts=DECAYS,
        ),
    ]


# Knobs by section; of some the module whose `Knobs` they are.
SECTIONS: dict[str, Any] = {
    "model": ModelKnobs,
    "data": "llmexp.data.sources.settings",
    "tokenizer": "llmexp.data.tokenizers.settings",
    "optimizer": OptimizerKnobs,
    "schedule": ScheduleKnobs,
}


def declared(kind: Any) -> tuple[Any, Knob] | None:
    """Return (type, knob) of an argument that is declared with `Annotated`, else None."""
    for field in getattr(kind, "__metadata__", ()):
        if isinstance(found := getattr(field, "metadata", {}).get("knob"), Knob):
            return typing.get_args(kind)[0], found
    return None


@functools.cache
def arguments() -> dict[str, tuple[Any, Knob]]:
    """Return (type, knob) of the arguments in SECTIONS, by their dotted keys."""
    found = {}
    for section, knobs in SECTIONS.items():
        if isinstance(knobs, str):
            knobs = importlib.import_module(knobs).Knobs
        for name, kind in vars(knobs).items():
            if (one := declared(kind)) is not None:
                found[f"{section}.{name}"] = one
    return found
