"""The knobs that models share. Standard library only: who composes a run imports no torch."""

from __future__ import annotations

from typing import Annotated, Any

from llmexp.config.rules import ONE_NUMBER, ShapeRule
from llmexp.config.values import Where, choice, count, knob, optional, usual, where

_SPARSE = where("model.n_experts")


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
            acts=where("model.depth", None),
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

    n_experts = Annotated[
        int,
        knob(
            "experts in place of the MLP of each block; 0: a dense model", 16, at_least=0, default=0
        ),
    ]
    experts_per_token = Annotated[
        int, usual("experts that each token is sent to", 2, at_least=1, acts=_SPARSE)
    ]
    d_expert = Annotated[
        int | None,
        count("features; width of an expert's MLP; null: d_ff", 768, acts=_SPARSE, default=None),
    ]
    n_shared_experts = Annotated[
        int,
        knob("experts that every token passes too", 1, at_least=0, acts=_SPARSE, default=0),
    ]
    first_dense_layers = Annotated[
        int, knob("first blocks that keep their MLP", 1, at_least=0, acts=_SPARSE, default=0)
    ]
    router = Annotated[
        str,
        choice(
            "an expert's score by its logit", "softmax | sigmoid", acts=_SPARSE, default="softmax"
        ),
    ]
    norm_topk = Annotated[
        bool,
        knob("scores of a token's experts are divided by their sum", acts=_SPARSE, default=True),
    ]
    router_bias = Annotated[
        bool, knob("a bias on the logits, trained as weights are", acts=_SPARSE, default=False)
    ]
    router_z_loss = Annotated[
        float,
        knob(
            "factor on the mean squared log-sum-exp of a sequence's logits (ST-MoE: 1e-3)",
            1e-3,
            at_least=0,
            acts=_SPARSE,
            default=0.0,
        ),
    ]
    balance = Annotated[
        str,
        choice(
            "what loads experts evenly: a bias on their choice that moves by the load of whole "
            "steps, or a loss of each sequence",
            "bias | sequence | none",
            acts=_SPARSE,
            default="bias",
        ),
    ]
    balance_rate = Annotated[
        float,
        usual(
            "score; how far each step moves the bias of an expert",
            1e-3,
            at_least=0,
            acts=where("model.balance", "bias"),
        ),
    ]
    balance_loss = Annotated[
        float,
        usual(
            "factor on the balance loss of a sequence, which is 1 where experts are loaded evenly",
            1e-2,
            above=0,
            acts=where("model.balance", "sequence"),
        ),
    ]
