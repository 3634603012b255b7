"""What `plan` says of a larger micro-batch: only what the memory that is there surely holds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from llmexp.__main__ import run
from llmexp.models.gpt2 import GPT2
from llmexp.models.llama import Llama
from llmexp.models.loss import WindowLoss
from llmexp.models.memory import saved_bytes
from tests.conftest import TINY

GPT = dict(vocab_size=320, max_position_embeddings=64, n_layers=3, n_heads=4, d_model=64, d_ff=256)


def kept(model: nn.Module, sequences: int) -> int:
    """Bytes that a real forward pass keeps besides the parameters."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        held[storage.data_ptr()] = storage
        return tensor

    tokens_bt = torch.zeros(sequences, 64, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        WindowLoss(model)(tokens_bt, tokens_bt)
    return sum(storage.nbytes() for address, storage in held.items() if address not in own)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("family", [GPT2, Llama])
def test_the_count_is_an_upper_bound_of_what_is_kept_and_near_it(family, dropout):
    model = (
        family(**GPT, dropout=dropout)
        if family is GPT2
        else family(**GPT, n_kv_heads=2, dropout=dropout)
    )
    with torch.device("meta"):
        twin = (
            family(**GPT, dropout=dropout)
            if family is GPT2
            else family(**GPT, n_kv_heads=2, dropout=dropout)
        )
    counted = saved_bytes(twin, 64, whole_logits=True)
    assert counted is not None
    assert kept(model, 4) <= 4 * counted < 2.5 * kept(model, 4)


def test_a_model_that_needs_its_own_device_is_not_counted():
    class Stubborn(nn.Module):
        def forward(self, tokens_bt):
            return torch.nn.functional.one_hot(tokens_bt.cpu(), 8).float()

    assert saved_bytes(Stubborn(), 8, whole_logits=True) is None


@pytest.mark.parametrize(
    ("memory", "accumulation", "said"),
    [
        (2**30, 12, "batch.micro_batch_size=24 with no accumulation"),
        (2**30, 1, None),
        (1_200_000, 12, "batch.micro_batch_size=8 with gradient_accumulation_steps 3"),
        (100_000, 12, None),
        (None, 12, None),
    ],
)
def test_a_hint_only_where_it_fits(memory, accumulation, said, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("llmexp.metrics.hardware.memory_bytes", lambda device: memory)
    cut = ["batch.micro_batch_size=2", f"batch.gradient_accumulation_steps={accumulation}"]
    assert (
        run(["plan", *TINY, "data=synthetic", "data.n_tokens=5000", "train.device=cpu", *cut]) == 0
    )
    out = " ".join(capsys.readouterr().out.split())
    assert (f"hint {said} computes the same" in out) if said else ("hint" not in out)
