"""model.parametrization=mup: initial weights, rates and multipliers of the package mup 1.0.0.

Its formulas are written out here (`infinite`, `package_*`: mup/infshape.py, init.py, layer.py and
updating.py of the version 1.0.0). Where the package is installed they are held against it: it is no
dependency, as it asks for torchvision, which asks for one version of torch.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmexp.config.values import ConfigError
from llmexp.models.gpt2 import GPT2
from llmexp.models.llama import Llama
from llmexp.models.logits import divisor_of
from llmexp.optim import groups, held, updating
from llmexp.optim.optimizers import adamw, library, lion, muon, sgd
from tests.conftest import TINY, llmexp

BASE, WIDTH = 16, 64
FIXED = {"vocab_size": 48, "max_position_embeddings": 12, "n_layers": 2}
Made = Callable[..., Any]


def gpt2(width: int, **more: Any) -> Any:
    return GPT2(**FIXED, n_heads=2, d_model=width, d_ff=4 * width, **more)


def llama(width: int, **more: Any) -> Any:
    """Of heads that are 8 wide, so that their number grows; with an output of its own."""
    sizes = {"n_heads": width // 8, "n_kv_heads": width // 16, "d_model": width, "d_ff": 2 * width}
    return Llama(**FIXED, **sizes, tied_head=False, biases="qkv", **more)


MODELS: dict[str, Made] = {"gpt2": gpt2, "llama": llama}


def mup(make: Made, width: int = WIDTH, **more: Any) -> Any:
    return make(width, parametrization="mup", base_width=BASE, **more)


def seeded(make: Callable[[], Any]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: p.detach() for name, p in make().named_parameters()}


def infinite(make: Made) -> dict[str, list[float | None]]:
    """By parameter, for each dimension: width over base width, or None where it does not grow."""
    here, base = (dict(make(width).named_parameters()) for width in (WIDTH, BASE))
    return {
        name: [None if a == b else a / b for a, b in zip(p.shape, base[name].shape, strict=True)]
        for name, p in here.items()
    }


def growing(dims: list[float | None]) -> list[float]:
    return [d for d in dims if d is not None]


def package_std(dims: list[float | None]) -> float:
    """Factor of mup.init.normal_: width_mult ** -0.5 where two dimensions grow."""
    return growing(dims)[-1] ** -0.5 if len(growing(dims)) == 2 else 1.0


def package_adam(dims: list[float | None]) -> float:
    """Factor on the rate in MuAdam."""
    return 1 / growing(dims)[-1] if len(growing(dims)) == 2 else 1.0


def package_sgd(dims: list[float | None]) -> float:
    """Factor on the rate in MuSGD: fan-out over fan-in."""
    grow = growing(dims)
    return grow[0] / grow[1] if len(grow) == 2 else math.prod(grow)


@pytest.mark.parametrize("kind", MODELS)
def test_initial_weights_are_those_of_the_package(kind):
    make = MODELS[kind]
    plain, ours = seeded(lambda: make(WIDTH)), seeded(lambda: mup(make))
    factors = {name: package_std(dims) for name, dims in infinite(make).items()}
    assert set(factors.values()) == {1.0, 0.5}
    for name, factor in factors.items():
        torch.testing.assert_close(ours[name], plain[name] * factor, rtol=1e-6, atol=0)
    same = seeded(lambda: mup(make, BASE)), seeded(lambda: make(BASE))
    assert all(torch.equal(same[0][name], same[1][name]) for name in same[0])


def rates(model: nn.Module, built: Any) -> dict[str, tuple[float, float]]:
    """Rate and weight decay of each parameter."""
    optimizers = held.as_list(built)
    groups.by_width(model, optimizers)
    updating.set_rate(optimizers, 1.0)
    of = {id(p): g for o in optimizers for g in o.param_groups for p in g["params"]}
    return {
        name: (of[id(p)]["lr"], of[id(p)]["weight_decay"]) for name, p in model.named_parameters()
    }


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    ("build", "package", "more"),
    [
        (adamw.adamw, package_adam, {}),
        (lion.lion, package_adam, {}),
        (sgd.sgd, package_sgd, {}),
        # an update of a square matrix has the spectral norm rate x 1, x 0.2 sqrt(width)
        (muon.muon, lambda dims: 1.0, {"adjust_lr": "original"}),
        (muon.muon, package_std, {"adjust_lr": "match_rms_adamw"}),
    ],
)
def test_rates_are_those_of_the_package_and_rate_times_decay_stays(kind, build, package, more):
    """Muon keeps its rate; one that is matched with AdamW loses what that adds."""
    make = MODELS[kind]
    model = mup(make)
    found = rates(model, build(model, lr=0.02, weight_decay=0.3, **more))
    for name, dims in infinite(make).items():
        lr, decay = found[name]
        assert lr == pytest.approx(0.02 * package(dims), rel=1e-12), name
        assert lr * decay == pytest.approx(0.02 * 0.3 if len(dims) == 2 else 0.0, rel=1e-12), name


@pytest.mark.parametrize("kind", MODELS)
def test_logits_have_the_multipliers_of_the_package(kind):
    """MuReadout: x / width_mult before the weights, tied ones too (MuSharedReadout); attention 8/d,
    as its README has it. Rewritten weights of the standard model do the same."""
    model, standard = mup(MODELS[kind]).double(), MODELS[kind](WIDTH).double()
    head = model.blocks[0].attention.head_dim
    tokens = torch.randint(0, 48, (2, 12))
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name in weights:
        if ".q_proj." in name:
            weights[name] *= 8 / head * math.sqrt(head)
    standard.load_state_dict(weights)
    want = F.linear(standard.hidden(tokens) / (WIDTH / BASE), standard.head_weight)
    torch.testing.assert_close(model(tokens), want, rtol=1e-12, atol=1e-13)
    assert divisor_of(model.blocks[0].attention) == head / 8


def test_the_package_has_the_formulas_of_this_file():
    package = pytest.importorskip("mup")
    for make in MODELS.values():
        model = make(WIDTH)
        package.set_base_shapes(model, make(BASE), rescale_params=False, do_assert=False)
        adam = package.MuAdamW(model.parameters(), lr=0.02, weight_decay=0.3)
        sgd = package.MuSGD(model.parameters(), lr=0.02)
        of = [{id(p): g["lr"] for g in o.param_groups for p in g["params"]} for o in (adam, sgd)]
        for name, p in model.named_parameters():
            dims = infinite(make)[name]
            assert of[0][id(p)] == pytest.approx(0.02 * package_adam(dims)), name
            assert of[1][id(p)] == pytest.approx(0.02 * package_sgd(dims)), name
            drawn = []
            for normal in (nn.init.normal_, package.init.normal_):
                torch.manual_seed(0)
                normal(p, std=0.02)
                drawn.append(p.detach().clone())
            torch.testing.assert_close(drawn[1], drawn[0] * package_std(dims), rtol=1e-6, atol=0)
        shared = package.MuSharedReadout(model.token_embedding.weight, bias=False)
        x = torch.randn(3, WIDTH)
        want = F.linear(x / (WIDTH / BASE), model.token_embedding.weight)
        torch.testing.assert_close(shared(x), want)


@pytest.mark.parametrize(
    ("name", "rule"),
    [("pytorch_optimizer.AdEMAMix", True), ("pytorch_optimizer.Lion", True),
     ("schedulefree.AdamWScheduleFree", True), ("torchao.optim.AdamW8bit", True),
     ("pytorch_optimizer.SOAP", False), ("schedulefree.SGDScheduleFree", False),
     ("torch.optim.Adafactor", False), ("torch.optim.Rprop", False),
     ("pytorch_optimizer.Yogi", False)],
)  # fmt: skip
def test_optimizers_of_libraries_have_adams_rule_where_it_holds(name, rule):
    """Where each entry is updated by itself, and gradients 64 times as large make one update."""
    model = mup(gpt2)
    built = library.built(model, name, 0.02)
    if not rule:
        with pytest.raises(ConfigError, match=f"no rule for {name.rpartition('.')[2]}: Adam's"):
            groups.by_width(model, [built])
        return
    found = rates(model, built)
    for name, dims in infinite(gpt2).items():
        assert found[name][0] == pytest.approx(0.02 * package_adam(dims), rel=1e-6), name


def test_a_width_needs_a_base():
    with pytest.raises(ConfigError, match=r"base_width=null: model\.parametrization=mup needs"):
        gpt2(WIDTH, parametrization="mup")


RUN = [*TINY, "model.parametrization=mup", "model.base_width=4", "data=synthetic",
       "data.n_tokens=4000", "precision=fp64", "train.max_steps=2"]  # fmt: skip


def test_runs_go_on_in_both_parametrizations_with_what_they_compute(tmp_path: Path) -> None:
    """init_from converts, with the loss of the trained weights as the proof; a fork does not."""
    run = ["train", *RUN, "optimizer.lr=0.01"]
    first = llmexp(*run, "hydra.run.dir=a", cwd=tmp_path)
    assert first.code == 0, first.err
    assert "; their rates x 0.25, weight decay x 4; logits x 0.25;" in " ".join(first.out.split())
    still = ["optimizer.lr=1e-30", "model.init_from=a", "train.max_steps=1"]
    losses = []
    for more in (
        [],
        ["model.base_width=2"],
        ["model.parametrization=standard", "model.base_width=null"],
    ):
        found = llmexp(*run, *still, *more, "hydra.run.dir=b", "checkpoint.resume=never",
                       cwd=tmp_path)  # fmt: skip
        assert found.code == 0, found.err
        losses.append(found.rows()[0]["train/loss"])
        (tmp_path / "b").rename(tmp_path / f"b{len(losses)}")
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-12)
    other = llmexp("train", "fork.run=a", "model.base_width=8", cwd=tmp_path)
    assert other.code == 2
    assert "model.base_width=8: the parent's weights are of 4" in other.err
