"""Ways of the trunk on an accelerator against those of a CPU, in float64 on a CPU."""

import copy
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from llmexp import mesh
from llmexp.mesh.fake_group import pretended
from llmexp.models import common, documents, offload
from llmexp.models.gpt2 import GPT2
from llmexp.models.llama import Llama, RopeScaling
from llmexp.models.loss import SummedLoss
from llmexp.models.planned import planned_for
from llmexp.models.recompute import keep_products, recompute_blocks
from tests.tools import equal


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
    monkeypatch.setattr(documents, "_SHORT", 10**6)  # masks
    expected = model(tokens), gradients(model, tokens)
    monkeypatch.setattr(documents, "repeats_heads", lambda *_: True)
    calls = []
    monkeypatch.setattr(common, "in_one_product", lambda _: calls.append(1) or True)
    found = model(tokens), gradients(model, tokens)
    assert len(calls) == 4
    # float64: sums of 16 products in another order, through two layers
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)


class Seen(TorchDispatchMode):
    """Note the operations on tensors, with what they were given."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append((func, args))
        return func(*args, **(kwargs or {}))

    def reduced(self) -> Counter:
        """Count all_reduce of activations by dtype."""
        return Counter(args[0].dtype for func, args in self.calls if "all_reduce" in str(func))


@pytest.mark.parametrize(("kind", "of_mlp"), [("gpt2", 1), ("llama, pre", 2)])
def test_tensor_parallelism_reduces_activations_in_the_types_that_the_docs_name(
    kind, of_mlp, monkeypatch
):
    """Under bf16 all of a block but the gradients that leave gate and up, and not the embedding's:
    as benchmarks/results/ranks.md says. Projections that are split stay apart in compiled blocks
    too."""
    bf16, fp32 = torch.bfloat16, torch.float32
    with pretended(2):
        joined = mesh.join("cpu", "tp", 1, 1, 2)
        loss = SummedLoss(model_of(kind))
        mesh.wrap(joined, loss, activation_checkpointing="none", compiled=False)
        tokens = torch.randint(0, 50, (2, 8))
        with Seen() as there, torch.autocast("cpu", bf16):
            found = loss(tokens, tokens)
        with Seen() as back:
            found.backward()
        monkeypatch.setattr(common, "in_one_product", lambda _: True)
        for block in loss.model.blocks:
            block.compile(backend="eager")
        assert loss.model.hidden(tokens).shape == (2, 8, WIDTH)
    assert there.reduced() == {bf16: 2 * LAYERS, fp32: 1}
    assert back.reduced() == {bf16: 3 * LAYERS, fp32: of_mlp * LAYERS}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("kind", ["gpt2", "llama, pre"])
def test_what_waits_on_the_host_changes_no_bit(kind, dtype, monkeypatch):
    """What blocks keep is copied and comes back; weights, masks and rotary tables stay."""
    sent, to_host = [], offload.to_host
    monkeypatch.setattr(offload, "to_host", lambda x: sent.append(x) or to_host(x))
    tokens, found = torch.randint(0, 50, (3, 16)), []
    for choice in ("none", "offload"):
        model = model_of(kind)
        model.document_end, model.document_spans = 7, False
        if choice == "offload":
            offload.offload_blocks(model)
        with planned_for("cuda", 1e9):  # the copies then are on this CPU as well
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                loss = (model.hidden(tokens).float() ** 2).sum()
            loss.backward()
        found.append((loss, [p.grad for p in model.parameters()]))
    torch.testing.assert_close(*found, rtol=0, atol=0)
    shapes = {tuple(x.shape) for x in sent}
    assert {(3, 16, WIDTH), (3 * 16, WIDTH)} <= shapes
    assert all(x.shape[0] in (3, 3 * 16, 3 * 4) for x in sent)  # windows, tokens, heads
    assert all(x.dtype != torch.bool for x in sent)
    places = [(x.data_ptr(), x.shape, x.stride(), x.dtype) for x in sent]
    assert len(set(places)) == len(places)


def test_what_is_sent_to_the_host_has_no_gaps_and_keeps_its_layout():
    """A copy from a tensor with gaps would go through memory that is not pinned."""
    x = torch.randn(4, 6, 8)
    for sent in (x, x.transpose(0, 1), x[..., 2:5], x[..., :4].transpose(1, 2)):
        with Seen() as seen:
            there = offload.to_host(sent)
        (copied,) = [args for func, args in seen.calls if func is torch.ops.aten.copy_.default]
        assert [x.stride() for x in copied[:2]] == [there.stride()] * 2
        assert there.untyped_storage().nbytes() == there.nbytes
        torch.testing.assert_close(there, sent, rtol=0, atol=0)


LAYERS, WIDTH = 3, 32


def model_of(kind: str, residual: str = "full") -> nn.Module:
    sizes = {"vocab_size": 50, "max_position_embeddings": 16, "n_layers": LAYERS, "n_heads": 4}
    sizes |= {"d_model": WIDTH, "d_ff": 48, "residual": residual}
    torch.manual_seed(3)
    if kind == "gpt2":
        return GPT2(**sizes)
    return Llama(**sizes, n_kv_heads=2, norm=kind.removeprefix("llama, "))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["gpt2", "llama, pre", "llama, post"])
def test_the_residual_stream_is_in_full_precision_or_rounded_once_an_addition(kind, dtype):
    """Between blocks, and within those whose norms come before their branches."""
    tokens = torch.randint(0, 50, (3, 16), generator=torch.Generator().manual_seed(1))
    exact = model_of(kind).double()
    errors = {}
    for residual, wanted in (("full", torch.float32), ("autocast", dtype)):
        model, seen = model_of(kind, residual), set()
        for block in model.blocks:
            block.register_forward_pre_hook(lambda _, inputs, s=seen: s.add(inputs[0].dtype))
            if kind != "llama, post":
                norm = block.mlp_norm
                norm.register_forward_pre_hook(lambda _, inputs, s=seen: s.add(inputs[0].dtype))
        assert torch.equal(model(tokens), model_of(kind)(tokens))  # without autocast: one and all
        seen.clear()
        with torch.autocast("cpu", dtype):
            hidden = model.hidden(tokens)
        assert seen == {wanted}
        errors[residual] = distances(hidden, model, exact.hidden(tokens), exact)
    # Each of 2 * LAYERS + 1 roundings moves the stream by half a unit at most; the gradient meets
    # them forward and backward.
    more = 2 * (2 * LAYERS + 1) * torch.finfo(dtype).eps / 2
    for full, rounded in zip(errors["full"], errors["autocast"], strict=True):
        assert rounded <= full + more


def distances(
    hidden: torch.Tensor, model: nn.Module, wanted: torch.Tensor, exact: nn.Module
) -> tuple[float, float]:
    """Off the exact model, relative to it: hidden states, and the gradient of a sum over them."""
    weights = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(2)).double()
    off = []
    for states, of in ((hidden, model), (wanted, exact)):
        of.zero_grad()
        (states.double() * weights).sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in of.parameters() if p.grad is not None])
        off.append((states.detach().double(), gradient.double()))
    (h, g), (h64, g64) = off
    return float((h - h64).norm() / h64.norm()), float((g - g64).norm() / g64.norm())


SWITCHES = {
    "qwen": {"qk_norm": "head", "head_dim": 10},
    "olmo": {"qk_norm": "full", "norm": "post", "biases": "qkv", "tied_head": False},
    "mistral": {"sliding_window": 4, "biases": "all"},
    "scaled": {"rope_scaling": RopeScaling(4.0, 1.0, 4.0, original_max_position_embeddings=8)},
}


@pytest.mark.parametrize("kind", SWITCHES)
def test_switches_inside_documents_in_bf16_and_computed_again(kind):
    torch.manual_seed(3)
    model = Llama(50, 24, 2, 4, 2, 16, 24, dropout=0.1, **SWITCHES[kind]).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    tokens, end = torch.randint(0, 49, (2, 24)), 49
    tokens[:, [9, 15]] = end
    parts = (tokens[:, :10], tokens[:, 10:16], tokens[:, 16:])
    alone = torch.cat([model(part) for part in parts], dim=1)
    model.document_end = end
    for model.document_spans in (True, False):
        # float64: sums of at most 24 products in another order, through two layers
        torch.testing.assert_close(model(tokens), alone, rtol=1e-10, atol=1e-11)
    found = []
    for how in ("none", "full", "selective"):
        again = copy.deepcopy(model).train()
        recompute_blocks(again, how)
        torch.manual_seed(0)  # of dropout
        found.append(gradients(again, tokens))
    assert equal(found[1:], [found[0]] * 2)
    model.float()
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model(tokens).double()
    # About 20 products on the way, each of operands that are off by at most 1 / 512.
    assert (rounded - alone).norm() < 20 / 512 * alone.norm()
    assert not torch.equal(rounded, model(tokens).double())


@pytest.mark.parametrize("kind", ["flash", "efficient", "cudnn"])
def test_attention_with_dropout_is_not_kept(kind):
    """What is kept draws nothing again: dropout after it would draw other numbers than before."""
    op = getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention").default
    before = [a.name for a in op._schema.arguments].index("dropout_p")
    kept = {p: keep_products(None, op, *[None] * before, p) for p in (0.0, 0.1)}
    assert kept == {0.0: CheckpointPolicy.MUST_SAVE, 0.1: CheckpointPolicy.PREFER_RECOMPUTE}
    assert keep_products(None, op, dropout_p=0.1) == CheckpointPolicy.PREFER_RECOMPUTE
