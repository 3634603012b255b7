"""The loss end against fp64 softmax arithmetic written out here."""

import copy
import functools
import math
import threading
import types
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from llmexp.models.experts import experts_of
from llmexp.models.gpt2 import GPT2
from llmexp.models.llama import Llama
from llmexp.models.loss import SummedLoss, plain_cross_entropy
from llmexp.models.operands import Dtypes, VocabShard
from tests.conftest import HANG_S
from tests.tools import by_kernel

CPU = torch.device("cpu")


def operands(
    n: int, d: int, v: int, std: float, dtype: torch.dtype = torch.float32, masked: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, a head of that deviation, and targets."""
    h, weight = torch.randn(1, n, d, dtype=dtype), torch.randn(v, d, dtype=dtype) * std
    return h, weight, torch.randint(0, v, (1, n)).masked_fill(torch.rand(1, n) < masked, -100)


def reference(h: Tensor, weight: Tensor, targets: Tensor) -> tuple[float, np.ndarray, np.ndarray]:
    """Loss, gradient by h and gradient by weight in fp64 NumPy, by the textbook's formulas."""
    h64, w64, t = h[0].double().numpy(), weight.double().numpy(), targets[0].numpy()
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


class Threads:
    """Ranks as threads of this process; what they reduce meets in a list."""

    def __init__(self, ranks: int) -> None:
        self.values: list[Tensor] = [torch.empty(0)] * ranks
        self.reduced: list[tuple[str, int]] = []
        self.barrier = threading.Barrier(ranks, timeout=HANG_S)

    def shard(self, rank: int, first: int, size: int) -> VocabShard:
        def together(name: str, combine: Callable[[Tensor], Tensor], value: Tensor) -> Tensor:
            self.reduced += [(name, value.numel())] if rank == 0 else []
            self.values[rank] = value
            self.barrier.wait()
            out = combine(torch.stack(self.values))
            self.barrier.wait()
            return value.copy_(out)

        return VocabShard(
            first=first,
            size=size,
            sum=functools.partial(together, "sum", lambda values: values.sum(0)),
            max=functools.partial(together, "max", lambda values: values.amax(0)),
            gather=lambda value: value,
        )


def equal(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def computed(
    h: Tensor,
    weight: Tensor,
    targets: Tensor,
    parts: Sequence[range] = (),
    times: float = 1.0,
    amp: torch.dtype | None = None,
    compiled: bool = False,
) -> tuple[Tensor, Tensor, Tensor, list[tuple[str, int]]]:
    """Return the loss, the gradients of so many times it, and what ranks reduced.

    Each of `parts` is a rank's part of the vocabulary. Ranks find the same to the bit, and the same
    loss without gradients."""
    parts = parts or [range(len(weight))]
    threads = Threads(len(parts))

    def work(rank: int) -> tuple[Tensor, ...]:
        first, last = parts[rank].start, parts[rank].stop
        shard = threads.shard(rank, first, len(weight)) if len(parts) > 1 else None
        own = [x.detach().requires_grad_() for x in (h, weight[first:last])]
        with torch.autocast("cpu", amp, enabled=amp is not None):
            nll = chunked_cross_entropy_sum(*own, targets, shard, compiled)
            with torch.no_grad():
                equal(chunked_cross_entropy_sum(*own, targets, shard, compiled), nll)
        return nll.detach(), *torch.autograd.grad(nll, own, torch.full_like(nll, times))

    with ThreadPoolExecutor(len(parts)) as pool:
        found = list(pool.map(work, range(len(parts))))
    nll, grad_h, _ = found[0]
    for one in found:
        equal(one[:2], found[0][:2])
    return nll, grad_h[0], torch.cat([one[2] for one in found]), threads.reduced


def relative_error(got: Tensor, expected: np.ndarray) -> float:
    return float(np.linalg.norm(got.double().numpy() - expected) / np.linalg.norm(expected))


@settings(max_examples=80)
@given(
    sizes=st.tuples(*[st.integers(1, most) for most in (4, 60, 40, 9, 17, 23)]),
    std=st.sampled_from([0.02, 1.0, 30.0]),
    masked=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 2**32),
    whole=st.booleans(),
)
def test_any_cut_and_any_split_of_the_vocabulary_is_exact_in_fp64(sizes, std, masked, seed, whole):
    """In tiles, as on a CPU, and in whole rows, as on an accelerator."""
    torch.manual_seed(seed)
    ranks, most, n, d, rows, tile = sizes
    part = -(-most // ranks)
    h, weight, targets = operands(n, d, ranks * part, std, torch.float64, masked)
    parts = [range(rank * part, (rank + 1) * part) for rank in range(ranks)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked, "chunk_sizes", lambda *_: (rows, tile))
        patch.setattr(chunked, "in_rows", lambda _: whole)
        nll, *gradients, _ = computed(h, weight, targets, parts, 3.0)
    value, *wanted = reference(h, weight, targets)
    # Logits stay below 1000, good to 1e-13; a loss or gradient entry sums at most 60 x 40 such
    # terms.
    scale = 1 + h.abs().max().item() + weight.abs().max().item()
    assert nll.dtype == torch.float64
    assert abs(nll.item() - value) < 1e-10 * scale
    for ours, want in zip(gradients, wanted, strict=True):
        assert np.abs(ours.numpy() - 3 * want).max() < 1e-10 * scale
        assert (targets != -100).any() or not ours.any()
    assert (targets != -100).any() or nll == 0


@pytest.fixture(params=["tiles", "rows"])
def _kernel(request, monkeypatch):
    """The chunked loss of a CPU, and that of an accelerator in chunks of 512 rows."""
    monkeypatch.setattr(chunked, "in_rows", lambda _: request.param == "rows")
    monkeypatch.setattr(by_rows, "chunk_rows", lambda *_: 512)


@functools.cache
def known(std: float, n: int) -> tuple[Any, Any, list[float]]:
    """Return operands, what they give in fp64, and how far the gradients of autocast are off."""
    torch.manual_seed(4)
    h, weight, targets = operands(n, 64, 5000, std, masked=0.1)
    wanted = reference(h, weight, targets)
    own = h.clone().requires_grad_(), weight.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        plain_cross_entropy(F.linear(*own), targets).backward()
    off = [relative_error(x.grad.view(want.shape), want)
           for x, want in zip(own, wanted[1:], strict=True)]  # fmt: skip
    return (h, weight, targets), wanted, off


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("std", [0.02, 0.4])  # of the weights: as initialised, and sharpened
@pytest.mark.parametrize(
    ("kind", "ranks"), [("fp32", 1), ("fp32", 2), ("emulated", 1), ("emulated", 2), ("native", 1)]
)
def test_value_and_gradients_in_fp32_and_bf16(kind, ranks, std, monkeypatch):
    """Both ways of a CPU with 16-bit floats, whatever instructions this one has. Ranks have two
    small reductions a chunk, and one of the hidden gradient."""
    n = 1100 if kind == "fp32" else 600
    given_, (value, *wanted), autocast = known(std, n)
    amp = None
    if kind != "fp32":
        amp = torch.bfloat16
        dtypes = Dtypes(amp, amp if kind == "native" else torch.float32)
        monkeypatch.setattr(Dtypes, "of", lambda h, weight: dtypes)
    parts = [range(2500), range(2500, 5000)] if ranks == 2 else []
    nll, *gradients, reduced = computed(*given_, parts, amp=amp)
    assert nll.dtype == gradients[0].dtype == gradients[1].dtype == torch.float32
    errors = [relative_error(ours, want) for ours, want in zip(gradients, wanted, strict=True)]
    if kind == "fp32":
        assert nll.item() == pytest.approx(value, rel=1e-6)
        # Products of 64 terms, then softmax: a handful of roundings of 2^-24 each.
        assert max(errors) < 2e-6
    else:
        # As initialised every row is near ln 5000, so a rounding of rows to bf16 (2^-9) would add
        # up; it must not be there. Sharpened logits of deviation 0.4 x sqrt(64) = 3.2 carry three
        # independent roundings (h, weight, logit) of deviation at most 2^-9 / sqrt(3) each; rows
        # are independent. Four deviations of their sum, and 2e-4.
        deviation = 0.0 if std == 0.02 else 3.2 * 2**-9 * math.sqrt(n)
        assert abs(nll.item() - value) < 4 * deviation + 2e-4 * value
        # Autocast rounds at other places: equal errors up to a few per cent, smaller ones gladly.
        assert errors[0] < 1.05 * autocast[0]
        assert errors[1] < 1.05 * autocast[1]
    pass_ = ["max", "sum"] * math.ceil(n / 512)
    assert [name for name, _ in reduced] == ([*pass_, "sum", *pass_] if ranks == 2 else [])
    assert sorted(numbers for _, numbers in reduced if numbers > 3 * 512) == [n * 64] * (ranks - 1)


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("parts", [[], [range(1000), range(1000, 3000)]])
def test_a_loss_far_below_one_keeps_its_digits(parts):
    """Confident rows: the loss is the log of one plus little, with logits of 60 around it."""
    torch.manual_seed(1)
    weight = torch.randn(3000, 16)
    targets = torch.arange(8)[None] * 300
    h, weight = 60 * F.normalize(weight[targets], dim=-1), F.normalize(weight, dim=-1)
    value, _, _ = reference(h, weight, targets)
    assert 1e-6 < value < 0.1
    # log(1 + little) is good to half a unit of 1 in fp32, 2^-24 a row, and the logits' own error of
    # 4e-6 enters exp(z - max) relatively. A difference of logits near 60 would be off by 4e-6 a
    # row.
    assert abs(computed(h, weight, targets, parts)[0].item() - value) < 8 * 2**-23 + 1e-5 * value


@pytest.mark.usefixtures("_kernel")
def test_fp16_keeps_small_probabilities():
    torch.manual_seed(5)
    given_ = operands(64, 32, 50304, 0.02)
    scale = 65536  # as of a gradient scaler
    nll, own_h, own_weight, _ = computed(*given_, times=scale, amp=torch.float16)
    value, grad_h, grad_weight = reference(*given_)
    assert nll.item() == pytest.approx(value, rel=2e-4)
    # A row that is nobody's target has softmax (2e-5, subnormal in fp16) as its only source of
    # gradient.
    other = np.setdiff1d(np.arange(50304), given_[2].numpy())
    # Operands rounded to 11 bits: 2^-11 each, before averaging.
    assert relative_error(own_h / scale, grad_h) < 1e-3
    assert relative_error(own_weight[other] / scale, grad_weight[other]) < 1e-3


@pytest.mark.usefixtures("_kernel")
def test_bf16_parameters_get_bf16_gradients():
    torch.manual_seed(6)
    given_ = operands(20, 16, 300, 0.02, torch.bfloat16)
    nll, *gradients, _ = computed(*given_)
    value, _, grad_weight = reference(*given_)
    assert (nll.dtype, *(g.dtype for g in gradients)) == (torch.float32, *[torch.bfloat16] * 2)
    assert nll.item() == pytest.approx(value, rel=2e-4)
    assert relative_error(gradients[1], grad_weight) < 2**-8


def compile_counter() -> Any:
    """A backend that runs a graph as it is, and counts them. torch's compiler takes more than a
    second to import, also in processes that run other tests."""
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    return CompileCounter()


@pytest.mark.parametrize(("amp", "n"), [(None, 1030), (torch.bfloat16, 1024)])
def test_one_small_graph_serves_all_chunks(amp, n, monkeypatch):
    """Of an accelerator that compiles: the last chunk too, evaluation too. The head's copy begins
    its rows at aligned places, and its gradient does not know of it."""
    graphs = compile_counter()
    own = torch.compile(by_rows.local_softmax, dynamic=False, backend=graphs)
    monkeypatch.setattr(by_rows, "_compiled_softmax", lambda: own)
    monkeypatch.setattr(by_rows, "chunk_rows", lambda *_: 256)
    monkeypatch.setattr(chunked, "in_rows", lambda _: True)
    torch.manual_seed(16)
    given_ = operands(n, 64, 5003, 0.02, masked=0.1)
    nll, *gradients, _ = computed(*given_, amp=amp, compiled=True)
    assert graphs.frame_count == 1
    value, *wanted = reference(*given_)
    assert nll.item() == pytest.approx(value, rel=2e-4 if amp else 1e-6)
    for ours, want in zip(gradients, wanted, strict=True):
        assert ours.shape == want.shape
        # As above: in bf16 one rounding each of h, weight, the logits and their softmax.
        assert relative_error(ours, want) < (2**-8 if amp else 2e-6)


class Watched(TorchDispatchMode):
    """Counts matrix products, and elements of the largest tensor that any operation returns."""

    products = largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        aten = torch.ops.aten
        self.products += func.overloadpacket in (aten.mm, aten.addmm, aten.addmm_)
        out = func(*args, **(kwargs or {}))
        self.largest = max(self.largest, out.numel() if isinstance(out, Tensor) else 0)
        return out


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize(
    ("needs_h", "needs_weight", "products"), [(True, True, 3), (True, False, 2), (False, True, 2)]
)
def test_only_the_needed_gradients_are_computed_and_given_away_once(
    needs_h, needs_weight, products
):
    h, weight, targets = operands(30, 8, 100, 1.0)  # one chunk, one tile
    h.requires_grad_(needs_h)
    weight.requires_grad_(needs_weight)
    with Watched() as watched:
        nll = chunked_cross_entropy_sum(h, weight, targets)
        nll.backward(retain_graph=True)
    assert watched.products == products
    assert (h.grad is not None, weight.grad is not None) == (needs_h, needs_weight)
    with pytest.raises(RuntimeError, match="second backward"):
        nll.backward()
    with torch.no_grad(), Watched() as watched:
        assert not chunked_cross_entropy_sum(h, weight, targets).requires_grad
    assert watched.products == 1


def test_the_logits_are_never_whole():
    h, weight, targets = operands(1100, 4, 5000, 1.0)
    rows, tile = chunk_sizes(CPU, 5000)
    with Watched() as watched:
        chunked_cross_entropy_sum(h.requires_grad_(), weight.requires_grad_(), targets).backward()
    assert watched.largest == rows * tile < 1100 * 5000


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


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("name", SPOILED)
def test_what_spoils_the_loss_spoils_it_on_all_ranks(name):
    target, parts, bad = SPOILED[name]
    h, weight, _ = operands(5, 8, 100, 1.0)
    if bad is not None:
        weight[bad, 3] = math.nan
    assert computed(h, weight, torch.tensor([[1, 2, target, 60, 80]]), parts)[0].isnan()


# SummedLoss


def tiny(**more: Any) -> Llama:
    torch.manual_seed(7)
    return Llama(50, 16, 2, 4, 2, 16, 32, **more)


EXPERTS: dict[str, Any] = {"n_experts": 5, "d_expert": 6, "router": "sigmoid"}


class Foreign(nn.Module):
    """A user's own model: nothing but logits."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens)


def gradients_of(loss: Tensor, model: nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize(
    "make", [lambda: GPT2(50, 16, 2, 2, 16, 32), tiny, lambda: tiny(tied_head=False)]
)
def test_kernels_agree_on_whole_models(make):
    """Also where the output projection is the embedding, whose two gradients add up. Without
    targets they return the model's logits."""
    model = make().double()
    tokens, targets = torch.randint(0, 50, (2, 3, 16))
    targets[torch.rand(3, 16) < 0.3] = -100
    found = []
    for kernel in ("plain", "chunked"):
        loss = by_kernel(model, kernel)
        nll = loss(tokens, targets)
        assert torch.equal(loss(tokens), model(tokens))
        assert not loss(tokens).requires_grad
        found.append([nll.detach(), *gradients_of(nll, model)])
    torch.testing.assert_close(*found, rtol=1e-11, atol=1e-12)


def test_the_kernel_is_chosen_by_vocabulary_model_and_memory(monkeypatch):
    """Logits are whole in a compiled step while they are small beside the memory."""
    memory = types.SimpleNamespace(total_memory=10 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: memory)
    cuda = torch.device("cuda")
    with torch.device("meta"):
        small, large, largest = (
            SummedLoss(GPT2(v, 16, 1, 1, 8, 8)) for v in (2047, 2048, 50257)
        )  # fmt: skip
    assert small.loss_kernel(CPU) == "plain"
    assert large.loss_kernel(CPU) == "chunked(rows=512, vocab=2048)"
    assert by_kernel(large.model, "plain").loss_kernel(CPU) == "plain"
    assert SummedLoss(nn.Linear(3, 50304)).loss_kernel(CPU) == "plain"
    most = 2**30 // (2 * 50257)  # rows whose logits take a tenth of the memory in 16 bits
    assert largest.fuses_loss(most, cuda)
    assert not largest.fuses_loss(most + 1, cuda)
    assert not largest.fuses_loss(1, CPU)
    assert largest.loss_kernel(cuda, most) == "plain, compiled with the model"
    assert largest.loss_kernel(cuda, most + 1).startswith("chunked(")
    assert largest.loss_kernel(cuda).startswith("chunked(")
    assert not SummedLoss(Foreign()).has_head()
    assert SummedLoss(Foreign()).fuses_loss(10**9, cuda)  # it has logits only
    for loss in (small, largest):  # a head that is split is chunked
        loss.share_vocabulary(Threads(1).shard(0, 0, 50257))
        assert loss.loss_kernel(CPU).startswith("chunked(rows=512, ")
        assert not loss.fuses_loss(1, cuda)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_foreign_model_needs_only_logits(dtype):
    torch.manual_seed(8)
    model = Foreign().to(dtype)
    tokens, targets = torch.randint(0, 50, (2, 3, 16))
    nll = SummedLoss(model)(tokens, targets)
    nll.backward()
    logits = model.table(tokens).detach().view(1, 48, 50)
    value, _, _ = reference(logits, torch.eye(50), targets.view(1, 48))
    assert nll.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert nll.item() == pytest.approx(value, rel=1e-6)
    assert SummedLoss(model)(tokens, torch.full_like(targets, -100)).item() == 0
    other = SummedLoss(nn.Sequential(nn.Embedding(50, 2), nn.Flatten()))
    for given_ in ((tokens, tokens), (tokens,)):
        with pytest.raises(ValueError, match=r"model\._target_: Sequential returned \(3, 32\)"):
            other(*given_)


MODELS = {
    "gpt2": lambda: GPT2(50, 16, 10, 2, 16, 32),
    "llama": tiny,
    "foreign": Foreign,  # without blocks: its trunk is compiled
    "biased": lambda: tiny(**EXPERTS, balance="bias"),
    "both losses": lambda: tiny(**EXPERTS, balance="sequence", router_z_loss=0.3),
}


def note_balance(
    mixture: Any, share_bte: Tensor, load_be: Tensor, balance_b: Tensor, z_b: Tensor
) -> None:
    mixture.seen.copy_(balance_b.detach())


@pytest.mark.parametrize("kind", MODELS)
def test_compiled_blocks_share_a_graph_and_leave_names_and_values(kind, monkeypatch):
    """Whatever the documents; also where experts are counted, and hand on losses of their own.
    Another length of text compiles nothing."""
    graphs = compile_counter()  # the same operations in the same order
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=graphs))
    torch.manual_seed(14)
    model = MODELS[kind]().double()
    model.document_end = 49
    loss, eager = SummedLoss(model), SummedLoss(copy.deepcopy(model))
    for mixture in experts_of(model).values():
        mixture.look, mixture.seen = note_balance, torch.zeros(2)
    names = [f"model.{name}" for name in model.state_dict()]
    loss.compile_blocks()
    for ends in ([], [3, 12], [*range(16)]):
        tokens, targets = torch.randint(0, 49, (2, 2, 16))
        tokens[0, ends] = 49
        found = []
        for one in (loss, eager):
            nll = one(tokens, targets)
            found.append([nll.detach(), *gradients_of(nll, one)])
        torch.testing.assert_close(*found, rtol=1e-12, atol=1e-13)
    assert all(mixture.seen.all() for mixture in experts_of(model).values())
    equal(loss(tokens[:, :7]), eager(tokens[:, :7]))
    assert graphs.frame_count == 1
    assert list(loss.state_dict()) == names


@pytest.mark.parametrize(
    ("whole", "dropout", "vocab_size"),
    [(False, 0.0, 2048), (True, 0.0, 2048), (True, 0.0, 37), (True, 0.0, 130), (True, 0.5, 64)],
)
def test_a_compiled_step_and_its_evaluation_have_one_graph(whole, dropout, vocab_size, monkeypatch):
    """With the loss inside of the graph, as on an accelerator, where rows of zeros pad the head,
    and outside; where dropout makes evaluation another function it runs eagerly."""
    graphs = compile_counter()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=graphs))
    monkeypatch.setattr(SummedLoss, "fuses_loss", lambda *_: whole)
    torch.manual_seed(15)
    model = GPT2(vocab_size, 16, 1, 2, 16, 32, dropout).double()
    tokens, targets = torch.randint(0, vocab_size, (2, 2, 16))
    targets[torch.rand(2, 16) < 0.3] = -100
    loss, eager = SummedLoss(model), SummedLoss(model)
    with loss.evaluating():
        expected = loss(tokens, targets).item()
    loss.compile_trunk()
    trained = loss(tokens, targets)
    gradients = gradients_of(trained, model)
    with loss.evaluating():
        found = loss(tokens, targets)
    assert graphs.frame_count == 1
    assert not found.requires_grad
    assert model.training
    assert torch.is_grad_enabled()
    # fp64, in another order of summation inside of the graph
    assert found.item() == pytest.approx(expected, rel=1e-12)
    if not dropout:
        assert trained.item() == pytest.approx(expected, rel=1e-12)
        wanted = gradients_of(eager(tokens, targets), model)
        torch.testing.assert_close(gradients, wanted, rtol=1e-11, atol=1e-12)
    assert loss(tokens, torch.full_like(targets, -100)) == 0
