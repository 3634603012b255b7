"""The shape of a model from one number: `model.depth` or `model.size`, by `model.shape_rule`."""

import json
import math

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from llmexp.config.rules import SHAPE_KEYS
from llmexp.config.values import ConfigError
from llmexp.models.common import parameter_counts
from llmexp.models.gpt2 import GPT2
from llmexp.models.llama import Llama
from llmexp.run.shape import parameters_in, solve_shape
from llmexp.train.assembly.assemble import assemble
from tests.conftest import ROOT
from tests.tools import composed, exact
from tests.train.resumed import ends

QUIET = [
    "tracker=none", "train.device=cpu", "precision=fp32", "data=synthetic", "data.n_tokens=20000",
    "batch.sequence_length=12", "batch.micro_batch_size=2", "train.sample_tokens=0",
    "metrics.picture=false",
]  # fmt: skip
SMALL = "model.shape_rule={aspect: 8, head_width: 8, multiple: 8}"


def gpt2_parameters(depth: int, aspect: float, head: int, factor: float, multiple: int) -> int:
    """Those of GPT-2 with 320 tokens and a tied head, without positions: by arithmetic alone."""
    width = max(1, math.floor(aspect * depth / head + 0.5)) * head
    inner = max(1, math.floor(factor * width / multiple + 0.5)) * multiple
    block = 4 * width * width + 4 * width + 2 * width * inner + inner + width + 4 * width
    return depth * block + 2 * width + 320 * width


def section(**more) -> dict:
    sizes = dict.fromkeys(SHAPE_KEYS)
    del sizes["n_kv_heads"]
    whole = {"_target_": "llmexp.models.gpt2.GPT2", "vocab_size": 320, **sizes}
    return whole | {"size": None, "depth": None, "shape_rule": None} | more


def parameters(kind: type, found: dict) -> int:
    names = [name for name in SHAPE_KEYS if name in found]
    with torch.device("meta"):
        return parameter_counts(kind(320, 32, **{name: found[name] for name in names}))[0]


rules = st.fixed_dictionaries({
    "aspect": st.sampled_from([4.0, 7.5, 16.0]),
    "head_width": st.sampled_from([4, 6, 16]),
    "mlp_factor": st.sampled_from([1.0, 2.7, 4.0]),
    "multiple": st.sampled_from([1, 8, 20]),
    "queries_per_kv": st.just(1),
})  # fmt: skip


@settings(max_examples=40)
@given(rules, st.integers(2_000, 300_000))
def test_a_size_takes_the_nearest_of_all_depths(rule, size):
    numbers = [rule[k] for k in ("aspect", "head_width", "mlp_factor", "multiple")]
    by_depth = {d: gpt2_parameters(d, *numbers) for d in range(1, 80)}
    found, words = solve_shape(
        section(size=size, shape_rule=rule), lambda s: by_depth[s["n_layers"]], 4.0
    )
    nearest = min(by_depth, key=lambda d: abs(math.log(by_depth[d] / size)))
    chosen = found["n_layers"]
    assert parameters(GPT2, found) == by_depth[chosen]
    assert abs(math.log(by_depth[chosen] / size)) == pytest.approx(
        abs(math.log(by_depth[nearest] / size)), abs=1e-12
    )
    assert found["d_model"] == found["n_heads"] * rule["head_width"]
    again = solve_shape(found, lambda s: by_depth[s["n_layers"]], 4.0)
    assert again == (found, words)  # written back, it is solved again into itself


def test_the_usual_rule_makes_known_shapes():
    found, words = solve_shape(section(depth=12), lambda s: 0, 4.0)
    assert [found[k] for k in ("n_layers", "n_heads", "d_model", "d_ff")] == [12, 12, 768, 3072]
    assert "n_layers 12, n_heads 12, d_model 768, d_ff 3,072" in words
    llama = section(depth=16, n_kv_heads=None) | {"_target_": "llmexp.models.llama.Llama"}
    grouped = {"queries_per_kv": 4}
    found, _ = solve_shape(llama | {"shape_rule": grouped}, lambda s: 0, 8 / 3)
    assert (found["n_heads"], found["n_kv_heads"], found["d_ff"]) == (16, 4, 2752)
    assert found["shape_rule"]["mlp_factor"] == 8 / 3  # stands in the config from now on
    found, _ = solve_shape(llama | {"shape_rule": grouped, "depth": 6}, lambda s: 0, 8 / 3)
    assert (found["n_heads"], found["n_kv_heads"]) == (6, 3)  # 4 does not divide 6, 2 does
    assert parameters(Llama, found)


def test_what_is_given_beside_stays_and_is_said():
    found, words = solve_shape(section(depth=4, d_ff=100), lambda s: 0, 4.0)
    assert (found["d_model"], found["d_ff"]) == (256, 100)
    assert "d_ff 100 (1,024 by the rule)" in words
    found, words = solve_shape(section(depth=4, d_model=128), lambda s: 0, 4.0)
    assert (found["n_heads"], found["d_ff"]) == (2, 512)  # these follow from the width
    assert "n_heads 2 (4 by the rule), d_model 128 (256 by the rule)" in words
    assert solve_shape(found, lambda s: 0, 4.0) == (found, words)


def test_sizes_in_words():
    texts = {"38M": 38_000_000, "1.5B": 1_500_000_000, "50k": 50_000, 7e6: 7_000_000, "1_000": 1000}
    assert {text: parameters_in(text) for text in texts} == texts


def test_a_model_without_these_sizes_is_refused():
    own = {"_target_": "mine.Net", "width": 3, "depth": 2}
    with pytest.raises(ConfigError, match=r"model.depth=2: mine.Net has no n_layers that a rule"):
        solve_shape(own, lambda s: 0, 4.0)


def test_the_last_word_on_a_shape_counts():
    """Sizes of an option and of a file give way to a number; those beside it or after it stay."""
    assert composed("model=gpt2_small", "model.depth=3").model["n_layers"] is None
    assert composed("model=gpt2_small").model["n_layers"] == 12
    one = composed("experiment=shakespeare_nanogpt_cpu", "model.depth=3", "model.d_ff=8").model
    assert (one["n_layers"], one["d_model"], one["d_ff"]) == (None, None, 8)
    assert one["max_position_embeddings"] == 64
    qwen = composed("model=qwen3_0_6b", "model.depth=3").model
    assert (qwen["head_dim"], qwen["n_kv_heads"], qwen["vocab_size"]) == (None, None, 151936)


OPTIONS = {path.stem for path in (ROOT / "conf/model").glob("*.yaml")} - {"hf"}
ONE_OF_EACH = ("gpt2_xl", "llama3_8b", "olmo2_1b", "olmoe_1b_7b", "qwen3_0_6b")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in ONE_OF_EACH))
        for name in sorted(OPTIONS - {"moe_tiny"})  # which has no dense MLP
    ],
)
def test_the_mlp_follows_a_width_that_is_given_alone(name):
    """At the ratio of the option, or of its family; a given d_ff stays, wherever it stands."""

    def width_of_mlp(*given: str) -> int:
        more = [f"model={name}", "data=synthetic", "batch.sequence_length=8", *given]
        model = assemble(composed(*more, "model.n_layers=1")).config.model
        assert isinstance(model["d_ff"], int)
        return model["d_ff"]

    shipped, width = width_of_mlp(), composed(f"model={name}").model["d_model"]
    for other in (width // 2, 2 * width):
        alone = width_of_mlp(f"model.d_model={other}")
        assert abs(alone / other - shipped / width) <= 32 / other
    assert alone == 2 * shipped
    given = [f"model.d_model={other}", "model.d_ff=24"]
    assert width_of_mlp(*given) == width_of_mlp(*reversed(given)) == 24


def test_runs_of_a_depth_and_of_its_sizes_are_one_run(tmp_path):
    """Also cut and gone on with; its config has the sizes and the rule, and a fork keeps them."""
    steps = [*QUIET, "train.max_steps=4", "train.log_every=1", "train.eval_every=null"]
    stopped = ["model.depth=2", SMALL, "train.stop_step=2", "hydra.run.dir=a"]
    first = ends(tmp_path, "train", *steps, *stopped, code=75)
    ends(tmp_path, "resume", "a")
    config = yaml.safe_load((first.folder / "config.yaml").read_text())["model"]
    assert (config["n_layers"], config["d_model"], config["depth"]) == (2, 16, 2)
    assert config["shape_rule"]["mlp_factor"] == 4.0
    words = first.json("run.json")["shape"]
    assert words.startswith("model.depth=2; n_layers 2, n_heads 2, d_model 16, d_ff 64 (model.sh")
    assert " ".join(words.split()) in " ".join(first.out.split())
    sizes = ["model.n_layers=2", "model.n_heads=2", "model.d_model=16", "model.d_ff=64"]
    same = ends(tmp_path, "train", *steps, *sizes, "hydra.run.dir=b")
    assert [r["train/loss"] for r in exact(first)] == [r["train/loss"] for r in exact(same)]
    fork = ends(tmp_path, "plan", "fork.run=a", "train.max_steps=6", "--json")
    assert json.loads(fork.out)["shape"] == words


def test_a_shape_costs_no_build_of_its_own():
    """The model that is counted last is the one that the run describes."""
    parts = assemble(composed(*QUIET, "model.size=20k", SMALL))
    assert parts.run.parameters_with_head == parameters(GPT2, parts.config.model)
    assert parts.config.model["size"] == "20k"
