"""Text from a model: the sample at the end of a run, and `llmexp sample RUN_DIR`."""

from __future__ import annotations

from typing import Any

import tiktoken
import torch
from torch import nn

from llmexp import checkpoint, precision
from llmexp.config import Config, ConfigError
from llmexp.models.sampling import generate
from llmexp.targets import bind


def sample(
    encoding: tiktoken.Encoding,
    model: nn.Module,
    context_length: int,
    precision_kind: str,
    prompt: str,
    tokens: int,
    *,
    temperature: float = 0.8,
    top_k: int | None = 50,
    seed: int = 0,
) -> str:
    """The prompt and up to `tokens` tokens after it, to the end of the document; uses its own random numbers."""
    ids = encoding.encode_ordinary(prompt) or [encoding.eot_token]
    device = next(model.parameters()).device
    new: list[int] = []
    with precision.autocast(precision_kind, device):
        for token in generate(
            model,
            ids,
            tokens,
            temperature=temperature,
            top_k=top_k,
            generator=torch.Generator(device=device).manual_seed(seed),
            context_length=context_length,
            n_vocab=encoding.n_vocab,
        ):
            if token == encoding.eot_token:
                break
            new.append(token)
    return prompt + encoding.decode(new, errors="replace")


def load_for_sampling(
    config: Config, recorded: dict[str, Any], loaded: checkpoint.Loaded
) -> tuple[tiktoken.Encoding, nn.Module, int]:
    """(tokenizer, model with the checkpoint's weights on the CPU, its context length). Raises ConfigError."""
    encoding: tiktoken.Encoding = bind("tokenizer", config.tokenizer, {})()
    try:
        with torch.device("meta"):  # a stranger's config may ask for more than there is
            bind("model", config.model, {})()
    except (RuntimeError, MemoryError) as error:
        raise ConfigError(f"model: cannot be built: {str(error).splitlines()[0]}") from None
    model: nn.Module = bind("model", config.model, {})()
    model.to(precision.parameter_dtype(config.precision.kind))
    checkpoint.restore_model(loaded, model)
    return encoding, model, recorded.get("max_position_embeddings") or config.batch.sequence_length
