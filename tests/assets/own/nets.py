"""Models, data, optimizers and tokenizers of a user's own, each as small as it can be."""

import numpy as np
import tiktoken
import torch
from torch import nn

from llmexp.models.gpt2 import GPT2


class Bigram(nn.Module):
    """Token ids in, logits out: it has no width of blocks, no FLOPs, no features."""

    def __init__(self, vocab_size: int, width: int = 8):
        super().__init__()
        self.vocab_size = vocab_size
        self.embed, self.head = nn.Embedding(vocab_size, width), nn.Linear(width, vocab_size)

    def forward(self, tokens_bt):
        return self.head(self.embed(tokens_bt))


class NotOnMeta(Bigram):
    """A model that asks for values, which the meta device has not."""

    def forward(self, tokens_bt):
        assert tokens_bt.max().item() >= 0
        return super().forward(tokens_bt)


class Sixteen(Bigram):
    """A kernel that takes 16 bits only."""

    def forward(self, tokens_bt):
        logits = super().forward(tokens_bt)
        if logits.dtype != torch.bfloat16:
            raise RuntimeError("only fp16 and bf16 are supported")
        return logits


class Puts(Bigram):
    """An operation that torch has no deterministic kernel for."""

    def forward(self, tokens_bt):
        place = torch.tensor([tokens_bt.max().item()])
        return super().forward(tokens_bt) + torch.zeros(99).put_(place % 99, torch.zeros(1)).sum()


def cycle(vocab_size: int, length: int):
    ids = np.arange(length) % 50
    return ids, ids[: length // 5]


def plain_sgd(model, lr: float):
    return torch.optim.SGD(model.parameters(), lr=lr)


def changing(model, lr: float):
    """Return an optimizer that adds to the model, and wants to find it bare."""
    assert not hasattr(model, "scale")
    model.scale = 1.0
    return torch.optim.SGD(model.parameters(), lr=lr)


class Pairs:
    """Two bytes an id; an odd last byte, and the end of a document, have their own."""

    n_vocab, eot_token = 256 * 256 + 257, 256 * 256 + 256

    def __init__(self):
        self.byte_lengths = np.array([2] * 256 * 256 + [1] * 256 + [0])

    def encode_batch(self, texts):
        return [self.ids(text.encode()) for text in texts]

    def ids(self, raw):
        pairs = [a * 256 + b for a, b in zip(raw[::2], raw[1::2], strict=False)]
        return pairs + ([256 * 256 + raw[-1]] if len(raw) % 2 else [])

    def decode(self, ids):
        pieces = (divmod(i, 256) if i < 256 * 256 else (i - 256 * 256,) for i in ids)
        return b"".join(bytes(p) for p in pieces if p != (256,)).decode(errors="replace")


def byte_tokens(kind: str = ""):
    """Return an encoding of bytes: `turned`, in another order, or `endless`, without an end."""
    ranks = {bytes([byte]): 255 - byte if kind == "turned" else byte for byte in range(256)}
    special = {} if kind == "endless" else {"<|endoftext|>": 256}
    return tiktoken.Encoding(
        "bytes of mine", pat_str=r"[\s\S]", mergeable_ranks=ranks, special_tokens=special
    )


def trunk_then_cooldown(update, total_updates, start, warmup_steps, warmup_ratio):
    """Be a trunk at one rate and its cooldown in one go."""
    if update < start:
        return 1.0
    return 1 - (update + 1 - start) / (total_updates - start)


class NotANumberOnce(GPT2):
    """A model whose fourteenth pass in training gives no numbers."""

    calls = 0

    def forward(self, tokens_bt):
        self.calls += self.training
        return super().forward(tokens_bt) * (float("nan") if self.calls == 14 else 1.0)
