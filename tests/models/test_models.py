"""GPT-2 and Llama: causal, initial weights, rotations, counts, refusals.
tests/hf/test_families.py compares them with transformers' own."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

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


@pytest.mark.parametrize(("build", "sizes"), KINDS)
@settings(max_examples=15)
@given(length=st.integers(2, 24), data=st.data())
def test_a_token_changes_no_earlier_logit(
    build: Any, sizes: dict[str, Any], length: int, data: st.DataObject
) -> None:
    torch.manual_seed(1)
    model = build(**sizes).double()
    position = data.draw(st.integers(1, length - 1))
    tokens_bt = tokens_of(1, length)
    changed_bt = tokens_bt.clone()
    changed_bt[0, position] = (changed_bt[0, position] + 1) % SIZES["vocab_size"]
    with torch.no_grad():
        before, after = model(tokens_bt)[0], model(changed_bt)[0]
    torch.testing.assert_close(before[:position], after[:position], rtol=0, atol=1e-14)
    assert not torch.equal(before[position], after[position])


@pytest.mark.parametrize(
    "model",
    [lambda: GPT2(500, 128, 8, 4, 128, 512, 0.0), lambda: Llama(500, 128, 8, 4, 2, 128, 384)],
    ids=["gpt2", "llama"],
)
def test_initial_weights_have_the_stated_spread(model: Any) -> None:
    torch.manual_seed(2)
    for name, parameter in model().named_parameters():
        if name.endswith("bias"):
            assert (parameter == 0).all()
        elif "norm" in name:
            assert (parameter == 1).all()
        else:
            residual = "out_proj" in name or "down_proj" in name
            std = 0.02 / math.sqrt(2 * 8) if residual else 0.02
            # The sample deviation of n normals has a relative error of 1 / sqrt(2 n); five of
            # those.
            assert parameter.std().item() == pytest.approx(
                std, rel=5 / math.sqrt(2 * parameter.numel())
            )
            assert abs(parameter.mean().item()) < 5 * std / math.sqrt(parameter.numel())


@pytest.mark.parametrize(("build", "sizes"), KINDS)
def test_weights_depend_on_the_seed_alone_and_nothing_else_is_saved(
    build: Any, sizes: dict[str, Any]
) -> None:
    """Also by way of the meta device."""
    torch.manual_seed(3)
    first: nn.Module = build(**sizes)
    assert set(first.state_dict()) == {name for name, _ in first.named_parameters()}
    with torch.device("meta"):
        late = build(**sizes)
    assert all(parameter.is_meta for parameter in late.parameters())
    late.to_empty(device="cpu")
    torch.manual_seed(3)
    late.init_weights()
    for name, value in first.state_dict().items():
        assert torch.equal(value, late.state_dict()[name]), name
    tokens_bt = tokens_of()
    assert torch.equal(first(tokens_bt), late(tokens_bt))


@pytest.mark.parametrize(("build", "sizes"), KINDS)
def test_dropout_acts_in_training_only(build: Any, sizes: dict[str, Any]) -> None:
    torch.manual_seed(4)
    model = build(**sizes | {"dropout": 0.3})
    tokens_bt = tokens_of()
    assert not torch.equal(model(tokens_bt), model(tokens_bt))
    model.eval()
    assert torch.equal(model(tokens_bt), model(tokens_bt))


def test_flops_of_gpt2_small() -> None:
    with torch.device("meta"):
        model = GPT2(50257, 1024, 12, 12, 768, 3072)
    # 12 layers of 12 width^2, the head, and attention: 854.44 million, known as 0.855 GFLOP.
    matmul_parameters = 12 * 12 * 768**2 + 50257 * 768
    assert model.flops_per_token(1024) == 6 * matmul_parameters + 12 * 12 * 1024 * 768
    assert model.flops_per_token(1024) == pytest.approx(0.855e9, rel=1e-3)


def test_flops_count_grouped_heads_and_an_untied_head_once() -> None:
    for tied_head in (True, False):
        model = Llama(**GROUPED, tied_head=tied_head)
        per_layer = 48 * 48 * 2 + 48 * 16 * 2 + 3 * 48 * 80
        expected = 6 * (3 * per_layer + 61 * 48) + 12 * 3 * 20 * 48
        assert model.flops_per_token(20) == expected


BAD_GPT2: list[tuple[dict[str, Any], str]] = [
    ({"n_heads": 5}, r"model\.n_heads=5 does not divide model\.d_model=32.*: 2, 4, 8"),
]
BAD_LLAMA: list[tuple[dict[str, Any], str]] = [
    ({"n_kv_heads": 4}, r"model\.n_kv_heads=4 does not divide model\.n_heads=6.*: 2, 3, 6"),
    ({"n_heads": 7}, r"model\.n_heads=7 does not divide model\.d_model=48.*: 4, 6, 8"),
    ({"n_heads": 16}, r"model\.d_model=48: gives 16 heads .*model\.d_model=64"),
]


@pytest.mark.parametrize(
    ("build", "sizes", "change", "message"),
    [*((GPT2, SIZES, *bad) for bad in BAD_GPT2), *((Llama, GROUPED, *bad) for bad in BAD_LLAMA)],
)
def test_bad_sizes_are_named(
    build: Any, sizes: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build(**sizes | change)


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


def angles(length: int, head_dim: int, theta: float) -> np.ndarray:
    """Angle of each position (rows) and feature pair (columns), in fp64."""
    frequencies = np.array([theta ** (-2 * i / head_dim) for i in range(head_dim // 2)])
    return np.arange(length)[:, None] * frequencies[None, :]


def test_rotary_tables_stay_fp32_under_autocast_and_rotate_pairs() -> None:
    length, head_dim, theta = 2048, 8, 10000.0
    x_tk = torch.randn(length, head_dim)
    with torch.autocast("cpu", torch.bfloat16):
        cos_tk, sin_tk = rope_tables(length, head_dim, theta, like=x_tk)
    assert cos_tk.dtype == sin_tk.dtype == torch.float32
    expected = angles(length, head_dim, theta)
    # An angle below 2048 is kept to 2^-14 (half a unit in the last of 24 bits), the frequency adds
    # as much.
    assert np.abs(cos_tk.numpy()[:, :4] - np.cos(expected)).max() < 2**-12
    assert np.abs(sin_tk.numpy()[:, 4:] - np.sin(expected)).max() < 2**-12
    # Feature i and i + k/2 are one complex number, turned by the angle.
    pairs = (x_tk.numpy()[:, :4] + 1j * x_tk.numpy()[:, 4:]) * np.exp(1j * expected)
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
