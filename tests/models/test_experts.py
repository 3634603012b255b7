"""Experts against a loop over tokens in float64: loss, every gradient, ties, experts without
tokens, one token."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
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
from llmexp.models.experts import Experts, Router
from llmexp.models.llama import Llama
from llmexp.models.loss import SummedLoss
from llmexp.models.planned import planned_for
from llmexp.models.recompute import recompute_blocks, recomputed_share
from llmexp.optim.optimizers.muon import muon
from tests.models.mixture import loops_in, window_loss

END = 7  # the last id of a document
SIZES = {"n_experts": 5, "d_expert": 6}
CASES: dict[str, dict[str, Any]] = {
    "softmax": {"balance": "none"},
    "not normed": {"balance": "none", "norm_topk": False, "experts_per_token": 3},
    "sigmoid": {"balance": "none", "router": "sigmoid", "router_bias": True},
    "shared": {"balance": "none", "n_shared_experts": 2, "first_dense_layers": 1},
    "biased": {"balance": "bias", "router": "sigmoid"},
    "sequence": {"balance": "sequence", "balance_loss": 0.5},
    "both losses": {"balance": "sequence", "router": "sigmoid", "router_z_loss": 0.3},
    "z alone": {"balance": "bias", "router_z_loss": 0.3, "norm": "post", "qk_norm": "full"},
    "all experts": {"balance": "sequence", "experts_per_token": 5},
    "one expert": {"balance": "sequence", "experts_per_token": 1, "norm_topk": False},
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


def how_of(more: dict[str, Any]) -> dict[str, Any]:
    return {
        "router": more.get("router", "softmax"),
        "per_token": more.get("experts_per_token", 2),
        "norm_topk": more.get("norm_topk", True),
    }


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


def check_against_loop(more: dict[str, Any], tokens: Tensor, targets: Tensor, **attributes: Any):
    model = mixture(**more)
    for name, value in attributes.items():
        setattr(model, name, value)
    looped = copy.deepcopy(model)
    loops = loops_in(looped, **how_of(more))
    alpha = more.get("balance_loss", 0.01) if more["balance"] == "sequence" else 0.0
    whole, want = window_loss(looped, loops, tokens, targets, alpha, more.get("router_z_loss", 0.0))
    whole.backward()
    loss, found = summed(model, tokens, targets)
    assert loss == pytest.approx(want, rel=1e-13)  # the cross-entropy alone
    for name, gradient in gradients(looped).items():
        scale = gradient.abs().max()
        assert (found[name] - gradient).abs().max() <= 1e-12 * max(scale, 1e-3), name


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_those_of_a_loop(case: str) -> None:
    check_against_loop(CASES[case], *batch())


@pytest.mark.parametrize("spans", [True, False])
def test_inside_documents(spans: bool) -> None:
    tokens, targets = batch()
    tokens[:, 4] = END
    targets[:, 4] = -100
    check_against_loop(
        CASES["both losses"], tokens, targets, document_end=END, document_spans=spans
    )


@pytest.mark.parametrize("case", ["biased", "both losses"])
def test_a_batch_of_one_token(case: str) -> None:
    check_against_loop(CASES[case], *batch(1, 1))


def test_equal_scores_go_to_the_first_experts_in_any_batch() -> None:
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


def test_a_pass_without_gradients_is_not_counted() -> None:
    """Such as that of figures by layer, in which a compiled model stays in training."""
    model, seen = mixture(balance="sequence").train(), list[Any]()
    model.blocks[0].mlp.look = lambda *found: seen.append(found)
    tokens_bt = batch()[0]
    with torch.no_grad():
        model(tokens_bt)
    assert not seen
    model(tokens_bt)
    assert len(seen) == 1


def test_shapes_alone_are_enough() -> None:
    """To plan what is computed again, a model runs where tensors have no memory."""
    tokens_bt = batch()[0]
    assert mixture(balance="bias").to("meta")(tokens_bt.to("meta")).is_meta


def test_scores_that_underflow_divide_nothing() -> None:
    model = mixture(router="sigmoid", balance="sequence")
    model.blocks[0].mlp.router.bias = torch.nn.Parameter(torch.full((5,), -1e4))
    assert model(batch()[0]).isfinite().all()


def test_experts_without_a_token_have_gradients_of_zero() -> None:
    model = mixture(balance="bias", router="sigmoid", experts_per_token=1, norm_topk=False)
    for block in model.blocks:
        block.mlp.router.balance_bias.copy_(torch.tensor([0.0, 9, 0, 0, 0]))
    _, found = summed(model, *batch())
    for name in ("gate_proj", "up_proj", "down_proj"):
        gradient = found[f"blocks.0.mlp.{name}.weight"]
        assert gradient[1].any()
        assert not gradient[[0, 2, 3, 4]].any()


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_what_is_computed_again_adds_nothing(kind: str) -> None:
    more = CASES["both losses"]
    (loss, want), (again, found) = (
        summed(model, *batch()) for model in (mixture(**more), recomputed(mixture(**more), kind))
    )
    assert loss == again
    assert all(torch.equal(found[name], gradient) for name, gradient in want.items())


def recomputed(model: Llama, kind: str) -> Llama:
    recompute_blocks(model, kind)
    return model


def test_evaluation_adds_no_loss_and_one_pass_keeps_none() -> None:
    model = mixture(balance="sequence")
    loss = SummedLoss(model)
    tokens, targets = batch()
    with loss.evaluating():
        value = loss(tokens, targets)
    assert value == loss(tokens, targets)
    assert all(m.added_losses is None for m in model.modules() if isinstance(m, Experts))


def test_parameters_of_a_token_are_counted() -> None:
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
def test_what_experts_cannot_be_with_is_refused(more: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Llama(40, 12, 2, 4, 2, 16, 12, **SIZES, **more)
    assert refused.value.key == key


def test_16_bits_are_as_exact_as_they_can_be_and_plans_know_the_shapes() -> None:
    torch.manual_seed(1)
    order, ends = torch.randperm(12), torch.tensor([4, 4, 12], dtype=torch.int32)
    given = [torch.randn(size) for size in ((6, 8), (6, 2), (3, 5, 8), (3, 5, 8), (3, 8, 5))]
    low = [given[0].bfloat16(), given[1], *(t.bfloat16() for t in given[2:]), order, ends]
    exact = [t.double() for t in low[:5]] + low[5:]
    gradient = torch.randn(6, 8).bfloat16()
    for values in (low, exact):
        made = experts.sent(*values)
        back = experts.sent_backward(gradient.to(values[0].dtype), *values, *made[1:])
        assert not any(stack[1].any() for stack in back[2:])  # an expert without tokens
        if values is low:
            found = [*made, *back]
    for one, want in zip(found, [*made, *back], strict=True):
        # about five roundings of 2^-9, of terms that may cancel
        assert (one.double() - want).norm() <= 0.02 * want.norm()
    with FakeTensorMode() as fake:
        plans = [fake.from_tensor(t) for t in low]
        made = experts.sent(*plans)
        back = experts.sent_backward(fake.from_tensor(gradient), *plans, *made[1:])
    for one, planned in zip(found, [*made, *back], strict=True):
        assert (one.shape, one.dtype, one.stride()) == (
            planned.shape, planned.dtype, planned.stride()
        )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_experts_at_once_are_one_after_the_other(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path of CUDA, on what torch's grouped products do on a CPU."""
    torch.manual_seed(2)
    order, ends = torch.randperm(24), torch.tensor([9, 9, 16, 24], dtype=torch.int32)
    sizes = ((12, 16), (12, 2), (4, 8, 16), (4, 8, 16), (4, 16, 8))
    x, weights, *stacks = (torch.randn(size) for size in sizes)
    given = [x.to(dtype), weights, *(stack.to(dtype) for stack in stacks), order, ends]
    found = []
    for at_once in (False, True):
        monkeypatch.setattr(experts, "in_one_kernel", lambda *_, own=at_once: own)
        made = experts.sent(*given)
        found.append([*made, *experts.sent_backward(torch.ones_like(given[0]), *given, *made[1:])])
    assert not found[1][5][1].any()  # an expert without tokens
    for one, other in zip(*found, strict=True):
        limit = (2**-6 if dtype == torch.bfloat16 else 1e-5) * float(other.float().norm())
        assert (one.float() - other.float()).norm() <= limit


def test_a_plan_sees_in_the_operations_what_they_take() -> None:
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


def test_recomputation_is_counted_and_selective_keeps_the_products() -> None:
    """As of a dense model whose MLP has as many parameters as two experts and the router, but for
    its last product, which is not needed again; experts are one operation."""

    def share(kind: str, d_ff: int, **more: Any) -> float:
        return recomputed_share(lambda: Llama(40, 12, 2, 4, 2, 16, d_ff, **more), kind, 12)

    experts_of_6, like = {"n_experts": 6, "d_expert": 6}, 2 * 6 + 2
    last = 2 * 2 * like * 16 / Llama(40, 12, 2, 4, 2, 16, like).flops_per_token(12)
    found = share("full", 12, **experts_of_6)
    assert found == pytest.approx(share("full", like) + last, rel=1e-12)
    assert share("selective", 12, **experts_of_6) == 0


@pytest.mark.parametrize("more", [CASES["biased"], CASES["both losses"]])
def test_compiled_blocks_share_one_graph_and_are_as_others(more: dict[str, Any]) -> None:
    """Also where they are counted, and hand on losses of their own."""
    (loss, want), graphs = summed(mixture(n_layers=3, **more), *batch()), CompileCounter()
    model, seen = mixture(n_layers=3, **more), torch.zeros(3, 3)

    def look(one: Any, share_bte: Tensor, load_be: Tensor, balance_b: Tensor, z_b: Tensor) -> None:
        one.last.copy_(balance_b.detach())

    for block, last in zip(model.blocks, seen, strict=True):
        block.mlp.look, block.mlp.last = look, last
        block.compile(backend=graphs, dynamic=False)
    again, found = summed(model, *batch())
    assert graphs.frame_count == 1
    assert seen.all()
    assert loss == pytest.approx(again, rel=1e-13)
    for name, gradient in want.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-15)


def test_sharded_routers_are_gathered_as_they_are_in_compiled_blocks_too() -> None:
    """Beside matrices that are gathered in bf16."""
    with fake_group.pretended(2):
        loss = SummedLoss(mixture(balance="bias").float())
        joined = mesh.join("cpu", "fsdp", 1, 2, 1)
        wrap(joined, loss, activation_checkpointing="none", compiled=True,
             gather_dtype=torch.bfloat16)  # fmt: skip
        apart = {name for name, m in loss.model.named_modules() if isinstance(m, FSDPModule)}
    assert apart == {f"blocks.{i}{part}" for i in range(2) for part in ("", ".mlp.router")}


def test_muon_takes_the_matrix_of_each_expert() -> None:
    """Its update is that of torch's Muon of the matrix by itself; routers have one matrix."""
    model = mixture(balance="none").float()
    stack, router = model.blocks[0].mlp.up_proj.weight, model.blocks[0].mlp.router.weight
    found = muon(model, lr=0.1, weight_decay=0.0)
    alone = [torch.nn.Parameter(one.clone()) for one in (*stack.detach(), router.detach())]
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    for one, gradient in zip(alone, (*stack.grad, router.grad), strict=True):
        one.grad = gradient.clone()
    own = torch.optim.Muon(alone, lr=0.1, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    for optimizer in (*found, own):
        optimizer.step()
    for one, wanted in zip((*stack, router), alone, strict=True):
        assert torch.equal(one, wanted)


def test_units_of_adaptive_clipping_are_the_rows_of_each_expert() -> None:
    model = mixture(balance="none")
    stack = model.blocks[0].mlp.up_proj.weight
    for p in model.parameters():
        p.grad = torch.randn_like(p) * torch.rand((*p.shape[:-1], 1) if p.ndim > 1 else p.shape)
    weights, gradient = stack.detach(), stack.grad.clone()
    clip = SimpleNamespace(kind="adaptive", ratio=1.0)
    gradients_of = [p.grad for p in model.parameters()]
    Adaptive(clip, mesh.join("cpu", "single", 1, 1, 1), model, []).clip(
        gradients_of, torch.ones(())
    )
    limits, norms = weights.norm(dim=-1, keepdim=True), gradient.norm(dim=-1, keepdim=True)
    assert 0 < (norms > limits).sum() < norms.numel()
    wanted = gradient * (limits / norms).clamp(max=1)
    torch.testing.assert_close(stack.grad, wanted, rtol=1e-12, atol=0)


def test_first_weights_are_those_of_other_matrices() -> None:
    torch.manual_seed(0)
    model = Llama(40, 12, 2, 4, 2, 64, 128, n_experts=4)
    block = model.blocks[0].mlp
    assert block.gate_proj.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.router.weight.std().item() == pytest.approx(0.02, rel=0.2)
    assert block.down_proj.weight.std().item() == pytest.approx(0.01, rel=0.05)
    assert not block.router.balance_bias.any()
    assert not torch.equal(block.gate_proj.weight[0], block.gate_proj.weight[1])
