"""Factors on rate and weight decay by patterns of names, the same ones whatever wraps the model.
tests/train/test_invariance.py holds them against float64 in every cut and layout."""

import dataclasses
import json
import re
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from llmexp.config.values import ConfigError
from llmexp.models.gpt2 import GPT2
from llmexp.models.llama import Llama
from llmexp.optim import groups, held, updating
from llmexp.optim.optimizers import adamw, lion, muon, sgd
from llmexp.optim.optimizers.settings import Group
from llmexp.optim.patterns import first_matches, plain_names
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
        assert [torch.equal(value, run[key]) for run in runs] == [n == place for n in range(3)], key


def test_a_fork_keeps_its_groups_and_ends_as_the_unbroken_run(tmp_path):
    whole = train(tmp_path, "whole", *RUN, GIVEN, "checkpoint.keep=null", "checkpoint.every=3")
    fork, plain = (dataclasses.replace(whole, folder=tmp_path / name) for name in ("fork", "plain"))
    for run, more in ((fork, []), (plain, ["optimizer.groups=[]"])):
        forked = ["train", "fork.run=whole@3", f"hydra.run.dir={run.folder.name}", *more]
        assert llmexp(*forked, cwd=tmp_path).code == 0
    assert exact(fork) == [row for row in exact(whole) if row["step"] > 3]
    same_state(fork.checkpoint(6), whole.checkpoint(6))
    embeddings = (weights(run, 6)["token_embedding.weight"] for run in (plain, whole))
    assert not torch.equal(*embeddings)


def test_a_plan_lists_what_each_group_takes(capfd, words):
    run = json.loads(run_here(capfd, "plan", *TINY, *RUN, GIVEN, "--json").out)
    mlp, embedding = 2 * (2 * 16 * 24 + 24 + 16), run["vocab_size"] * 16
    assert [list(group.values()) for group in run["groups"]] == [
        ["*.mlp.*", 0.3, 2.0, 8, mlp],
        ["*.token_embedding.*", 3.0, 0.0, 1, embedding],
        ["", 1.0, 1.0, 27, run["parameters"] - mlp - embedding],
    ]
    text = run_here(capfd, "plan", *TINY, *RUN, GIVEN).out
    words("plan/groups", "\n".join(re.findall(r"^.*group .*(?:\n  +.*)?", text, re.M)))


SIZES = {"vocab_size": 32, "max_position_embeddings": 8, "n_layers": 11, "n_heads": 2}
SIZES |= {"d_model": 8, "d_ff": 8}


def names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters()]


def taken(*patterns: str) -> list[list[str]]:
    """The names in a GPT-2 that each pattern takes, and last those that none does."""
    with torch.device("meta"):
        found = names(GPT2(**SIZES))
    places = first_matches(found, patterns, "clip.limits")
    order = (*range(len(patterns)), None)
    return [[n for n, place in zip(found, places, strict=True) if place == i] for i in order]


def test_the_first_pattern_that_matches_the_whole_name_counts():
    norms, embedding, attention, rest = taken("*norm*", "*.token_embedding.*", "*.attention.*")
    assert all("norm" in name for name in norms)
    assert len(norms) == 2 * (2 * 11 + 1)
    assert embedding == ["token_embedding.weight"]
    assert len(attention) == 11 * 8
    assert [n for n in rest if ".mlp." not in n] == ["position_embedding.weight"]
    assert taken("*.q_proj.*")[0] == [
        f"blocks.{i}.attention.q_proj.{kind}" for i in range(11) for kind in ("weight", "bias")
    ]
    assert len(taken("blocks.1.*")[0]) == 16  # and not blocks.10
    assert len(taken("blocks.[01].*", "blocks.1?.*")[1]) == 16
    for wrong in ("q_proj", "blocks", "*.Q_proj.*", "token_embedding"):
        with pytest.raises(ConfigError, match="matches no parameter"):
            taken(wrong)


def test_wrappers_change_no_name():
    plain = Llama(**SIZES, n_kv_heads=1, tied_head=False)
    wanted = names(plain)
    compiled = torch.compile(plain)
    ddp = nn.Module()
    ddp.module = compiled  # as DistributedDataParallel holds it
    for wrapped in (plain, compiled, ddp):
        assert plain_names(names(wrapped)) == wanted
    inner = [name.replace("blocks.3.", "blocks.3._checkpoint_wrapped_module.") for name in wanted]
    assert plain_names(f"_fsdp_wrapped_module.{name}" for name in inner) == wanted
    for block in plain.blocks:  # as our own layouts compile
        block.compile()
    assert names(plain) == wanted


def of_library(kind: str) -> Callable[[GPT2], torch.optim.Optimizer]:
    return lambda model: getattr(torch.optim, kind)(model.parameters())


ZERO = "the weight decay of all its parameters is 0 without it; leave it out"
EARLIER = "takes no parameter, as the patterns before it take everything that it matches; put it"


@pytest.mark.parametrize(
    ("make", "found", "text"),
    [
        (of_library("SGD"), [Group("*.head.*", 0.5)], "0.match=*.head.*: matches no parameter"),
        (of_library("SGD"), [Group("*"), Group("*.mlp.*")], f"1.match=*.mlp.*: {EARLIER}"),
        (lambda m: torch.optim.SGD(m.blocks.parameters()), [Group("*.token_embedding.*")],
         "0.match=*.token_embedding.*: matches no parameter"),
        (of_library("LBFGS"), [Group("*", 0.5)], "=LBFGS: takes one rate for all parameters"),
        (of_library("Rprop"), [Group("*.mlp.*"), Group("*", 1.0, 0.5)],
         "1.weight_decay=0.5: Rprop has no weight decay"),
        (lambda m: [torch.optim.Rprop(m.blocks.parameters()),
                    torch.optim.SGD(m.token_embedding.parameters(), weight_decay=0.1)],
         [Group("*", 1.0, 0.5)], "0.weight_decay=0.5: Rprop has no weight decay"),
        (lambda m: sgd.sgd(m, lr=0.1), [Group("*.mlp.*", 0.3, 2.0)], f"0.weight_decay=2.0: {ZERO}"),
        (lambda m: adamw.adamw(m, lr=0.1), [Group("*.bias", 1.0, 0.0), Group("*", 1.0, 2.0)],
         f"0.weight_decay=0.0: {ZERO}"),
        (lambda m: adamw.adamw(m, lr=0.1), [Group("*", 1.0, 2.0)], None),
        (of_library("Rprop"), [Group("*", 0.5)], None),
    ],
)  # fmt: skip
def test_what_a_group_cannot_do_is_refused(make, found, text):
    model = GPT2(32, 8, 1, 2, 8, 8)
    expected = pytest.raises(ConfigError, match=re.escape(text)) if text else nullcontext()
    with expected:
        groups.by_name(model, held.as_list(make(model)), found)
