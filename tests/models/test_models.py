"""GPT-2 and Llama: initial weights, rotations, refusals.
tests/hf/test_families.py compares them with transformers' own."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from llmexp.models.gpt2 import GPT2
from llmexp.models.llama import Llama, apply_rope, rope_tables

SIZES: dict[str, Any] = dict(
    vocab_size=61, max_position_embeddings=24, n_layers=3, n_heads=4, d_model=32, d_ff=80,
    dropout=0.0,
)  # fmt: skip
GROUPED = SIZES | dict(n_heads=6, n_kv_heads=2, d_model=48, rope_theta=100.0)
KINDS = [pytest.param(GPT2, SIZES, id="gpt2"), pytest.param(Llama, GROUPED, id="llama")]


def tokens_of(batch: int = 2, length: int = 24) -> torch.Tensor:
    return torch.randint(0, SIZES["vocab_size"], (batch, length))


@pytest.mark.parametrize(
    "model",
    [
        lambda: GPT2(500, 128, 8, 4, 128, 512, 0.0),
        lambda: Llama(500, 128, 8, 4, 2, 128, 384),
        lambda: Llama(500, 128, 8, 4, 2, 128, 384, n_experts=4),
    ],
    ids=["gpt2", "llama", "experts"],
)
def test_initial_weights_have_the_stated_spread(model: Any) -> None:
    torch.manual_seed(2)
    made = model()
    assert not any(buffer.any() for name, buffer in made.named_buffers() if "balance" in name)
    for name, parameter in made.named_parameters():
        if name.endswith("bias"):
            assert (parameter == 0).all()
        elif "norm" in name:
            assert (parameter == 1).all()
        else:
            residual = "out_proj" in name or "down_proj" in name
            std = 0.02 / math.sqrt(2 * 8) if residual else 0.02
            # The sample deviation of n normals has a relative error of 1 / sqrt(2 n); five of
            # those.
            n = parameter.numel()
            assert parameter.std().item() == pytest.approx(std, rel=5 / math.sqrt(2 * n))
            assert abs(parameter.mean().item()) < 5 * std / math.sqrt(n)
            assert len(parameter.unique()) > 0.9 * n  # no expert is another's copy


@pytest.mark.parametrize(("build", "sizes"), KINDS)
def test_weights_depend_on_the_seed_alone_and_dropout_acts_in_training_only(build, sizes):
    """Also by way of the meta device. Nothing but parameters is saved."""
    torch.manual_seed(3)
    first = build(**sizes)
    assert set(first.state_dict()) == {name for name, _ in first.named_parameters()}
    with torch.device("meta"):
        late = build(**sizes | {"dropout": 0.3})
    assert all(parameter.is_meta for parameter in late.parameters())
    late.to_empty(device="cpu")
    torch.manual_seed(3)
    late.init_weights()
    for name, value in first.state_dict().items():
        assert torch.equal(value, late.state_dict()[name]), name
    tokens_bt = tokens_of()
    assert not torch.equal(late(tokens_bt), late(tokens_bt))
    assert torch.equal(first(tokens_bt), late.eval()(tokens_bt))


@pytest.mark.parametrize(
    ("build", "sizes", "message"),
    [
        (GPT2, SIZES | {"n_heads": 5}, r"n_heads=5 does not divide model\.d_model=32.*: 2, 4, 8"),
        (Llama, GROUPED | {"n_kv_heads": 4}, r"n_kv_heads=4 does not divide model\.n_heads=6"),
        (
            Llama,
            GROUPED | {"n_heads": 7},
            r"n_heads=7 does not divide model\.d_model=48.*: 4, 6, 8",
        ),
        (Llama, GROUPED | {"n_heads": 16}, r"d_model=48: gives 16 heads .*model\.d_model=64"),
    ],
)
def test_bad_sizes_are_named(build, sizes, message):
    with pytest.raises(ValueError, match=rf"model\.{message}"):
        build(**sizes)


@pytest.mark.parametrize(("build", "sizes"), KINDS)
def test_too_long_a_sequence_is_named_and_the_trunk_is_one_graph(
    build: Any, sizes: dict[str, Any]
) -> None:
    model = build(**sizes)
    with pytest.raises(ValueError, match=r"25 tokens.*model\.max_position_embeddings=24"):
        model(torch.zeros(1, 25, dtype=torch.long))
    tokens_bt = tokens_of()
    whole = torch.compile(model.hidden, fullgraph=True, backend="eager")
    torch.testing.assert_close(whole(tokens_bt), model.hidden(tokens_bt))


def test_rotary_tables_stay_fp32_under_autocast_and_rotate_pairs() -> None:
    length, head_dim, theta = 2048, 8, 10000.0
    x_tk = torch.randn(length, head_dim)
    with torch.autocast("cpu", torch.bfloat16):
        cos_tk, sin_tk = rope_tables(length, head_dim, theta, like=x_tk)
    assert cos_tk.dtype == sin_tk.dtype == torch.float32
    # of each position and feature pair, in fp64
    angles = np.arange(length)[:, None] * theta ** (-2 * np.arange(head_dim // 2) / head_dim)
    # An angle below 2048 is kept to 2^-14 (half a unit in the last of 24 bits), the frequency adds
    # as much.
    assert np.abs(cos_tk.numpy()[:, :4] - np.cos(angles)).max() < 2**-12
    assert np.abs(sin_tk.numpy()[:, 4:] - np.sin(angles)).max() < 2**-12
    # Feature i and i + k/2 are one complex number, turned by the angle.
    pairs = (x_tk.numpy()[:, :4] + 1j * x_tk.numpy()[:, 4:]) * np.exp(1j * angles)
    got = apply_rope(x_tk, cos_tk, sin_tk).numpy()
    # A pair's modulus is below 8: an angle's error of 2^-12 moves it by less than 2^-9.
    assert np.abs(got[:, :4] + 1j * got[:, 4:] - pairs).max() < 2**-9


def test_rope_in_bf16_rounds_once() -> None:
    torch.manual_seed(1)
    cos_tk, sin_tk = rope_tables(512, 16, 10000.0, like=torch.zeros(1))
    x_tk = torch.randn(512, 16).bfloat16()
    got = apply_rope(x_tk, cos_tk, sin_tk)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, apply_rope(x_tk.float(), cos_tk, sin_tk).bfloat16())
