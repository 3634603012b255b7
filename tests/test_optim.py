"""Optimizers: their groups, and the guarded update that changes everything or nothing."""

import copy
import math

import numpy as np
import pytest
import torch

from llmexp import mesh
from llmexp.models.gpt2 import GPT2
from llmexp.optim import held, precision, updating
from llmexp.optim.optimizers import adamw, lion, muon, sgd
from llmexp.optim.precision import settings_kept
from llmexp.train.assembly.assemble import assemble
from llmexp.train.set_up import set_up
from llmexp.train.step import train_step
from llmexp.train.windows import read_ahead
from tests.conftest import TINY
from tests.tools import composed, equal

YES, NO = torch.tensor(True), torch.tensor(False)
BUILDERS = {
    "adamw": lambda m: adamw.adamw(m, lr=0.1),
    "sgd": lambda m: sgd.sgd(m, lr=0.1),
    "sgd without momentum": lambda m: sgd.sgd(m, lr=0.1, momentum=0.0),
    "muon": lambda m: muon.muon(m, lr=0.1),
    "lion": lambda m: lion.lion(m, lr=0.1),
    "plain": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.1, momentum=0.5),
}


def made(name: str) -> tuple[GPT2, list[torch.optim.Optimizer]]:
    torch.manual_seed(0)
    model = GPT2(32, 8, 1, 2, 8, 8)
    return model, held.as_list(BUILDERS[name](model))


def give_gradients(seed: int, *models: torch.nn.Module) -> None:
    for model in models:
        generator = torch.Generator().manual_seed(seed)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)


def state(model, optimizers):
    return copy.deepcopy(
        ([p.detach() for p in model.parameters()], [o.state_dict()["state"] for o in optimizers])
    )


@pytest.mark.parametrize("name", BUILDERS)
def test_a_skipped_update_leaves_everything_and_the_next_is_as_if_it_had_not_been(name):
    """Also the first one, where torch's fused SGD would keep uninitialised momentum."""
    (model, optimizers), (plain_model, plain_optimizers) = made(name), made(name)
    for seed, skip in enumerate([True, False, True, True, False]):
        before = state(model, optimizers)
        give_gradients(seed, model, plain_model)
        updating.update(optimizers, YES if skip else NO)
        if skip:
            assert equal(state(model, optimizers)[0], before[0])
            if seed:  # at the very first step the kernels may make their zeros
                assert equal(state(model, optimizers)[1], before[1])
        else:
            updating.update(plain_optimizers, NO)
            assert equal(state(model, optimizers), state(plain_model, plain_optimizers))
    give_gradients(8, model)
    updating.update(optimizers, YES)
    give_gradients(9, model, plain_model)
    for each in (optimizers, plain_optimizers):
        updating.update(each, False)  # by the host: the flag on the device no longer counts
    assert equal(state(model, optimizers), state(plain_model, plain_optimizers))


@pytest.mark.parametrize("name", ["adamw", "sgd", "sgd without momentum"])
def test_a_factor_on_the_update_is_one_on_the_gradients(name):
    """Within the rounding of 1 / factor, of the division by it, and of a multiplication: three
    units a gradient, six of a step of lr, and one of the parameter, in each of four steps."""
    (model, optimizers), (want, want_optimizers) = made(name), made(name)
    factor = torch.tensor(0.3)
    for seed in range(4):
        give_gradients(seed, model, want)
        takes = all(map(updating.takes_factor, optimizers))
        assert takes or (name == "sgd" and seed == 0)  # which makes its momentum first
        for p in [*want.parameters(), *([] if takes else model.parameters())]:
            p.grad.mul_(factor)
        updating.update(optimizers, NO, factor if takes else None)
        updating.update(want_optimizers, NO)
        for p, w in zip(model.parameters(), want.parameters(), strict=True):
            torch.testing.assert_close(p.grad, w.grad, rtol=3 * 2**-24, atol=0)
            torch.testing.assert_close(p, w, rtol=4 * 2**-24, atol=4 * 6 * 0.1 * 2**-24)


def test_what_looks_at_gradients_gets_them_clipped():
    model, [adamw] = made("adamw")
    assert not updating.takes_factor(made("muon")[1][0])
    assert not updating.takes_factor(made("sgd")[1][0])  # the first time
    assert not updating.takes_factor(torch.optim.AdamW(model.parameters(), fused=True))
    assert updating.takes_factor(adamw)
    adamw.register_step_pre_hook(lambda *_: None)
    assert not updating.takes_factor(adamw)


def test_a_step_that_clips_in_its_update_is_one_that_clips_before(monkeypatch):
    """Norms after steps at a limit that all of them exceed, on a CPU whose kernels take it too."""
    overrides = [
        *TINY, "data=synthetic", "data.n_tokens=4000", "clip.max_norm=0.1", "optimizer=sgd",
        "optimizer.momentum=0", "~optimizer.nesterov", "optimizer.lr=1", "schedule=constant",
        "batch.micro_batch_size=2", "batch.real_batch_size=4",
    ]  # fmt: skip
    parts = assemble(composed(*overrides))
    found = []
    for within in (False, True):
        monkeypatch.setattr(updating, "clips_in_update", lambda *_, within=within: within)
        with settings_kept():
            s = set_up(parts, mesh.join("cpu", "single", 1, 1, 1))
            windows = read_ahead(parts, s.mesh, 0)
            seen = [train_step(s, next(windows), lambda: 0).read() for _ in range(3)]
        assert all(step.clipped for step in seen)
        found.append([(step.loss, step.grad_norm, step.grad_norm_post_clip) for step in seen])
    np.testing.assert_allclose(*found, rtol=1e-5)


class Linear(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 9, bias=False)


class Named(Linear):
    @property
    def head_weight(self) -> torch.Tensor:
        return self.head.weight


def test_decay_on_matrices_only_and_muon_on_hidden_ones():
    """Muon gives the head to AdamW where the model names it."""
    _, (adamw,) = made("adamw")
    assert [g["weight_decay"] for g in adamw.param_groups] == [0.1, 0.0]
    assert [{p.ndim >= 2 for p in g["params"]} for g in adamw.param_groups] == [{True}, {False}]
    model = made("muon")[0]
    inside = [n for n, p in model.named_parameters() if p.ndim == 2 and n.startswith("blocks.")]
    on_muon = {model: inside, Named(): ["mix.weight"], Linear(): ["mix.weight", "head.weight"]}
    for model, names in on_muon.items():
        on, rest = muon.muon(model, lr=0.1)
        hidden = {id(p) for p in updating.held_by(on)}
        assert [name for name, p in model.named_parameters() if id(p) in hidden] == names
        assert hidden | {id(p) for p in updating.held_by(rest)} == set(map(id, model.parameters()))


@pytest.mark.parametrize("name", BUILDERS)
def test_parameters_without_gradients_stay_and_those_after_them_move(name):
    model, optimizers = made(name)
    give_gradients(0, model)
    idle = [updating.held_by(o)[0] for o in optimizers]
    idle += [p for o in optimizers if o.param_groups[1:] for p in o.param_groups[0]["params"]]
    for p in idle:
        p.grad = None
    before = [p.detach().clone() for p in model.parameters()]
    updating.update(optimizers, NO)
    stayed = [torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)]
    assert stayed == [any(p is one for one in idle) for p in model.parameters()]


@pytest.mark.parametrize("units", [{}, {"avx512_bf16": True}])
def test_auto_is_bf16_where_the_cpu_has_units_for_it(monkeypatch, units):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: units)
    kind, why = precision.choose("auto", torch.device("cpu"))
    assert kind == ("bf16" if units else "fp32")
    assert why == f"chosen: this CPU {'computes bf16' if units else 'has no bf16 units'}"


def test_a_scale_halves_with_an_overflow_and_doubles_after_some_steps_without():
    random = np.random.default_rng(0)
    scaler, scale, calm = precision.Scaler("fp16", torch.device("cpu"), 1024.0, 3), 1024.0, 0
    for overflows in random.random(200) < 0.2:
        scaler.update(torch.tensor(math.inf if overflows else 1.0))
        calm = 0 if overflows else calm + 1
        scale *= 0.5 if overflows else 2 if calm == 3 else 1
        calm %= 3
        assert float(scaler.value) == scale


def adamw_formula(t, rate, decay, w, g, m, v):
    """Loshchilov & Hutter 2019, algorithm 2."""
    m[...], v[...] = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g**2
    step = (m / (1 - 0.8**t)) / (np.sqrt(v / (1 - 0.9**t)) + 1e-3)
    return w * (1 - rate * decay) - rate * step


def lion_formula(t, rate, decay, w, g, m, _):
    """Chen et al. 2023, algorithm 2. Random gradients leave no direction near zero, where rounding
    could turn a sign."""
    direction = np.sign(0.8 * m + (1 - 0.8) * g)
    m[...] = 0.9 * m + (1 - 0.9) * g
    return w - rate * (direction + decay * w)


@pytest.mark.parametrize(
    ("build", "formula", "more"),
    [(adamw.adamw, adamw_formula, {"eps": 1e-3}), (lion.lion, lion_formula, {})],
)
def test_it_is_the_formula_in_float64(build, formula, more):
    model = made("adamw")[0].double()
    optimizers = held.as_list(build(model, lr=0.01, beta1=0.8, beta2=0.9, weight_decay=0.2, **more))
    want = [p.detach().clone().numpy() for p in model.parameters()]
    kept = [(np.zeros_like(w), np.zeros_like(w)) for w in want]
    for t in range(1, 6):
        rate = updating.set_rate(optimizers, 1 / t)
        assert rate == 0.01 * (1 / t)
        give_gradients(t, model)
        updating.update(optimizers, NO)
        assert optimizers[0].found_inf is not None  # the device decides, the host does not wait
        for n, p in enumerate(model.parameters()):
            decay = 0.2 if p.ndim >= 2 else 0.0
            want[n] = formula(t, rate, decay, want[n], p.grad.numpy(), *kept[n])
            np.testing.assert_allclose(p.detach().numpy(), want[n], rtol=1e-13, atol=1e-14)


def test_muon_decided_on_the_device_is_torchs_muon_to_the_bit():
    """Also after an update that it skipped, the first one among them."""
    (model, (ours, _)), (torchs_model, (same, _)) = made("muon"), made("muon")
    knobs = {k: v for k, v in ours.param_groups[0].items() if k not in ("params", "initial_lr")}
    torchs = torch.optim.Muon(updating.held_by(same), **knobs)
    for number, skipped in enumerate((True, False, True, False, False)):
        give_gradients(number, model, torchs_model)
        ours.found_inf = torch.tensor(float(skipped))
        ours.step()
        if not skipped:
            torchs.step()
        assert all(map(torch.equal, model.parameters(), torchs_model.parameters()))
