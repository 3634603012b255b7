"""What the stages of assembly share, and where variables of the environment get their values."""

import pytest
from torch import Tensor, nn

from llmexp.config.values import ConfigError
from llmexp.models.gpt2 import GPT2
from llmexp.system import hardware
from llmexp.train.assembly.assemble import Cache, assemble
from llmexp.train.assembly.building import dropout_words
from tests.tools import composed

SMALL = ["data=synthetic", "data.n_tokens=4000", "model.n_layers=1", "train.device=cpu"]


def test_results_are_shared_for_the_same_arguments() -> None:
    """Plain values are the same where they are equal, objects only where they are one."""
    made: list[tuple[object, ...]] = []

    def make(*arguments: object) -> object:
        made.append(arguments)
        return object()

    once, one = Cache(), object()
    assert once(make, {"a": 1, "b": [2]}, one) is once(make, {"b": [2], "a": 1}, one)
    assert len(made) == 1
    # YAML has keys of several types
    assert once(make, {1: {2: 0, "b": 0}, "a": 1}) is once(make, {"a": 1, 1: {"b": 0, 2: 0}})
    made.pop()
    for other in ({"a": 1, "b": [3]}, one), ({"a": 1, "b": [2]}, object()), ({"a": 1, "b": [2]},):
        once(make, *other)
    assert len(made) == 4

    def of_another_module(*arguments: object) -> object:
        return "another"

    of_another_module.__name__ = make.__name__
    assert once(of_another_module, {1: {2: 0, "b": 0}, "a": 1}) == "another"


def test_configs_with_equal_sections_share_model_tokenizer_and_corpus() -> None:
    once = Cache()
    one, other = (assemble(composed(*SMALL, f"optimizer.lr={lr}"), once) for lr in (0.1, 0.2))
    assert one.corpus is other.corpus
    assert one.tokenizer is other.tokenizer
    assert assemble(composed(*SMALL, "data.seed=3"), once).corpus is not one.corpus


def test_the_config_keeps_variables_and_parts_get_their_values(monkeypatch) -> None:
    """A value that looks like a variable itself is not filled in again."""
    monkeypatch.setenv("RATE", "0.0125")
    monkeypatch.setenv("WIDTH", "24")
    monkeypatch.setenv("NOTE", "${oc.env:WIDTH}")
    given = {"optimizer.lr": "RATE", "model.d_model": "WIDTH", "+user.note": "NOTE"}
    overrides = [f"{key}=${{oc.env:{name}}}" for key, name in given.items()]
    parts = assemble(composed(*SMALL, *overrides, "model.n_heads=2"))
    config = parts.config
    assert config.optimizer["lr"] == "${oc.env:RATE}"
    assert config.model["d_model"] == "${oc.env:WIDTH}"
    assert parts.user == {"note": "${oc.env:WIDTH}"}
    model = parts.new_model()
    assert model.token_embedding.weight.shape[1] == 24
    assert parts.build_optimizers(model)[0].param_groups[0]["lr"] == 0.0125


class Broken(GPT2):
    def forward(self, tokens_bt: Tensor) -> Tensor:
        raise ArithmeticError("broken")


class Logits(nn.Module):
    """A model with layers of known names and a head, which gives its logits alone."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        self.inner = GPT2(**sizes)

    @property
    def head_weight(self) -> Tensor:
        return self.inner.head_weight

    def forward(self, tokens_bt: Tensor) -> Tensor:
        return self.inner(tokens_bt)


def test_a_model_without_features_is_not_split_over_its_vocabulary(monkeypatch) -> None:
    monkeypatch.setenv("LLMEXP_ALLOW", "tests")
    two = ["parallelism=tp", "parallelism.nproc_per_node=2", f"model._target_={__name__}.Logits"]
    with pytest.raises(ConfigError, match="there is no plan for splitting the layers of"):
        assemble(composed(*SMALL, *two))


def test_a_model_that_has_no_room_here_is_not_tried(monkeypatch) -> None:
    monkeypatch.setenv("LLMEXP_ALLOW", "tests")
    config = composed(*SMALL, f"model._target_={__name__}.Broken")
    with pytest.raises(ConfigError, match=r"failed on tokens .*ArithmeticError: broken"):
        assemble(config)
    model = assemble(composed(*SMALL)).new_model()
    held = sum(p.nbytes for p in model.parameters())
    monkeypatch.setattr(hardware, "memory_bytes", lambda device: 2 * held - 1)
    assert isinstance(assemble(config).new_model(), Broken)


def test_a_model_that_each_rank_builds_whole_says_what_that_takes(monkeypatch) -> None:
    monkeypatch.setenv("LLMEXP_ALLOW", "tests")
    own, two = f"model._target_={__name__}.Broken", "parallelism.nproc_per_node=2"
    for kind, target in (("fsdp", own), ("ddp", own), ("fsdp", "model=gpt_tiny")):
        parts = assemble(composed(*SMALL, target, two, f"parallelism={kind}"), tried=True)
        said = [text for text in parts.run.warnings if "builds all of" in text]
        assert len(said) == (1 if (kind, target) == ("fsdp", own) else 0)
        if said:
            held = 4 * parts.run.parameters / 2**30
            assert f"Broken before it keeps its part: {held:.3g} GiB" in said[0]


def test_only_what_is_dropout_is_called_so() -> None:
    """A number of another module may be called p too."""
    model = nn.Sequential(nn.Dropout1d(0.2), nn.Module(), nn.Module(), nn.Dropout(0.0))
    model[1].p, model[1].drop_below, model[2].attention_dropout = 0.9, 0.7, 0.3
    assert dropout_words(model) == ", dropout 0.2 and 0.3 in training"
