"""An independent training run in float64: one big batch in one go, every formula written out.

It shares no code with llmexp: its own GPT-2 forward pass, cross-entropy, clipping, AdamW and
cosine.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor


def gpt2_logits(
    w: dict[str, Tensor],
    tokens: Tensor,
    n_layers: int,
    n_heads: int,
    seen: dict | None = None,
    heads: list | None = None,
) -> Tensor:
    """Logits (b, t, v); `seen` gets the figures of layers.jsonl by name, a value a block, `heads`
    the largest logits of attention (b, h) of each block."""
    seen = {} if seen is None else seen

    def norm(x: Tensor, name: str) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        var = ((x - mean) ** 2).mean(-1, keepdim=True)
        return (x - mean) / torch.sqrt(var + 1e-5) * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    b, t = tokens.shape
    h = w["token_embedding.weight"][tokens] + w["position_embedding.weight"][:t]
    causal = torch.ones(t, t, dtype=torch.bool).tril()
    for i in range(n_layers):
        x = norm(h, f"blocks.{i}.attention_norm")
        q, k, v = (
            linear(x, f"blocks.{i}.attention.{p}_proj").view(b, t, n_heads, -1).transpose(1, 2)
            for p in "qkv"
        )
        scores = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(~causal, -math.inf)
        if heads is not None:
            heads.append(scores.detach().amax((2, 3)))
        weights = torch.softmax(scores, -1)
        y = linear(
            (weights @ v).transpose(1, 2).reshape(b, t, -1), f"blocks.{i}.attention.out_proj"
        )
        h = h + y
        x = linear(norm(h, f"blocks.{i}.mlp_norm"), f"blocks.{i}.mlp.up_proj")
        gelu = 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        z = linear(gelu, f"blocks.{i}.mlp.down_proj")
        h = h + z
        size = (gelu.detach() ** 2).mean().sqrt()
        for name, value in {
            "residual_rms": (h**2).mean().sqrt(), "attention_rms": (y**2).mean().sqrt(),
            "mlp_rms": (z**2).mean().sqrt(), "attention_logit_max": scores.max(),
            "attention_entropy": -(weights * torch.log(weights.clamp(min=1e-300))).sum(-1).mean(),
            "dead_units": (gelu.abs().amax((0, 1)) <= 0.01 * size).double().mean(),
        }.items():  # fmt: skip
            seen.setdefault(name, []).append(float(value.detach()))
    return norm(h, "final_norm") @ w["token_embedding.weight"].T


def by_module(tensors: dict[str, Tensor]) -> dict[str, float]:
    """Norm of weight and bias together."""
    squares: dict[str, float] = {}
    for name, tensor in tensors.items():
        module = name.rsplit(".", 1)[0]
        squares[module] = squares.get(module, 0.0) + float((tensor.detach() ** 2).sum())
    return {name: math.sqrt(x) for name, x in squares.items()}


@dataclass
class Reference:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    clipped_norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    layers: list[dict] = field(default_factory=list)  # figures of each step, as in layers.jsonl


def train(
    weights: dict[str, Tensor], stream: np.ndarray, *, real_batch: int | list[int], length: int,
    total_sequences: int, lr: float,
    warmup: int, end_ratio: float, max_norm: float | None, ignore_id: int | None, n_layers: int,
    n_heads: int,
    beta1: float = 0.9, beta2: float = 0.95, eps: float = 1e-8, decay: float = 0.1,
    lrs: list[float] | None = None,
    clip: Callable[[dict[str, Tensor], dict[str, Tensor]], None] | None = None,
    threshold: float = math.inf, qk_limit: float = math.inf,
    factors: Callable[[str], tuple[float, float]] = lambda name: (1.0, 1.0),
) -> Reference:  # fmt: skip
    """Trains on sequences 0, 1, 2, ... (around the corpus) and returns what should have been
    printed. `real_batch` may be a list, of each step; so may the base rate, as `lrs`.
    `clip(weights, gradients)` clips in place; `threshold` and `qk_limit` are those of StableAdamW
    and QK-Clip; `factors` gives those on rate and decay of a parameter."""
    w = {k: v.double().clone().requires_grad_() for k, v in weights.items()}
    moments = {k: (torch.zeros_like(v), torch.zeros_like(v)) for k, v in w.items()}
    available = (len(stream) - 1) // length
    if isinstance(real_batch, int):
        real_batch = [real_batch] * math.ceil(total_sequences / real_batch)
    found, update, steps = Reference(), 0, len(real_batch)
    for step, size in enumerate(real_batch):
        lr = lr if lrs is None else lrs[step]
        first = sum(real_batch[:step])
        ids = [k % available for k in range(first, min(first + size, total_sequences))]
        rows = torch.tensor(
            np.stack([stream[i * length : i * length + length + 1] for i in ids]).astype(np.int64)
        )
        tokens, targets = rows[:, :-1], rows[:, 1:]
        valid = (
            targets != ignore_id
            if ignore_id is not None
            else torch.ones_like(targets, dtype=torch.bool)
        )
        found.counts.append(int(valid.sum()))
        heads: list[Tensor] = []
        logits = gpt2_logits(w, tokens, n_layers, n_heads, heads=heads)
        picked = torch.log_softmax(logits, -1).gather(-1, targets[..., None])[..., 0]
        peak = max(warmup - 1, 0)
        if update < warmup:
            factor = (update + 1) / warmup
        else:
            share = (update - peak) / max(1, steps - 1 - peak)
            factor = end_ratio + (1 - end_ratio) * 0.5 * (1 + math.cos(math.pi * share))
        found.rates.append(lr * factor)
        if not valid.any():
            found.losses.append(math.nan)
            found.norms.append(math.nan)
            continue
        loss = -picked[valid].sum() / valid.sum()
        gradients = dict(zip(w, torch.autograd.grad(loss, list(w.values())), strict=True))
        norm = math.sqrt(sum(float((g**2).sum()) for g in gradients.values()))
        found.losses.append(loss.item())
        found.norms.append(norm)
        scale = 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))
        layers_gradients = dict(gradients)
        gradients = {name: g * scale for name, g in gradients.items()}
        if clip is not None:
            clip(w, gradients)
        after = math.sqrt(sum(float((g**2).sum()) for g in gradients.values()))
        found.clipped_norms.append(after)
        update += 1
        before = {name: p.detach().clone() for name, p in w.items()}
        inside: dict = {}
        first_logits = gpt2_logits(before, tokens[:1], n_layers, n_heads, inside)
        inside |= {
            "logit_max": float(first_logits.max()),
            "log_z": float(torch.logsumexp(first_logits, -1).mean()),
        }
        with torch.no_grad():
            for name, p in w.items():
                g = gradients[name]
                first, second = moments[name]
                first.mul_(beta1).add_((1 - beta1) * g)
                second.mul_(beta2).add_((1 - beta2) * g * g)
                corrected = second.div(1 - beta2**update)
                rms = math.sqrt(float((g * g / corrected.clamp(min=eps**2)).mean()))
                own_rate, own_decay = factors(name)
                rate = lr * own_rate * factor / max(1.0, rms / threshold)
                if p.ndim >= 2:
                    p.mul_(1 - rate * decay * own_decay)
                p.sub_(rate * first / (1 - beta1**update) / (corrected.sqrt() + eps))
            width = w["token_embedding.weight"].shape[1] // n_heads
            for block, largest_bh in enumerate(heads):
                for head, largest in enumerate(largest_bh[valid.any(1)].amax(0).tolist()):
                    rows = slice(head * width, (head + 1) * width)
                    for part in ("q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias"):
                        if largest > qk_limit:
                            w[f"blocks.{block}.attention.{part}"][rows] *= math.sqrt(
                                qk_limit / largest
                            )
        inside["grad_norm"] = by_module(layers_gradients)
        inside["weight_norm"] = by_module(before)
        inside["update_norm"] = by_module({name: p - before[name] for name, p in w.items()})
        found.layers.append(inside)
    found.weights = {k: v.detach() for k, v in w.items()}
    return found
