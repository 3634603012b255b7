"""Attention inside documents: a packed window computes what its documents compute alone."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from llmexp.models import documents
from llmexp.models.documents import find_documents
from llmexp.models.gpt2 import GPT2
from llmexp.models.llama import Llama
from tests.tools import by_kernel

END = 31
DOCUMENTS = st.lists(
    st.lists(st.integers(0, END - 1), max_size=9).map(lambda ids: [*ids, END]),
    min_size=1,
    max_size=6,
)


def row_of(ids: list[int]) -> Tensor:
    return torch.tensor([ids], dtype=torch.long)


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(1)
    sizes = {"vocab_size": 32, "max_position_embeddings": 64, "n_layers": 2, "n_heads": 4}
    widths = {"d_model": 16, "d_ff": 24}
    if kind == "gpt2":
        model: nn.Module = GPT2(**sizes, **widths)
    else:
        model = Llama(**sizes, **widths, n_kv_heads=2)
    model.document_end = END
    with torch.no_grad():  # larger than at their start, where attention hardly matters
        for parameter in model.parameters():
            parameter.mul_(4)
    return model.double()


def target_of(tokens: Tensor) -> Tensor:
    """The next id; none for what follows a document's end, or the window's."""
    targets = tokens.roll(-1, dims=1)
    targets[:, -1] = -100
    return torch.where(tokens == END, -100, targets)


@pytest.mark.parametrize("kernel", ["plain", "chunked"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@settings(max_examples=15)
@given(lists=DOCUMENTS, tail=st.lists(st.integers(0, END - 1), max_size=5))
def test_a_packed_window_is_the_sum_of_its_documents(kind, kernel, lists, tail):
    """By spans and by masks; the other row has them in another order."""
    loss = by_kernel(model_of(kind), kernel)
    alone = 2 * sum(loss(ids, target_of(ids)) for ids in map(row_of, [*lists, tail]) if ids.numel())
    alone.backward()
    wanted = [p.grad.clone() for p in loss.parameters()]
    packed = torch.cat(
        [row_of([*itertools.chain(*order), *tail]) for order in (lists, lists[::-1])]
    )
    for short in (1, 10**6):
        loss.zero_grad()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(documents, "_SHORT", short)
            assert (find_documents(packed, END).spans is None) == (short > 1)
            whole = loss(packed, target_of(packed))
        whole.backward()
        assert whole.item() == pytest.approx(alone.item(), rel=1e-12)
        for p, want in zip(loss.parameters(), wanted, strict=True):
            torch.testing.assert_close(p.grad, want, rtol=1e-12, atol=1e-12)


def test_documents_in_bf16_are_attended_to_in_fp32(monkeypatch):
    """Where autocast is on: their kernels in bf16 would be kept for each length of a document."""
    monkeypatch.setattr(documents, "_SHORT", 1)
    torch.manual_seed(0)
    tokens = torch.randint(0, END, (1, 60))
    tokens[0, [4, 21, 40]] = END
    q, k, v = torch.randn(3, 1, 2, 60, 8).bfloat16()
    found = find_documents(tokens, END)
    assert found.spans is not None
    wide = documents.attend(q.float(), k.float(), v.float(), found, 0.0)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(documents.attend(q, k, v, found, 0.0), wide.bfloat16())


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_a_graph_on_cuda_gets_blocks_that_mean_the_mask(monkeypatch):
    """In bfloat16, as there: inputs are exact, results and scores rounded."""
    torch.manual_seed(0)
    tokens = torch.randint(0, END, (2, 200))
    tokens[0, [3, 4, 129]] = END
    with monkeypatch.context() as cuda:
        cuda.setattr(documents, "kind_of", lambda device: "cuda")
        cuda.setattr(torch.compiler, "is_compiling", lambda: True)
        found = find_documents(tokens, END)
    assert found.blocks is not None
    heads = [torch.randn(2, n, 200, 16, dtype=torch.bfloat16) for n in (4, 2, 2)]
    exact = [x.double() for x in heads]
    masked = documents.attend(*exact, found, 0.0, grouped=True)
    ours = documents.attend(*heads, found, 0.0, grouped=True)
    torch.testing.assert_close(ours.double(), masked, rtol=2**-7, atol=2**-7)
    alone = documents.attend(*exact, None, 0.0, grouped=True)
    assert (alone[0] - masked[0]).abs().max() > 0.1
    torch.testing.assert_close(alone[1], masked[1])
