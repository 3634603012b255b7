"""Text from a model: the samples of a run, and `llmexp sample RUN_DIR`."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import torch
from torch import nn

from llmexp.config.values import ConfigError
from llmexp.data.stream import Corpus
from llmexp.data.tokenizers.base import END_OF_TEXT, Tokenizer
from llmexp.models.loss import evaluation_mode
from llmexp.models.sampling import generate
from llmexp.optim import precision


def sample(
    encoding: Tokenizer,
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
    """Return the prompt and up to `tokens` tokens after it, to the end of the document.

    It draws its own random numbers. Raises ConfigError where there is nothing to begin with: no
    prompt, and no token for the start of a document.
    """
    end = encoding.eot_token
    ids = encoding.encode_ordinary(prompt) or ([] if end is None else [end])
    if not ids:
        raise ConfigError(
            "missing_value",
            f"tokenizer: {encoding.name} has no {END_OF_TEXT} token to begin with; llmexp sample "
            "needs a --prompt",
        )
    device = next(model.parameters()).device
    new: list[int] = []
    with evaluation_mode(model), precision.autocast(precision_kind, device):
        for token in generate(
            model,
            ids,
            tokens,
            temperature=temperature,
            top_k=top_k,
            generator=torch.Generator(device=device).manual_seed(seed),
            context_length=context_length,
            allowed_v=torch.from_numpy(encoding.has_meaning()),
        ):
            if token == end:
                break
            new.append(token)
    # some libraries leave out the space before the first word that they decode
    before = encoding.decode(ids, errors="replace")
    whole = encoding.decode([*ids, *new], errors="replace")
    if prompt and whole.startswith(before):
        return prompt + whole.removeprefix(before)
    return prompt + encoding.decode(new, errors="replace")


def first_words(encoding: Tokenizer, corpus: Corpus, document_end: int | None) -> str:
    """Return what the samples of a run begin with: the first words of the validation text.

    Empty where the model has learnt how documents begin: what follows the token between them was a
    target. It was not in a corpus of one document, nor under a document mask (`document_end`).
    """
    if not corpus.is_text:
        return ""
    if document_end is None and corpus.train.holds(encoding.eot_token):
        return ""
    text = corpus.val if corpus.val is not None else corpus.train
    ids = text.read(0, min(64, len(text))).tolist()
    opening = encoding.decode([i for i in ids if i != document_end], errors="replace")
    words = re.match(r"\s*\S+(\s+\S+){0,3}(?=\s)", opening)
    return words[0] if words else opening


@contextlib.contextmanager
def one_thread(*, small: bool) -> Iterator[None]:
    """Compute with one thread within, where the model is `small`.

    The operations of a single sequence are too short to share, and on a busy machine threads would
    wait for each other.
    """
    threads = torch.get_num_threads()
    if not small or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
