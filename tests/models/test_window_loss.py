"""The loss end against fp64 softmax arithmetic written out here."""

import functools
import math
import threading
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from llmexp.models import chunked
from llmexp.models import rows as by_rows
from llmexp.models.chunked import chunk_sizes, chunked_cross_entropy_sum
from llmexp.models.gpt2 import GPT2
from llmexp.models.llama import Llama
from llmexp.models.loss import SummedLoss, compiled_cross_entropy, plain_cross_entropy
from llmexp.models.operands import Dtypes, VocabShard
from tests.conftest import HANG_S
from tests.tools import by_kernel


def leaves(n: int, d: int, v: int, std: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    h = torch.randn(1, n, d, dtype=dtype).requires_grad_()
    return h, (torch.randn(v, d, dtype=dtype) * std).requires_grad_()


def tiny(tied_head: bool = True) -> Llama:
    torch.manual_seed(7)
    return Llama(50, 16, 2, 4, 2, 16, 32, tied_head=tied_head)


def reference(h: Tensor, weight: Tensor, targets: Tensor) -> tuple[float, np.ndarray, np.ndarray]:
    """Loss, gradient by h and gradient by weight in fp64 NumPy, by the textbook's formulas."""
    h64, w64, t = h.detach().double().numpy(), weight.detach().double().numpy(), targets.numpy()
    rows = np.flatnonzero(t != -100)
    z = h64[rows] @ w64.T
    z -= z.max(axis=1, keepdims=True)
    p = np.exp(z)
    p /= p.sum(axis=1, keepdims=True)
    at_target = (np.arange(len(rows)), t[rows])
    value = -(z[at_target] - np.log(np.exp(z).sum(axis=1))).sum()
    p[at_target] -= 1
    grad_h = np.zeros_like(h64)
    grad_h[rows] = p @ w64
    return float(value), grad_h, p.T @ h64[rows]


def relative_error(got: Tensor, expected: np.ndarray) -> float:
    return float(np.linalg.norm(got.double().numpy() - expected) / np.linalg.norm(expected))


@settings(max_examples=60)
@given(
    n=st.integers(1, 40),
    d=st.integers(1, 9),
    v=st.integers(1, 60),
    rows=st.integers(1, 17),
    tile=st.integers(1, 23),
    std=st.sampled_from([0.02, 1.0, 30.0]),
    masked=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 2**32),
    whole=st.booleans(),
)
def test_any_cut_is_exact_in_fp64(
    n: int, d: int, v: int, rows: int, tile: int, std: float, masked: float, seed: int, whole: bool
) -> None:
    """In tiles, as on a CPU, and in whole rows, as on an accelerator."""
    torch.manual_seed(seed)
    h, weight = leaves(n, d, v, std, torch.float64)
    targets = torch.randint(0, v, (1, n)).masked_fill(torch.rand(1, n) < masked, -100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked, "chunk_sizes", lambda *_: (rows, tile))
        patch.setattr(chunked, "in_rows", lambda _: whole)
        nll = chunked_cross_entropy_sum(h, weight, targets)
        (3 * nll).backward()
    value, grad_h, grad_weight = reference(h[0], weight, targets[0])
    # Logits stay below 1000, good to 1e-13; a loss or gradient entry sums at most 60 x 40 such
    # terms.
    scale = 1 + h.abs().max().item() + weight.abs().max().item()
    assert nll.dtype == torch.float64
    assert abs(nll.item() - value) < 1e-10 * scale
    assert np.abs(h.grad[0].numpy() - 3 * grad_h).max() < 1e-10 * scale
    assert np.abs(weight.grad.numpy() - 3 * grad_weight).max() < 1e-10 * scale
    if (targets == -100).all():
        assert nll.item() == 0
        assert not h.grad.any()
        assert not weight.grad.any()


@pytest.fixture(params=["tiles", "rows"])
def kernel_of(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The chunked loss of a CPU, and that of an accelerator in chunks of 512 rows."""
    monkeypatch.setattr(chunked, "in_rows", lambda _: request.param == "rows")
    monkeypatch.setattr(by_rows, "chunk_rows", lambda *_: 512)
    return request.param


@pytest.mark.parametrize("n", [4, 1100])
@pytest.mark.parametrize("std", [0.02, 0.4])  # of the weights: as initialised, and sharpened
@pytest.mark.usefixtures("kernel_of")
def test_fp32_value_and_gradients(n: int, std: float) -> None:
    torch.manual_seed(0)
    h, weight = leaves(n, 64, 5000, std, torch.float32)
    targets = torch.randint(0, 5000, (1, n))
    targets[0, 1] = -100
    nll = chunked_cross_entropy_sum(h, weight, targets)
    nll.backward()
    value, grad_h, grad_weight = reference(h[0], weight, targets[0])
    assert nll.dtype == h.grad.dtype == weight.grad.dtype == torch.float32
    assert nll.item() == pytest.approx(value, rel=1e-6)
    # Products of 64 terms, then softmax: a handful of roundings of 2^-24 each.
    assert relative_error(h.grad[0], grad_h) < 2e-6
    assert relative_error(weight.grad, grad_weight) < 2e-6


@pytest.mark.usefixtures("kernel_of")
def test_a_loss_far_below_one_keeps_its_digits() -> None:
    """Confident rows: the loss is the log of one plus little, with logits of 60 around it."""
    torch.manual_seed(1)
    weight = torch.randn(3000, 16)
    targets = torch.arange(8)[None] * 300
    h = 60 * F.normalize(weight[targets], dim=-1)
    weight = F.normalize(weight, dim=-1).requires_grad_()
    value, _, _ = reference(h[0], weight, targets[0])
    assert 1e-6 < value < 0.1
    # log(1 + little) is good to half a unit of 1 in fp32, 2^-24 a row, and the logits' own error of
    # 4e-6 enters exp(z - max) relatively. A difference of logits near 60 would be off by 4e-6 a
    # row.
    got = chunked_cross_entropy_sum(h, weight, targets).item()
    assert abs(got - value) < 8 * 2**-23 + 1e-5 * value


@pytest.fixture(params=["emulated", "native"])
def low_precision_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of a CPU with 16-bit floats, whatever instructions this one has."""
    native = request.param == "native"
    monkeypatch.setattr(
        Dtypes,
        "of",
        lambda h, weight: Dtypes(torch.bfloat16, torch.bfloat16 if native else torch.float32),
    )
    return request.param


@pytest.mark.usefixtures("kernel_of")
@pytest.mark.parametrize("n", [4, 700])
@pytest.mark.parametrize("std", [0.02, 0.4])  # of the weights: as initialised, and sharpened
def test_bf16_value(low_precision_path: str, n: int, std: float) -> None:
    torch.manual_seed(2)
    h, weight = leaves(n, 64, 8192, std, torch.float32)
    targets = torch.randint(0, 8192, (1, n))
    with torch.autocast("cpu", torch.bfloat16):
        nll = chunked_cross_entropy_sum(h, weight, targets)
    value, _, _ = reference(h[0], weight, targets[0])
    assert nll.dtype == torch.float32
    # As initialised every row is near ln 8192, so a rounding of rows to bf16 (2^-9) would add up;
    # it must not be there. Sharpened logits of deviation 0.4 x sqrt(64) = 3.2 carry three
    # independent roundings (h, weight, logit) of deviation at most 2^-9 / sqrt(3) each; rows are
    # independent. Four deviations of their sum, and 2e-4.
    deviation = 0.0 if std == 0.02 else 3.2 * 2**-9 * math.sqrt(n)
    assert abs(nll.item() - value) < 4 * deviation + 2e-4 * value


@pytest.mark.usefixtures("kernel_of")
@pytest.mark.parametrize("std", [0.02, 0.4])
def test_bf16_gradients_are_no_worse_than_autocast(low_precision_path: str, std: float) -> None:
    torch.manual_seed(4)
    h, weight = leaves(600, 64, 4096, std, torch.float32)
    targets = torch.randint(0, 4096, (1, 600))
    _, grad_h, grad_weight = reference(h[0], weight, targets[0])
    errors = {}
    for way in ("plain", "chunked"):
        h.grad = weight.grad = None
        with torch.autocast("cpu", torch.bfloat16):
            if way == "plain":
                nll = plain_cross_entropy(F.linear(h, weight), targets)
            else:
                nll = chunked_cross_entropy_sum(h, weight, targets)
        nll.backward()
        errors[way] = relative_error(h.grad[0], grad_h), relative_error(weight.grad, grad_weight)
    # The two round at different places: equal errors up to a few per cent, smaller ones gladly.
    assert errors["chunked"][0] < 1.05 * errors["plain"][0]
    assert errors["chunked"][1] < 1.05 * errors["plain"][1]


@pytest.mark.usefixtures("kernel_of")
def test_fp16_keeps_small_probabilities() -> None:
    torch.manual_seed(5)
    h, weight = leaves(64, 32, 50304, 0.02, torch.float32)
    targets = torch.randint(0, 50304, (1, 64))
    with torch.autocast("cpu", torch.float16):
        nll = chunked_cross_entropy_sum(h, weight, targets)
    (nll * 65536).backward()  # as a gradient scaler does
    value, grad_h, grad_weight = reference(h[0], weight, targets[0])
    assert nll.item() == pytest.approx(value, rel=2e-4)
    # A row that is nobody's target has softmax (2e-5, subnormal in fp16) as its only source of
    # gradient.
    other = np.setdiff1d(np.arange(50304), targets.numpy())
    # Operands rounded to 11 bits: 2^-11 each, before averaging.
    assert relative_error(h.grad[0] / 65536, grad_h) < 1e-3
    assert relative_error(weight.grad[other] / 65536, grad_weight[other]) < 1e-3


@pytest.mark.usefixtures("kernel_of")
def test_bf16_parameters_get_bf16_gradients() -> None:
    torch.manual_seed(6)
    h, weight = leaves(20, 16, 300, 0.02, torch.bfloat16)
    targets = torch.randint(0, 300, (1, 20))
    nll = chunked_cross_entropy_sum(h, weight, targets)
    nll.backward()
    value, _, grad_weight = reference(h[0].float(), weight.float(), targets[0])
    assert (nll.dtype, h.grad.dtype, weight.grad.dtype) == (
        torch.float32,
        torch.bfloat16,
        torch.bfloat16,
    )
    assert nll.item() == pytest.approx(value, rel=2e-4)
    assert relative_error(weight.grad.float(), grad_weight) < 2**-8


def compile_counter() -> Any:
    """A backend that runs a graph as it is, and counts them. torch's compiler takes more than a
    second to import, also in processes that run other tests."""
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    return CompileCounter()


@pytest.mark.parametrize(("kind", "n"), [("fp32", 1030), ("bf16", 1024)])
def test_one_small_graph_serves_all_chunks(
    kind: str, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an accelerator that compiles: the last chunk too, evaluation too. The head's copy begins
    its rows at aligned places, and its gradient does not know of it."""
    graphs = compile_counter()
    compiled = torch.compile(by_rows.local_softmax, dynamic=False, backend=graphs)
    monkeypatch.setattr(by_rows, "_compiled_softmax", lambda: compiled)
    monkeypatch.setattr(by_rows, "chunk_rows", lambda *_: 256)
    monkeypatch.setattr(chunked, "in_rows", lambda _: True)
    torch.manual_seed(16)
    h, weight = leaves(n, 64, 5003, 0.02, torch.float32)
    targets = torch.randint(0, 5003, (1, n)).masked_fill(torch.rand(1, n) < 0.1, -100)
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "bf16"):
        nll = chunked_cross_entropy_sum(h, weight, targets, None, True)
        with torch.no_grad():
            assert chunked_cross_entropy_sum(h, weight, targets, None, True) == nll
    nll.backward()
    assert graphs.frame_count == 1
    value, grad_h, grad_weight = reference(h[0], weight, targets[0])
    assert nll.item() == pytest.approx(value, rel=2e-4 if kind == "bf16" else 1e-6)
    # As above: in bf16 one rounding each of h, weight, the logits and their softmax.
    most = 2**-8 if kind == "bf16" else 2e-6
    assert relative_error(h.grad[0], grad_h) < most
    assert relative_error(weight.grad, grad_weight) < most
    assert weight.grad.shape == (5003, 64)


class MatrixProducts(TorchDispatchMode):
    """Counts matrix products."""

    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += func.overloadpacket in (
            torch.ops.aten.mm,
            torch.ops.aten.addmm,
            torch.ops.aten.addmm_,
        )
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("needs_h", "needs_weight", "products"), [(True, True, 3), (True, False, 2), (False, True, 2)]
)
def test_only_the_needed_gradients_are_computed(
    needs_h: bool, needs_weight: bool, products: int
) -> None:
    h, weight = leaves(30, 8, 100, 1.0, torch.float32)  # one chunk, one tile
    h.requires_grad_(needs_h)
    weight.requires_grad_(needs_weight)
    targets = torch.randint(0, 100, (1, 30))
    with MatrixProducts() as counter:
        chunked_cross_entropy_sum(h, weight, targets).backward()
    assert counter.calls == products
    assert (h.grad is not None, weight.grad is not None) == (needs_h, needs_weight)
    with torch.no_grad(), MatrixProducts() as counter:
        nll = chunked_cross_entropy_sum(h, weight, targets)
    assert counter.calls == 1
    assert not nll.requires_grad


class LargestTensor(TorchDispatchMode):
    """Notes the number of elements of the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.numel = max(self.numel, out.numel())
        return out


def test_the_logits_are_never_whole() -> None:
    n, d, v = 1100, 4, 5000
    h, weight = leaves(n, d, v, 1.0, torch.float32)
    rows, tile = chunk_sizes(h.device, v)
    with LargestTensor() as largest:
        chunked_cross_entropy_sum(h, weight, torch.randint(0, v, (1, n))).backward()
    assert largest.numel == rows * tile < n * v


@pytest.mark.usefixtures("kernel_of")
def test_gradients_are_given_away_once() -> None:
    h, weight = leaves(5, 8, 100, 1.0, torch.float32)
    nll = chunked_cross_entropy_sum(h, weight, torch.zeros(1, 5, dtype=torch.long))
    nll.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward"):
        nll.backward()


# A vocabulary that is split over ranks


class Threads:
    """Ranks as threads of this process; what they reduce meets in a list."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.values: list[Tensor] = [torch.empty(0)] * ranks
        self.reduced: list[tuple[str, int]] = []
        self.barrier = threading.Barrier(ranks, timeout=HANG_S)

    def shard(self, rank: int, size: int) -> VocabShard:
        def together(name: str, combine: Callable[[Tensor], Tensor], value: Tensor) -> Tensor:
            self.reduced += [(name, value.numel())] if rank == 0 else []
            self.values[rank] = value
            self.barrier.wait()
            out = combine(torch.stack(self.values))
            self.barrier.wait()
            return value.copy_(out)

        return VocabShard(
            first=rank * size // self.ranks,
            size=size,
            sum=functools.partial(together, "sum", lambda values: values.sum(0)),
            max=functools.partial(together, "max", lambda values: values.amax(0)),
            gather=lambda value: value,
        )

    def run(self, work: Callable[[int], tuple]) -> list[tuple]:
        with ThreadPoolExecutor(self.ranks) as pool:
            return list(pool.map(work, range(self.ranks)))


@settings(max_examples=60)
@given(
    ranks=st.integers(1, 4),
    part=st.integers(1, 15),
    n=st.integers(1, 40),
    d=st.integers(1, 9),
    rows=st.integers(1, 17),
    tile=st.integers(1, 9),
    std=st.sampled_from([0.02, 1.0, 30.0]),
    masked=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 2**32),
    whole=st.booleans(),
)
def test_any_split_of_the_vocabulary_is_exact_in_fp64(
    ranks: int,
    part: int,
    n: int,
    d: int,
    rows: int,
    tile: int,
    std: float,
    masked: float,
    seed: int,
    whole: bool,
) -> None:
    torch.manual_seed(seed)
    h, weight = leaves(n, d, ranks * part, std, torch.float64)
    targets = torch.randint(0, ranks * part, (1, n)).masked_fill(torch.rand(1, n) < masked, -100)
    threads = Threads(ranks)

    def work(rank: int) -> tuple[Tensor, Tensor, Tensor]:
        shard = threads.shard(rank, ranks * part)
        own_h, own_weight = (
            x.detach().requires_grad_() for x in (h, weight[shard.first : shard.first + part])
        )
        nll = chunked_cross_entropy_sum(own_h, own_weight, targets, shard)
        return nll.detach(), *torch.autograd.grad(3 * nll, (own_h, own_weight))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked, "chunk_sizes", lambda *_: (rows, tile))
        patch.setattr(chunked, "in_rows", lambda _: whole)
        found = threads.run(work)
    value, grad_h, grad_weight = reference(h[0], weight, targets[0])
    # As in test_any_cut_is_exact_in_fp64; the ranks' sums add no more terms.
    scale = 1 + h.abs().max().item() + weight.abs().max().item()
    for nll, own_grad_h, _ in found:
        assert abs(nll.item() - value) < 1e-10 * scale
        assert np.abs(own_grad_h[0].numpy() - 3 * grad_h).max() < 1e-10 * scale
    assert (
        np.abs(torch.cat([w for _, _, w in found]).numpy() - 3 * grad_weight).max() < 1e-10 * scale
    )


# One target, the rows of the head on each rank, and the one of them with a weight that is nan.
SPOILED: dict[str, tuple[int, list[range], int | None]] = {
    "a target below the vocabulary": (-1, [range(100)], None),
    "a target above it": (100, [range(100)], None),
    "a target far above it": (10**6, [range(100)], None),
    "a weight that is nan": (45, [range(100)], 70),
    "a weight that is nan on one of two ranks": (45, [range(50), range(50, 100)], 70),
    "a target between the parts of two ranks": (45, [range(40), range(50, 90)], None),
    "a target in the parts of both": (45, [range(60), range(40, 100)], None),
}


@pytest.mark.usefixtures("kernel_of")
@pytest.mark.parametrize("name", SPOILED)
def test_what_spoils_the_loss_spoils_it_on_all_ranks(name: str) -> None:
    target, parts, bad = SPOILED[name]
    h, weight = leaves(5, 8, 100, 1.0, torch.float32)
    if bad is not None:
        weight.detach()[bad, 3] = math.nan
    targets, threads = torch.tensor([[1, 2, target, 60, 80]]), Threads(len(parts))

    def work(rank: int) -> tuple[float, float]:
        rows, shard = parts[rank], threads.shard(rank, 100)
        own, shard = weight.detach()[rows.start : rows.stop], replace(shard, first=rows.start)
        own_h = h.detach().requires_grad_()
        nll = chunked_cross_entropy_sum(own_h, own, targets, shard if len(parts) > 1 else None)
        with torch.no_grad():
            again = chunked_cross_entropy_sum(
                own_h, own, targets, shard if len(parts) > 1 else None
            )
        return nll.item(), again.item()

    assert all(math.isnan(nll) for found in threads.run(work) for nll in found)


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_two_ranks_find_the_loss_and_gradients_of_one(kind: str) -> None:
    """With two small reductions a chunk, and one of the hidden gradient."""
    n, d, v = 1100, 64, 5000  # three chunks of rows, and on each of two ranks two tiles
    torch.manual_seed(12)
    h, weight = leaves(n, d, v, 0.4 if kind == "fp32" else 0.02, torch.float32)
    targets = torch.randint(0, v, (1, n)).masked_fill(torch.rand(1, n) < 0.2, -100)
    threads = Threads(2)

    def work(rank: int) -> tuple[Tensor, ...]:
        shard = threads.shard(rank, v)
        own_h, own_weight = (
            x.detach().requires_grad_() for x in (h, weight[shard.first : shard.first + v // 2])
        )
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "bf16"):
            nll = chunked_cross_entropy_sum(own_h, own_weight, targets, shard)
            with torch.no_grad():
                assert chunked_cross_entropy_sum(own_h, own_weight, targets, shard) == nll
        return nll.detach(), *torch.autograd.grad(nll, (own_h, own_weight))

    (nll, grad_h, first), (nll_1, grad_h_1, second) = threads.run(work)
    chunks = [(name, rows * k) for rows in (512, 512, 76) for name, k in (("max", 1), ("sum", 3))]
    assert threads.reduced == [*chunks, ("sum", n * d), *chunks]
    assert torch.equal(nll, nll_1)
    assert torch.equal(grad_h, grad_h_1)
    value, expected_h, expected_weight = reference(h[0], weight, targets[0])
    errors = (
        relative_error(grad_h[0], expected_h),
        relative_error(torch.cat((first, second)), expected_weight),
    )
    if kind == "bf16":
        # As without a split: the loss is free of roundings of rows, the gradients are no worse than
        # autocast's.
        with torch.autocast("cpu", torch.bfloat16):
            plain_cross_entropy(F.linear(h, weight), targets).backward()
        plain = relative_error(h.grad[0], expected_h), relative_error(weight.grad, expected_weight)
        assert nll.item() == pytest.approx(value, rel=2e-4)
        assert errors[0] < 1.05 * plain[0]
        assert errors[1] < 1.05 * plain[1]
    else:
        assert nll.item() == pytest.approx(value, rel=1e-6)  # as in test_fp32_value_and_gradients
        assert max(errors) < 2e-6


# SummedLoss


@pytest.mark.parametrize(
    "make", [lambda: GPT2(50, 16, 2, 2, 16, 32), tiny, lambda: tiny(tied_head=False)]
)
def test_kernels_agree_on_whole_models(make) -> None:
    """Also where the output projection is the embedding, whose two gradients add up."""
    model = make().double()
    tokens = torch.randint(0, 50, (3, 16))
    targets = torch.randint(0, 50, (3, 16)).masked_fill(torch.rand(3, 16) < 0.3, -100)
    results = {}
    for kernel in ("plain", "chunked"):
        model.zero_grad()
        nll = by_kernel(model, kernel)(tokens, targets)
        nll.backward()
        results[kernel] = nll.detach(), [parameter.grad for parameter in model.parameters()]
    torch.testing.assert_close(results["plain"], results["chunked"], rtol=1e-11, atol=1e-12)


def test_auto_chooses_by_vocabulary_and_model() -> None:
    with torch.device("meta"):
        small, large = GPT2(320, 16, 1, 1, 8, 8), GPT2(50304, 16, 1, 1, 8, 8)
    assert SummedLoss(small).loss_kernel(torch.device("cpu")) == "plain"
    assert by_kernel(large, "plain").loss_kernel(torch.device("cpu")) == "plain"
    assert SummedLoss(nn.Linear(3, 50304)).loss_kernel(torch.device("cpu")) == "plain"
    assert (
        SummedLoss(GPT2(2048, 16, 1, 1, 8, 8)).loss_kernel(torch.device("cpu"))
        == "chunked(rows=512, vocab=2048)"
    )


@pytest.mark.parametrize("kernel", ["plain", "chunked"])
def test_without_targets_it_returns_the_models_logits(kernel: str) -> None:
    model = tiny()
    window_loss = by_kernel(model, kernel)
    tokens = torch.randint(0, 50, (3, 16))
    assert torch.equal(window_loss(tokens), model(tokens))
    assert not window_loss(tokens).requires_grad


def test_a_head_that_is_split_is_chunked() -> None:
    shard = Threads(1).shard(0, 50)
    assert not SummedLoss(Foreign()).has_head()
    window_loss = by_kernel(tiny(), "plain")
    window_loss.share_vocabulary(shard)
    assert window_loss.loss_kernel(torch.device("cpu")) == "chunked(rows=512, vocab=50)"


class Foreign(nn.Module):
    """A user's own model: nothing but logits."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_foreign_model_needs_only_logits(dtype: torch.dtype) -> None:
    torch.manual_seed(8)
    model = Foreign().to(dtype)
    tokens, targets = torch.randint(0, 50, (2, 3, 16))
    nll = SummedLoss(model)(tokens, targets)
    nll.backward()
    value, _, _ = reference(model.table(tokens).flatten(0, 1), torch.eye(50), targets.flatten())
    assert nll.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert nll.item() == pytest.approx(value, rel=1e-6)
    assert SummedLoss(model)(tokens, torch.full_like(targets, -100)).item() == 0


def test_a_foreign_model_with_another_output_is_named() -> None:
    tokens = torch.randint(0, 50, (3, 16))
    window_loss = SummedLoss(nn.Sequential(nn.Embedding(50, 2), nn.Flatten()))
    with pytest.raises(ValueError, match=r"model\._target_: Sequential returned \(3, 32\)"):
        window_loss(tokens, tokens)
    with pytest.raises(ValueError, match=r"Sequential returned \(3, 32\)"):
        window_loss(tokens)


@pytest.mark.parametrize("make", [lambda: GPT2(50, 16, 10, 2, 16, 32), tiny, Foreign])
def test_compiled_blocks_share_a_graph_and_leave_names_and_values(
    make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for a model without blocks, whose trunk is compiled. Another length of text compiles
    nothing."""
    graphs = compile_counter()  # the same operations in the same order
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=graphs))
    torch.manual_seed(14)
    model = make()
    tokens, targets = torch.randint(0, 50, (2, 2, 16))
    window_loss = SummedLoss(model)
    eager = window_loss(tokens, targets)
    eager_gradients = torch.autograd.grad(eager, list(model.parameters()))
    logits = model(tokens[:, :7])
    names = list(window_loss.state_dict())
    window_loss.compile_blocks()
    compiled = window_loss(tokens, targets)
    compiled_gradients = torch.autograd.grad(compiled, list(model.parameters()))
    assert graphs.frame_count == 1
    assert torch.equal(eager, compiled)
    assert all(torch.equal(a, b) for a, b in zip(eager_gradients, compiled_gradients, strict=True))
    assert torch.equal(window_loss(tokens[:, :7]), logits)
    assert graphs.frame_count == 1
    assert (
        list(window_loss.state_dict()) == names == [f"model.{name}" for name in model.state_dict()]
    )


@pytest.mark.parametrize(("whole", "dropout"), [(False, 0.0), (True, 0.0), (True, 0.5)])
def test_evaluation_compiles_nothing_of_its_own(
    whole: bool, dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the loss inside of the graph, as on an accelerator, and outside; where dropout makes
    evaluation another function it runs eagerly."""
    graphs = compile_counter()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=graphs))
    monkeypatch.setattr(SummedLoss, "fuses_loss", lambda *_: whole)
    torch.manual_seed(15)
    model = GPT2(2048, 16, 1, 2, 16, 32, dropout).double()
    tokens, targets = torch.randint(0, 2048, (2, 2, 16))
    window_loss = SummedLoss(model)
    with window_loss.evaluating():
        expected = window_loss(tokens, targets)
    window_loss.compile_trunk()
    trained = window_loss(tokens, targets)
    gradients = torch.autograd.grad(trained, list(model.parameters()))
    assert graphs.frame_count == 1
    with window_loss.evaluating():
        found = window_loss(tokens, targets)
    assert graphs.frame_count == 1
    assert not found.requires_grad
    assert model.training
    assert torch.is_grad_enabled()
    # fp64, in another order of summation inside of the graph
    assert found.item() == pytest.approx(expected.item(), rel=1e-12)
    if not dropout:
        assert trained.item() == pytest.approx(expected.item(), rel=1e-12)
        eager = torch.autograd.grad(SummedLoss(model)(tokens, targets), list(model.parameters()))
        torch.testing.assert_close(gradients, eager, rtol=1e-11, atol=1e-12)


def test_logits_are_whole_in_a_compiled_step_while_they_are_small_beside_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = types.SimpleNamespace(total_memory=10 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: memory)
    device = torch.device("cuda")
    with torch.device("meta"):
        window_loss = SummedLoss(GPT2(50257, 16, 1, 1, 8, 8))
    most = 2**30 // (2 * 50257)  # rows whose logits take a tenth of the memory in 16 bits
    assert window_loss.fuses_loss(most, device)
    assert not window_loss.fuses_loss(most + 1, device)
    assert not window_loss.fuses_loss(1, torch.device("cpu"))
    assert window_loss.loss_kernel(device, most) == "plain, compiled with the model"
    assert window_loss.loss_kernel(device, most + 1).startswith("chunked(")
    assert window_loss.loss_kernel(device).startswith("chunked(")
    assert SummedLoss(Foreign()).fuses_loss(10**9, device)  # it has logits only
    window_loss.share_vocabulary(Threads(1).shard(0, 50257))
    assert not window_loss.fuses_loss(1, device)


@pytest.mark.parametrize("vocab_size", [37, 64, 130])
def test_the_loss_of_a_compiled_step(vocab_size):
    """Rows of zeros pad the head: value and gradients are those of the plain loss, in float64."""
    torch.manual_seed(5)
    sizes = {"n_layers": 1, "n_heads": 2, "d_model": 8, "d_ff": 12}
    model = GPT2(vocab_size=vocab_size, max_position_embeddings=16, **sizes).double()
    tokens, targets = torch.randint(0, vocab_size, (2, 3, 16))
    targets[torch.rand(3, 16) < 0.3] = -100
    found = []
    compiled = SummedLoss(model)._fused(tokens, targets)
    for loss in (compiled, plain_cross_entropy(model(tokens), targets)):
        model.zero_grad()
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    for ours, wanted in zip(*found, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-13)
    nobody = torch.full((1, 2), -100)
    assert compiled_cross_entropy(torch.randn(1, 2, vocab_size), nobody, vocab_size) == 0
