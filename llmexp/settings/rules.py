"""Knobs of rules: a few numbers from which sizes, rates and batches follow.

Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from llmexp.settings.values import Where, count, knob

ONE_NUMBER = ("model.size", "model.depth")  # that a shape follows from
MUP_HEAD = 64  # width of a head at which attention of mup is the standard one
SIZES = ("n_layers", "n_heads", "n_kv_heads", "d_model", "d_ff")  # that a rule gives


@dataclass(frozen=True)
class ShapeRule:
    """Give a model its sizes by its depth."""

    aspect: float = knob("features of width for each layer", 64.0, above=0, default=64.0)
    head_width: int = count(
        "features of a head; the width is rounded to a multiple of it", 64, default=64
    )
    mlp_factor: float | None = knob(
        "width of the MLP over that of the model; null: 4, of Llama 8/3",
        4.0,
        above=0,
        default=None,
    )
    multiple: int = count("the width of the MLP is rounded to a multiple of it", 64, default=64)
    queries_per_kv: int = count(
        "query heads for each key/value head, as far as the heads divide by it", 1, default=1
    )


@dataclass(frozen=True)
class Group:
    """Multiply rate and weight decay of the parameters whose names a pattern matches."""

    match: str = knob("pattern of names, as in a shell; the first that matches", "*.mlp.*")
    lr: float = knob("factor on their rate", 0.3, at_least=0, default=1.0)
    weight_decay: float = knob("factor on their weight decay", 0.0, at_least=0, default=1.0)


size = Annotated[
    Any,
    knob(
        "parameters, such as 38M, from which model.shape_rule makes the nearest shape: with the "
        "head, without tables of embeddings; null: the sizes decide",
        "38M",
        default=None,
    ),
]
depth = Annotated[
    int | None,
    count(
        "layers, from which model.shape_rule makes the other sizes; null: the sizes decide",
        12,
        default=None,
    ),
]
shape_rule = Annotated[
    ShapeRule | None,
    knob(
        "how sizes follow from model.size or model.depth: {aspect: 64, head_width: 64, "
        "mlp_factor: 4, multiple: 64, queries_per_kv: 1}; null: so, with 8/3 for Llama's MLP",
        acts=Where(ONE_NUMBER),
        default=None,
    ),
]
groups = Annotated[
    list[Group],
    knob(
        "factors on rate and weight decay by pattern of parameter names; the first that matches "
        "counts",
        [{"match": "*.token_embedding.*", "lr": 0.3, "weight_decay": 0}],
        default=[],
    ),
]
