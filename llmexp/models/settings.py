"""The knobs that models share. Standard library only: who composes a run imports no torch."""

from __future__ import annotations

from typing import Annotated, Any

from llmexp.settings.rules import ONE_NUMBER, ShapeRule
from llmexp.settings.values import Where, choice, count, knob, optional, where


class Knobs:
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
    size = Annotated[
        Any,
        optional(
            "parameters, such as 38M, from which model.shape_rule makes the nearest shape: with "
            "the head, without tables of embeddings; null: the sizes decide",
            "38M",
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
        optional(
            "how sizes follow from model.size or model.depth: {aspect: 64, head_width: 64, "
            "mlp_factor: 4, multiple: 64, queries_per_kv: 1}; null: so, with 8/3 for Llama's MLP",
            acts=Where(ONE_NUMBER),
        ),
    ]
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
