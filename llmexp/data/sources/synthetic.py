"""data=synthetic: a stream of known entropy, made in memory."""

from __future__ import annotations

import math
from typing import Annotated

import numpy as np

from llmexp.config.values import choice, knob, refuse
from llmexp.data.sources.settings import Knobs
from llmexp.data.stream import Corpus, TokenStream, sample_digest


def synthetic(
    *,
    pattern: Annotated[
        str,
        choice(
            "markov: four successors per id; copy: blocks of 16 random ids, each twice",
            "markov | copy",
        ),
    ],
    n_tokens: Annotated[int, knob("tokens in all, training and validation", 1_000_000, at_least=2)],
    n_ids: Annotated[
        int | None,
        knob("token ids in use, 0 to n_ids - 1; null: the whole vocabulary", 64, at_least=4),
    ],
    val_ratio: Knobs.val_ratio,
    seed: Knobs.seed,
    vocab_size: int,
) -> Corpus:
    """Return a stream that can be learned, of known entropy, made in memory: no files.

    markov: a first-order chain. Each id has four successors, with probabilities 0.7, 0.1, 0.1, 0.1:
    the best possible loss is 0.940 nats per token. copy: blocks of 16 random ids, each block twice:
    a model that looks back 16 tokens gets to ln(n_ids) / 2.
    """
    ids = vocab_size if n_ids is None else n_ids
    if not 4 <= ids <= vocab_size:
        text = f"must be between 4 and the vocabulary of {vocab_size}, or null for all of it"
        raise refuse("out_of_range", "data.n_ids", n_ids, text)
    rng = np.random.Generator(np.random.PCG64(seed))
    names = np.argsort(rng.random(ids))  # which id stands for which state
    if pattern == "markov":
        # A walk on a circle: the next state is the present one plus one of four distances, so it is
        # a running sum.
        distances = np.array([1, 0, ids // 2, ids - 1])
        steps = distances[np.searchsorted([0.7, 0.8, 0.9], rng.random(n_tokens), side="right")]
        stream = names[np.cumsum(steps) % ids]
        nats = -(0.7 * math.log(0.7) + 0.3 * math.log(0.1))
    else:
        period = 16
        blocks = (rng.random((-(-n_tokens // (2 * period)), period)) * ids).astype(np.int64)
        stream = np.repeat(blocks, 2, axis=0).reshape(-1)[:n_tokens]
        nats = math.log(ids) / 2
    kept = stream.astype(np.uint16 if ids <= 1 << 16 else np.uint32)
    end = int(n_tokens * (1 - val_ratio))
    train, val = TokenStream([kept[:end]]), TokenStream([kept[end:]])
    best = f"best possible loss {nats:.3f} nats per token"
    description = f"synthetic {pattern} over {ids} ids, {best}"
    fingerprint = {"content": sample_digest(TokenStream([kept])), "val_ratio": val_ratio}
    return Corpus(train, val or None, description, fingerprint, has_documents=False)
