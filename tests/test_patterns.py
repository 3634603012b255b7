"""Parameters by patterns of their names: the same ones whatever wraps the model."""

import pytest
import torch
from torch import nn

from llmexp.config.values import ConfigError
from llmexp.models.gpt2 import GPT2
from llmexp.models.llama import Llama
from llmexp.optim.patterns import first_matches, plain_names

SIZES = {"vocab_size": 32, "max_position_embeddings": 8, "n_layers": 11, "n_heads": 2}
SIZES |= {"d_model": 8, "d_ff": 8}


def names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters()]


def gpt2() -> list[str]:
    with torch.device("meta"):
        return names(GPT2(**SIZES))


def taken(found: list[str], *patterns: str) -> list[list[str]]:
    places = first_matches(found, patterns, "clip.limits")
    pairs = list(zip(found, places, strict=True))
    return [[name for name, place in pairs if place == i] for i in (*range(len(patterns)), None)]


def test_the_first_pattern_that_matches_counts():
    norms, embedding, attention, rest = taken(
        gpt2(), "*norm*", "*.token_embedding.*", "*.attention.*"
    )
    assert all("norm" in name for name in norms)
    assert len(norms) == 2 * (2 * 11 + 1)
    assert embedding == ["token_embedding.weight"]
    assert len(attention) == 11 * 8
    assert [n for n in rest if ".mlp." not in n] == ["position_embedding.weight"]
    assert taken(gpt2(), "*.q_proj.*")[0] == [
        f"blocks.{i}.attention.q_proj.{kind}" for i in range(11) for kind in ("weight", "bias")
    ]


def test_the_whole_name_has_to_match_with_its_case():
    assert len(taken(gpt2(), "blocks.1.*")[0]) == 16  # and not blocks.10
    assert len(taken(gpt2(), "blocks.[01].*", "blocks.1?.*")[1]) == 16
    for wrong in ("q_proj", "blocks", "*.Q_proj.*", "token_embedding"):
        with pytest.raises(ConfigError, match="matches no parameter"):
            first_matches(gpt2(), [wrong], "clip.limits")


def test_a_pattern_that_takes_nothing_is_refused_with_the_names():
    with pytest.raises(ConfigError) as refused:
        first_matches(gpt2(), ["*", "*.head.*"], "optimizer.groups")
    text = str(refused.value)
    assert text.startswith("optimizer.groups.1.match=*.head.*: matches no parameter of the model")
    assert (
        "token_embedding.weight, position_embedding.weight, blocks.*.attention_norm.weight" in text
    )
    assert len(text) < 700  # each name once, not for every block
    with pytest.raises(ConfigError, match="the patterns before it take everything that it matches"):
        first_matches(gpt2(), ["*", "*.mlp.*"], "optimizer.groups")


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
