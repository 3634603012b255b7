"""Experts against a loop over tokens in float64: loss, every gradient, ties, experts without
tokens, one token."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule

from llmexp import mesh
from llmexp.config.values import ConfigError
from llmexp.features.clip_adaptive.rule import Adaptive
from llmexp.forecast.counting import Counting
from llmexp.mesh import fake_group
from llmexp.mesh.wrap import wrap
from llmexp.models import experts
from llmexp.models.common import idle_parameters, parameter_counts
from llmexp.models.experts import Router, experts_of
from llmexp.models.llama import Llama
from llmexp.models.loss import SummedLoss
from llmexp.models.planned import planned_for
from llmexp.models.recompute import recompute_blocks, recomputed_share
from llmexp.optim.optimizers.muon import muon
from tests.models.mixture import loops_in, window_loss

END = 7  # the last id of a document
SIZES = {"n_experts": 5, "d_expert": 6}
BIASED: dict[str, Any] = {"balance": "bias", "router": "sigmoid"}
BOTH_LOSSES: dict[str, Any] = {"balance": "sequence", "router": "sigmoid", "router_z_loss": 0.3}
CASES: dict[str, dict[str, Any]] = {
    "softmax": {"balance": "none"},
    "not normed": {"balance": "none", "norm_topk": False, "experts_per_token": 3},
    "sigmoid": {"balance": "none", "router": "sigmoid", "router_bias": True},
    "shared": {"balance": "none", "n_shared_experts": 2, "first_dense_layers": 1},
    "biased": BIASED,
    "sequence": {"balance": "sequence", "balance_loss": 0.5},
    "both losses": BOTH_LOSSES,
    "z alone": {"balance": "bias", "router_z_loss": 0.3, "norm": "post", "qk_norm": "full"},
    "all experts": {"balance": "sequence", "experts_per_token": 5},
    "one expert": {"balance": "sequence", "experts_per_token": 1, "norm_topk": False},
    "one for all tokens": BIASED | {"experts_per_token": 1, "norm_topk": False},
}


def mixture(n_layers: int = 2, **more: Any) -> Llama:
    """Weights large enough that experts and tokens differ."""
    torch.manual_seed(3)
    model = Llama(40, 12, n_layers, 4, 2, 16, 12, **{**SIZES, **more}).double()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.4)
    for name, buffer in model.named_buffers():
        assert name.endswith("balance_bias")
        buffer.copy_(torch.randn(len(buffer)) * 0.2)
    return model


def batch(rows: int = 3, length: int = 12) -> tuple[Tensor, Tensor]:
    """The first row has masked targets, the last has none that counts."""
    torch.manual_seed(5)
    tokens, targets = torch.randint(0, 40, (2, rows, length)).unbind()
    if rows > 1:
        targets[0, :5] = -100
        targets[-1] = -100
    return tokens, targets


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    assert all(p.grad is not None for p in model.parameters())
    return {name: p.grad for name, p in model.named_parameters()}


def summed(model: Llama, tokens: Tensor, targets: Tensor) -> tuple[float, dict[str, Tensor]]:
    """Mean loss and gradients of SummedLoss."""
    count = (targets != -100).sum()
    nll = SummedLoss(model)(tokens, targets)
    nll.backward(torch.ones_like(nll) / count)
    return float(nll.detach() / count), gradients(model)


@pytest.mark.parametrize(
    ("case", "rows", "spans"),
    [*((case, 3, None) for case in CASES), ("biased", 1, None), ("both losses", 1, None),
     ("both losses", 3, True), ("both losses", 3, False)],
)  # fmt: skip
def test_loss_and_gradients_are_those_of_a_loop(case, rows, spans):
    """Also of one token, and inside documents as spans and as masks."""
    more, (tokens, targets) = CASES[case], batch(rows, 12 if rows > 1 else 1)
    model = mixture(**more)
    if case == "one for all tokens":
        for block in model.blocks:
            block.mlp.router.balance_bias.copy_(torch.tensor([0.0, 9, 0, 0, 0]))
    if spans is not None:
        tokens[:, 4], targets[:, 4] = END, -100
        model.document_end, model.document_spans = END, spans
    looped = copy.deepcopy(model)
    router, per_token = more.get("router", "softmax"), more.get("experts_per_token", 2)
    norm = more.get("norm_topk", True)
    loops = loops_in(looped, router=router, per_token=per_token, norm_topk=norm)
    alpha = more.get("balance_loss", 0.01) if more["balance"] == "sequence" else 0.0
    whole, want = window_loss(looped, loops, tokens, targets, alpha, more.get("router_z_loss", 0.0))
    whole.backward()
    loss, found = summed(model, tokens, targets)
    assert loss == pytest.approx(want, rel=1e-13)  # the cross-entropy alone
    for name, gradient in gradients(looped).items():
        scale = gradient.abs().max()
        assert (found[name] - gradient).abs().max() <= 1e-12 * max(scale, 1e-3), name
        if case == "one for all tokens" and "_proj" in name and "mlp" in name:
            assert gradient[1].any()
            assert not found[name][[0, 2, 3, 4]].any()


def test_equal_scores_go_to_the_first_experts_in_any_batch():
    model = mixture(balance="none", experts_per_token=2)
    router: Router = model.blocks[0].mlp.router
    x = torch.randn(4, 6, 16, dtype=torch.float64)
    torch.nn.init.zeros_(router.weight)
    for part in (x, x[:1], x[2:, 3:4], x.float()):
        assert (router(part)[2] == torch.tensor([0, 1])).all()
    biased = Router(16, router.routing._replace(balance="bias"))
    torch.nn.init.zeros_(biased.weight)
    biased.balance_bias = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.5])
    assert (biased(x.float())[2] == torch.tensor([1, 3])).all()


def test_only_passes_of_training_are_counted_and_judged():
    """Not that of figures by layer, in which a compiled model stays in training, nor evaluation."""
    model, seen = mixture(balance="sequence").train(), list[Any]()
    model.blocks[0].mlp.look = lambda *found: seen.append(found)
    loss, (tokens, targets) = SummedLoss(model), batch()
    with torch.no_grad():
        model(tokens)
    with loss.evaluating():
        value = loss(tokens, targets)
    assert not seen
    assert value == loss(tokens, targets)
    assert len(seen) == 1
    assert all(m.added_losses is None for m in experts_of(model).values())


def test_shapes_alone_are_enough_and_scores_that_underflow_divide_nothing():
    """To plan what is computed again, a model runs where tensors have no memory."""
    tokens, _ = batch()
    assert mixture(balance="bias").to("meta")(tokens.to("meta")).is_meta
    model = mixture(router="sigmoid", balance="sequence")
    model.blocks[0].mlp.router.bias = torch.nn.Parameter(torch.full((5,), -1e4))
    assert model(tokens).isfinite().all()


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_what_is_computed_again_adds_nothing(kind):
    again = mixture(**BOTH_LOSSES)
    recompute_blocks(again, kind)
    torch.testing.assert_close(
        summed(again, *batch()), summed(mixture(**BOTH_LOSSES), *batch()), rtol=0, atol=0
    )


def test_parameters_of_a_token_are_counted():
    model = mixture(n_experts=8, experts_per_token=3, n_shared_experts=1, first_dense_layers=1)
    expert, dense = 3 * 16 * 6, 3 * 16 * 12
    attention = 2 * 16 * 16 + 2 * 16 * 8
    assert idle_parameters(model) == 5 * expert
    in_blocks = 2 * attention + dense + 4 * expert + 8 * 16
    assert parameter_counts(model) == (in_blocks + 40 * 16 + 5 * 16, in_blocks)
    assert model.flops_per_token(12) == 6 * (in_blocks + 40 * 16) + 12 * 2 * 12 * 16


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ({"experts_per_token": 6}, "model.experts_per_token"),
        ({"first_dense_layers": 2}, "model.first_dense_layers"),
        ({"experts_per_token": 1}, "model.norm_topk"),
        ({"biases": "all"}, "model.biases"),
        ({"parametrization": "mup", "base_width": 8}, "model.parametrization"),
    ],
)
def test_what_experts_cannot_be_with_is_refused(more, key):
    with pytest.raises(ConfigError) as refused:
        Llama(40, 12, 2, 4, 2, 16, 12, **SIZES, **more)
    assert refused.value.key == key


def operands(dtype: torch.dtype) -> list[Tensor]:
    """Give tokens, weights and stacks of four experts, of which the second has no token."""
    torch.manual_seed(1)
    sizes = ((12, 16), (12, 2), (4, 8, 16), (4, 8, 16), (4, 16, 8))
    x, weights, *stacks = (torch.randn(size) for size in sizes)
    order, ends = torch.randperm(24), torch.tensor([9, 9, 16, 24], dtype=torch.int32)
    return [x.to(dtype), weights, *(stack.to(dtype) for stack in stacks), order, ends]


def forth_and_back(given: list[Tensor]) -> list[Tensor]:
    made = experts.sent(*given)
    return [*made, *experts.sent_backward(torch.ones_like(given[0]), *given, *made[1:])]


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_as_exact_as_their_type_and_plans_know_the_shapes(dtype, at_once, monkeypatch):
    """One after the other, and as on CUDA by what torch's grouped products do on a CPU."""
    given = operands(dtype)
    exact = forth_and_back([t.double() for t in given[:5]] + given[5:])
    monkeypatch.setattr(experts, "in_one_kernel", lambda *_: at_once)
    found = forth_and_back(given)
    for stack in found[5:]:
        assert stack[0].any()
        assert not stack[1].any()  # an expert without tokens
    for one, want in zip(found, exact, strict=True):
        # about five roundings of 2^-9, of terms that may cancel
        limit = 0.02 if dtype == torch.bfloat16 else 1e-5
        assert (one.double() - want).norm() <= limit * want.norm()
    with FakeTensorMode() as fake:
        planned = forth_and_back([fake.from_tensor(t) for t in given])
    for one, plan in zip(found, planned, strict=True):
        assert (one.shape, one.dtype, one.stride()) == (plan.shape, plan.dtype, plan.stride())


def test_a_plan_sees_in_the_operations_what_they_take():
    """In the forward pass the outputs of experts in fp32, before they are summed."""
    counting = Counting("cpu")
    with FakeTensorMode(), counting, planned_for("cpu", 0.0):
        given = [torch.empty(size) for size in ((64, 32), (64, 2), (4, 16, 32), (4, 16, 32))]
        given += [torch.empty(4, 32, 16), torch.zeros(128, dtype=torch.int64)]
        given.append(torch.zeros(4, dtype=torch.int32))
        counting.restart()
        before = counting.total
        experts.sent(*given)
    outputs, of_gate_and_up = 128 * 32 * 4, 2 * 128 * 16 * 4
    assert outputs + of_gate_and_up < counting.peak_total - before < 2 * (outputs + of_gate_and_up)


def test_recomputation_is_counted_and_selective_keeps_the_products():
    """As of a dense model whose MLP has as many parameters as two experts and the router, but for
    its last product, which is not needed again; experts are one operation."""

    def share(kind: str, d_ff: int, **more: Any) -> float:
        return recomputed_share(lambda: Llama(40, 12, 2, 4, 2, 16, d_ff, **more), kind, 12)

    experts_of_6, like = {"n_experts": 6, "d_expert": 6}, 2 * 6 + 2
    last = 2 * 2 * like * 16 / Llama(40, 12, 2, 4, 2, 16, like).flops_per_token(12)
    found = share("full", 12, **experts_of_6)
    assert found == pytest.approx(share("full", like) + last, rel=1e-12)
    assert share("selective", 12, **experts_of_6) == 0


def test_sharded_routers_are_gathered_as_they_are_in_compiled_blocks_too():
    """Beside matrices that are gathered in bf16."""
    with fake_group.pretended(2):
        loss = SummedLoss(mixture(balance="bias").float())
        joined, bf16 = mesh.join("cpu", "fsdp", 1, 2, 1), torch.bfloat16
        wrap(joined, loss, activation_checkpointing="none", compiled=True, gather_dtype=bf16)
        apart = {name for name, m in loss.model.named_modules() if isinstance(m, FSDPModule)}
    assert apart == {f"blocks.{i}{part}" for i in range(2) for part in ("", ".mlp.router")}


def test_muon_and_adaptive_clipping_take_each_expert_by_itself():
    """As torch's Muon takes the matrix of one; routers have one matrix. Units that are clipped are
    the rows of each."""
    model = mixture(balance="none").float()
    stack, router = model.blocks[0].mlp.up_proj.weight, model.blocks[0].mlp.router.weight
    for p in model.parameters():
        p.grad = torch.randn_like(p) * torch.rand((*p.shape[:-1], 1) if p.ndim > 1 else p.shape)
    limits, norms = (t.detach().norm(dim=-1, keepdim=True) for t in (stack, stack.grad))
    assert 0 < (norms > limits).sum() < norms.numel()
    wanted = stack.grad * (limits / norms).clamp(max=1)
    clip = SimpleNamespace(kind="adaptive", ratio=1.0)
    rule = Adaptive(clip, mesh.join("cpu", "single", 1, 1, 1), model, [])
    rule.clip([p.grad for p in model.parameters()], torch.ones(()))
    torch.testing.assert_close(stack.grad, wanted)

    alone = [torch.nn.Parameter(one.clone()) for one in (*stack.detach(), router.detach())]
    for one, gradient in zip(alone, (*stack.grad, router.grad), strict=True):
        one.grad = gradient.clone()
    own = torch.optim.Muon(alone, lr=0.1, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    for optimizer in (*muon(model, lr=0.1, weight_decay=0.0), own):
        optimizer.step()
    assert all(map(torch.equal, (*stack, router), alone))
