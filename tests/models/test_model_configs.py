"""Every shipped model config builds what its name says."""

import importlib
import inspect
import math

import pytest
import torch

from llmexp.config.parts import COMMON
from llmexp.models.common import parameter_counts
from tests.conftest import ROOT
from tests.tools import option

PARAMETERS = {
    # bytes: 320 tokens; 4 layers of 12 width^2 + 13 width, two embeddings, the final norm
    "gpt_tiny": 4 * (12 * 128**2 + 13 * 128) + (320 + 256) * 128 + 2 * 128,
    "gpt2_small": 124_439_808,
    "gpt2_medium": 354_823_168,
    "gpt2_large": 774_030_080,
    "gpt2_xl": 1_557_611_200,
    # 32768 tokens
    "llama_100m": 12 * (2 * 768**2 + 2 * 768 * 256 + 3 * 768 * 2048 + 2 * 768) + 32768 * 768 + 768,
    "llama_1b": 1_235_814_400,
    # as published
    "llama3_1b": 1_235_814_400,
    "llama3_8b": 8_030_261_248,
    "mistral_7b": 7_241_732_096,
    "olmo2_1b": 1_484_916_736,
    "qwen3_0_6b": 596_049_920,
    "qwen3_1_7b": 1_720_574_976,
    "smollm2_135m": 134_515_008,
    # 320 tokens; 4 layers of attention, router, 8 experts and norms
    "moe_tiny": 4 * (4 * 128**2 + 8 * 128 + 8 * 3 * 128 * 256 + 2 * 128) + 320 * 128 + 128,
    "olmoe_1b_7b": 6_919_161_856,
    "qwen3_30b_a3b": 30_532_122_624,
}
ACTIVE = {"olmoe_1b_7b": 1_282_017_280, "qwen3_30b_a3b": 3_353_032_704}
FILLED_IN = {"gpt_tiny": 320, "moe_tiny": 320, "llama_100m": 32768}


def test_every_config_is_covered() -> None:
    assert {path.stem for path in (ROOT / "conf/model").glob("*.yaml")} == {"hf", *PARAMETERS}


@pytest.mark.parametrize("name", PARAMETERS)
def test_config_builds_the_stated_model(name: str) -> None:
    arguments = option(f"model/{name}")
    for name_of_all in COMMON["model"]:
        del arguments[name_of_all]
    module_name, class_name = arguments.pop("_target_").rsplit(".", 1)
    model_class = getattr(importlib.import_module(module_name), class_name)
    assert [*arguments] == [*inspect.signature(model_class).parameters]  # every knob, in order
    assert (arguments["vocab_size"] is None) == (name in FILLED_IN)
    arguments["vocab_size"] = arguments["vocab_size"] or FILLED_IN[name]
    with torch.device("meta"):
        model = model_class(**arguments)
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]
    assert model.vocab_size == model.head_weight.shape[0]
    assert model.max_position_embeddings == arguments["max_position_embeddings"]
    assert model.flops_formula
    with_head, in_blocks = parameter_counts(model)
    shapes = {name: list(p.shape) for name, p in model.named_parameters()}
    inside = {name: s for name, s in shapes.items() if name.startswith("blocks.") and len(s) > 1}
    # of (experts, rows, columns) a token takes so many
    sent = arguments.get("experts_per_token", 0)
    used = [s if len(s) == 2 else [sent, *s[1:]] for s in inside.values()]
    idle = sum(map(math.prod, inside.values())) - sum(map(math.prod, used))
    assert in_blocks == sum(map(math.prod, used))
    assert PARAMETERS[name] - idle == ACTIVE.get(name, PARAMETERS[name] - idle)
    tables = [s for name, s in shapes.items() if "_embedding." in name]
    head = model.vocab_size * arguments["d_model"]
    tied = head if "head.weight" not in shapes else 0
    assert with_head == PARAMETERS[name] - idle - sum(a * b for a, b in tables) + tied
    if name == "gpt2_small":  # known as 0.855 GFLOP
        assert model.flops_per_token(1024) == pytest.approx(0.855e9, rel=1e-3)
    attention = 12 * arguments["n_layers"] * 64 * model.blocks[0].attention.q_proj.out_features
    assert model.flops_per_token(64) == 6 * (in_blocks + head) + attention
