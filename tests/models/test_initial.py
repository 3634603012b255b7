"""First values of parameters: the same numbers however ranks cut the parameters."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from llmexp.models.gpt2 import GPT2
from llmexp.models.initial import BLOCK, Blocks
from llmexp.models.llama import Llama
from llmexp.optim.twin import perturb

SHAPES = [(), (5,), (BLOCK + 3,), (7, 3), (300, 500), (3, BLOCK + 1), (2, 3, 40_000)]


def normal(block: Tensor, generator: torch.Generator) -> None:
    block.normal_(generator=generator)


@given(data=st.data(), shape=st.sampled_from(SHAPES))
def test_any_box_of_a_parameter_has_the_values_that_the_whole_one_has_there(
    data: Any, shape: tuple[int, ...]
) -> None:
    whole, cut = torch.empty(shape), torch.zeros(shape)
    for part, values in Blocks(7).drawn(whole, normal, torch.float32):
        part.copy_(values)
    ends = [sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2))) for n in shape]
    box = tuple(slice(a, b) for a, b in ends)
    piece = SimpleNamespace(local=cut[box], offset=tuple(a for a, _ in ends))
    blocks = Blocks(7, lambda _: piece)
    for part, values in blocks.drawn(cut, normal, torch.float32):
        part.copy_(values)
    assert torch.equal(cut[box], whole[box])
    cut[box] = 0
    assert not cut.any()
    following, after = torch.empty(3), torch.empty(3)  # the next parameter does not see the cut
    for own, other in ((following, Blocks(7)), (after, blocks)):
        if other is not blocks:
            list(other.drawn(whole.clone(), normal, torch.float32))
        piece = SimpleNamespace(local=own, offset=(0,))
        list(other.drawn(own, normal, torch.float32))
    assert torch.equal(following, after)


def test_blocks_share_no_numbers_and_are_not_correlated() -> None:
    """Neighbours have neighbouring seeds. Of n products of normals the mean is 1 / sqrt(n) off."""
    values, count = torch.empty(40, BLOCK), 40
    list(Blocks(2**32 - 20).drawn(values, normal, torch.float32))  # seeds go round here
    products = values.double() @ values.double().T / BLOCK
    off = products - torch.eye(count, dtype=torch.float64) * products.diagonal()
    assert off.abs().max() < 5.5 / math.sqrt(BLOCK)
    assert (products.diagonal() - 1).abs().max() < 5.5 * math.sqrt(2 / BLOCK)


def rows_of(rank: int, ranks: int, by_columns: bool) -> Any:
    """As FSDP cuts rows, or tensor parallelism the columns of what ends on the residual stream."""

    def piece_of(p: Tensor) -> SimpleNamespace:
        dim = 1 if by_columns and p.ndim == 2 else 0
        step = -(-p.shape[dim] // ranks)
        begin = min(rank * step, p.shape[dim])
        local = p.detach().narrow(dim, begin, min(step, p.shape[dim] - begin))
        return SimpleNamespace(
            local=local, offset=(0,) * dim + (begin,) + (0,) * (p.ndim - dim - 1)
        )

    return piece_of


@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_models_and_twins_begin_with_the_same_numbers_on_any_number_of_ranks(
    dtype: torch.dtype, by_columns: bool
) -> None:
    for build in (
        lambda: GPT2(513, 70, 2, 2, 130, 520),
        lambda: Llama(513, 70, 2, 2, 1, 132, 350, tied_head=False, qk_norm="head"),
    ):
        torch.manual_seed(5)
        whole: nn.Module = build().to(dtype)
        perturb(whole, 1, 1)
        for ranks in (1, 2, 3, 4):
            made: nn.Module = build().to(dtype)
            for rank in range(ranks):
                torch.manual_seed(5)
                made.init_weights(rows_of(rank, ranks, by_columns))
                perturb(made, 1, 1, rows_of(rank, ranks, by_columns))
            for (name, p), q in zip(whole.named_parameters(), made.parameters(), strict=True):
                assert torch.equal(p, q), (ranks, name)
