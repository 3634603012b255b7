"""Factors on rate and weight decay by patterns of names, with each optimizer. tests/train/
test_invariance.py holds them against float64 in every cut and layout."""

import dataclasses
import json

import pytest
import torch

from llmexp.config.values import ConfigError
from llmexp.models.gpt2 import GPT2
from llmexp.optim import groups, held, updating
from llmexp.optim.optimizers import adamw, lion, muon, sgd
from llmexp.optim.optimizers.settings import Group
from tests.conftest import TINY, llmexp, train
from tests.tools import exact, run_here, same_state, weights

BUILDERS = {
    "adamw": lambda m, lr, decay: adamw.adamw(m, lr=lr, weight_decay=decay),
    "sgd": lambda m, lr, decay: sgd.sgd(m, lr=lr, weight_decay=decay),
    "muon": lambda m, lr, decay: muon.muon(m, lr=lr, weight_decay=decay),
    "lion": lambda m, lr, decay: lion.lion(m, lr=lr, weight_decay=decay),
    "rmsprop": lambda m, lr, decay: torch.optim.RMSprop(
        m.parameters(), lr=lr, weight_decay=decay, momentum=0.5
    ),
}
FOUND = [Group("*.mlp.*", 0.3, 2.0), Group("*.token_embedding.*", 3.0, 0.0)]
GIVEN = (
    "optimizer.groups=[{match: '*.mlp.*', lr: 0.3, weight_decay: 2}, "
    "{match: '*.token_embedding.*', lr: 3, weight_decay: 0}]"
)
RUN = ["data=synthetic", "data.n_tokens=4000", "train.max_steps=6", "schedule.warmup_steps=2",
       "train.eval_every=3", "train.log_every=1"]  # fmt: skip


def trained(name: str, lr: float, decay: float, found: list[Group]) -> dict[str, torch.Tensor]:
    """Parameters after four updates of other gradients, at rates that a schedule gives."""
    torch.manual_seed(0)
    model = GPT2(32, 8, 1, 2, 8, 8)
    optimizers = held.as_list(BUILDERS[name](model, lr, decay))
    groups.by_name(model, optimizers, found)
    generator = torch.Generator().manual_seed(1)
    for factor in (0.5, 1.0, 0.7, 0.1):
        assert updating.set_rate(optimizers, factor) == lr * factor  # the base rate
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        updating.update(optimizers, torch.tensor(False))
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", BUILDERS)
def test_each_parameter_is_as_in_a_run_with_its_rate_and_decay(name):
    """To the bit, whatever group of the optimizer it was in."""
    got = trained(name, 0.02, 0.3, FOUND)
    runs = [trained(name, 0.02 * g.lr, 0.3 * g.weight_decay, []) for g in FOUND]
    runs.append(trained(name, 0.02, 0.3, []))
    for key, value in got.items():
        place = 0 if ".mlp." in key else 1 if key.startswith("token_embedding") else 2
        assert torch.equal(value, runs[place][key]), key
        others = [run[key] for run in runs[:place] + runs[place + 1 :]]
        assert not any(torch.equal(value, other) for other in others), key


def test_a_fork_keeps_its_groups_and_ends_as_the_unbroken_run(tmp_path):
    given = [*RUN, GIVEN, "checkpoint.keep=null", "checkpoint.every=3"]
    whole = train(tmp_path, "whole", *given)
    forked = ["train", "fork.run=whole@3", "hydra.run.dir=fork"]
    assert llmexp(*forked, cwd=tmp_path).code == 0
    fork = dataclasses.replace(whole, folder=tmp_path / "fork")
    assert exact(fork) == [row for row in exact(whole) if row["step"] > 3]
    same_state(fork.checkpoint(6), whole.checkpoint(6))
    without = [*forked[:2], "optimizer.groups=[]", "hydra.run.dir=without"]
    assert llmexp(*without, cwd=tmp_path).code == 0
    plain = dataclasses.replace(whole, folder=tmp_path / "without")
    assert not torch.equal(
        weights(plain, 6)["token_embedding.weight"], weights(whole, 6)["token_embedding.weight"]
    )


def test_a_plan_lists_what_each_group_takes(capfd):
    run = json.loads(run_here(capfd, "plan", *TINY, *RUN, GIVEN, "--json").out)
    taken = [list(group.values()) for group in run["groups"]]
    mlp, embedding = 2 * (2 * 16 * 24 + 24 + 16), run["vocab_size"] * 16
    rest = run["parameters"] - mlp - embedding
    assert taken == [
        ["*.mlp.*", 0.3, 2.0, 8, mlp],
        ["*.token_embedding.*", 3.0, 0.0, 1, embedding],
        ["", 1.0, 1.0, 27, rest],
    ]
    text = " ".join(run_here(capfd, "plan", *TINY, *RUN, GIVEN).out.split())
    assert f"group *.mlp.*: 8 tensors, {mlp:,} parameters, rate x 0.3, weight decay x 2 " in text
    size = f"27 tensors, {rest:,} parameters"
    assert f"group all others: {size}, rate and weight decay of the optimizer" in text


def test_what_a_group_cannot_do_is_refused():
    def given(optimizer, *found: Group) -> None:
        with pytest.raises(ConfigError) as refused:
            groups.by_name(model, [optimizer], found)
        texts.append(str(refused.value))

    model, texts = GPT2(32, 8, 1, 2, 8, 8), list[str]()
    given(torch.optim.SGD(model.parameters()), Group("*.head.*", 0.5))
    given(torch.optim.LBFGS(model.parameters()), Group("*", 0.5))
    given(torch.optim.Rprop(model.parameters()), Group("*.mlp.*"), Group("*", 1.0, 0.5))
    given(torch.optim.SGD(model.blocks.parameters()), Group("*.token_embedding.*", 0.5))
    assert "optimizer.groups.0.match=*.head.*: matches no parameter of the model" in texts[0]
    assert texts[1].startswith("optimizer=LBFGS: takes one rate for all parameters")
    assert texts[2].startswith("optimizer.groups.1.weight_decay=0.5: Rprop has no weight decay")
    assert texts[3].startswith("optimizer.groups.0.match=*.token_embedding.*: matches no")
    given(sgd.sgd(model, lr=0.1), Group("*.mlp.*", 0.3, 2.0))
    given(adamw.adamw(model, lr=0.1), Group("*.bias", 1.0, 0.0), Group("*", 1.0, 2.0))  # vectors
    text = "the weight decay of all its parameters is 0 without it; leave it out"
    assert texts[4] == f"optimizer.groups.0.weight_decay=2.0: {text}"
    assert texts[5] == f"optimizer.groups.0.weight_decay=0.0: {text}"
    groups.by_name(model, [adamw.adamw(model, lr=0.1)], [Group("*", 1.0, 2.0)])
    groups.by_name(model, [torch.optim.Rprop(model.parameters())], [Group("*", 0.5)])
