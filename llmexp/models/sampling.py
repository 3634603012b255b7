"""Text from a model, token by token."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmexp.config.values import ConfigError
from llmexp.models.documents import KVCache


def generate(
    model: nn.Module,
    prompt_tokens: list[int],
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    generator: torch.Generator,
    context_length: int,
    allowed_v: Tensor | None = None,
) -> Iterator[int]:
    """Yield `max_new_tokens` token ids that continue `prompt_tokens`.

    The model sees the last `context_length` tokens, on the generator's device; one that can
    remember computes each of them once, until the context is full. `temperature` 0
    takes the most likely token; `top_k` keeps the k most likely ones (None: all). Ids that are not
    true in `allowed_v` (bool; None: all are), such as rows that only pad the vocabulary, never come
    out. The generator is the only source of randomness. The mode of the model is left alone. Raises
    ConfigError, at the call, for an empty prompt or a setting out of range.
    """
    if not prompt_tokens:
        raise ConfigError(
            "missing_value", "empty prompt: at least one token is needed to continue from"
        )
    minima = {"max_new_tokens": (max_new_tokens, 0), "context_length": (context_length, 1)}
    minima |= {"top_k": (1 if top_k is None else top_k, 1)}
    for name, (value, minimum) in minima.items():
        if value < minimum:
            raise ConfigError("out_of_range", f"{name}={value}: must be at least {minimum}")
    if not 0 <= temperature < math.inf:
        raise ConfigError(
            "out_of_range",
            f"temperature={temperature}: must be a finite number, 0 (the most likely token) or "
            "above",
        )

    def continuation() -> Iterator[int]:
        tokens = list(prompt_tokens)
        barred_v = None if allowed_v is None else ~allowed_v.to(generator.device)
        remembers = getattr(model, "can_remember", lambda length: False)(context_length)
        past = KVCache()
        for _ in range(max_new_tokens):
            if remembers and len(tokens) <= context_length:
                logits_v = _last_logits(model, tokens[past.length :], generator.device, past)
            else:
                logits_v = _last_logits(model, tokens[-context_length:], generator.device)
            if barred_v is not None:
                logits_v = logits_v[: len(barred_v)]
                logits_v = logits_v.masked_fill(barred_v[: len(logits_v)], -math.inf)
            tokens.append(_draw(logits_v, temperature, top_k, generator))
            yield tokens[-1]

    return continuation()


@torch.no_grad()
def _last_logits(
    model: Any, tokens: list[int], device: torch.device, past: KVCache | None = None
) -> Tensor:
    """Return the logits (v,) of the token that follows `tokens` and those in the cache."""
    tokens_bt = torch.tensor([tokens], device=device)
    if past is None:
        return model(tokens_bt)[0, -1].float()
    return F.linear(model.hidden(tokens_bt, past)[0, -1], model.head_weight).float()


def _draw(
    logits_v: Tensor, temperature: float, top_k: int | None, generator: torch.Generator
) -> int:
    if temperature == 0:
        return int(logits_v.argmax())
    k = len(logits_v) if top_k is None else min(top_k, len(logits_v))
    largest_k, ids_k = logits_v.topk(k)
    # Relative to the largest before the division, so that no temperature overflows.
    probabilities_k = ((largest_k - largest_k[0]) / temperature).softmax(-1)
    return int(ids_k[torch.multinomial(probabilities_k, 1, generator=generator)])
