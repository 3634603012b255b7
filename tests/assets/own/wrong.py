"""Parts of a user's own that llmexp refuses, or that fail in training."""

import numpy as np
from torch import nn
from torch.optim import AdamW  # noqa: F401  (imported, so not a part of this package)

from .nets import Bigram, Pairs


class Output(dict):
    pass


class Logits(Bigram):
    """Give logits that are none, or fail, in one of several ways."""

    calls = 0

    def __init__(self, vocab_size: int, kind: str, width: int = 8):
        super().__init__(257 if kind == "narrow" else vocab_size, width)
        self.kind = kind

    def forward(self, tokens_bt):
        self.calls += 1
        x = self.embed(tokens_bt)
        logits = self.head(x.mT if self.kind == "turned input" else x)
        if self.calls > 2 and self.kind == "late":
            raise ArithmeticError("too late")
        if self.calls > 2 and self.kind == "missing":
            open("rope_cache.bin")  # noqa: SIM115
        output = Output()
        output.logits = logits
        others = {
            "two": (logits, None),
            "wrapped": output,
            "turned": logits.transpose(1, 2),
            "chosen": (logits * 9).long(),
            "detached": logits.detach(),
        }
        return others.get(self.kind, logits)


class Empty(nn.Module):
    def __init__(self, vocab_size: int, width: int = 8):
        super().__init__()


def never(update, total):
    return None


def infinite_at_the_end(update, total):
    return 1.0 if update + 1 < total else float("inf")


def lost(vocab_size: int):
    raise KeyError("no such corpus")


def unread():
    return np.load("corpus.npy")


class Unfinished:
    n_vocab = 10

    def decode(self, ids):
        return ""


class FewLengths(Pairs):
    def __init__(self):
        self.byte_lengths = [1, 2]


class OutOfRange(Pairs):
    def encode_batch(self, texts):
        return [[70_000] for text in texts]


class NoTable(Pairs):
    def encode_batch(self, texts):
        return self.table[texts]


def every(event, context, every: int):
    pass


def torn(event, context):
    pass


torn.better = {"mine/seen": "least"}


def fails(event, context, kind):
    """Fail as a hook, in one of several ways."""
    at = kind, event, context.step
    if at == ("breaks", "step_end", 2):
        raise ZeroDivisionError("by zero")
    if at == ("leaves", "step_start", 2):
        raise SystemExit(0)
    if at == ("replaces", "backward_end", 2):
        p = [*context.model.parameters()][-1]
        p.grad = p.grad * 2
    others = {
        ("clashes", "step_end"): {"lr": 1.0},
        ("counts", "step_start"): 3,
        ("texts", "step_start"): {"mine/name": "1.5"},
        ("numbered", "saved"): {1: 2.0},
    }
    return others.get((kind, event))
