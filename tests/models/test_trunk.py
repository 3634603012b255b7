"""Ways of the trunk on an accelerator against those of a CPU, in float64 on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from llmexp.models import common, documents
from llmexp.models.gpt2 import GPT2
from llmexp.models.llama import Llama


def gradients(model: nn.Module, tokens: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    (model(tokens) ** 2).sum().backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_one_product_and_repeated_heads_compute_the_same(kind, masked, monkeypatch):
    torch.manual_seed(3)
    sizes = {"vocab_size": 50, "max_position_embeddings": 16, "n_layers": 2, "n_heads": 4}
    sizes |= {"d_model": 16, "d_ff": 24}
    model = GPT2(**sizes) if kind == "gpt2" else Llama(**sizes, n_kv_heads=2)
    with torch.no_grad():  # biases too
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    model.document_end = 7 if masked else None
    model.double()
    tokens = torch.randint(0, 50, (3, 16))
    monkeypatch.setattr(documents, "SHORT", 10**6)  # masks
    expected = model(tokens), gradients(model, tokens)
    monkeypatch.setattr(documents, "repeats_heads", lambda *_: True)
    calls = []
    monkeypatch.setattr(common, "in_one_product", lambda _: calls.append(1) or True)
    found = model(tokens), gradients(model, tokens)
    assert len(calls) == 4
    # float64: sums of 16 products in another order, through two layers
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)
