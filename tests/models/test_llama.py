"""Llama: rotations, initial weights, refusals. tests/exchange/test_families.py compares it with
transformers' own."""

import math

import numpy as np
import pytest
import torch

from llmexp.models.llama import Llama, apply_rope, rope_tables

SIZES = dict(
    vocab_size=61,
    max_position_embeddings=24,
    n_layers=3,
    n_heads=6,
    n_kv_heads=2,
    d_model=48,
    d_ff=80,
    dropout=0.0,
    rope_theta=100.0,
)


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


def test_nothing_but_parameters_is_saved_and_meta_models_come_alive() -> None:
    torch.manual_seed(3)
    first = Llama(**SIZES)
    assert set(first.state_dict()) == {name for name, _ in first.named_parameters()}
    with torch.device("meta"):
        late = Llama(**SIZES)
    late.to_empty(device="cpu")
    torch.manual_seed(3)
    late.init_weights()
    tokens_bt = torch.randint(0, SIZES["vocab_size"], (2, 24))
    assert torch.equal(first(tokens_bt), late(tokens_bt))


def test_initial_weights_have_the_stated_spread() -> None:
    torch.manual_seed(2)
    model = Llama(500, 128, 8, 4, 2, 128, 384)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert (parameter == 1).all()
        else:
            residual = "out_proj" in name or "down_proj" in name
            std = 0.02 / math.sqrt(2 * 8) if residual else 0.02
            assert parameter.std().item() == pytest.approx(
                std, rel=5 / math.sqrt(2 * parameter.numel())
            )


def test_dropout_with_grouped_heads_acts_in_training_only() -> None:
    torch.manual_seed(4)
    model = Llama(**SIZES | {"dropout": 0.3})
    tokens_bt = torch.randint(0, SIZES["vocab_size"], (2, 24))
    assert not torch.equal(model(tokens_bt), model(tokens_bt))
    model.eval()
    assert torch.equal(model(tokens_bt), model(tokens_bt))


def test_flops_count_grouped_heads_and_an_untied_head_once() -> None:
    for tied_head in (True, False):
        model = Llama(**SIZES, tied_head=tied_head)
        per_layer = 48 * 48 * 2 + 48 * 16 * 2 + 3 * 48 * 80
        expected = 6 * (3 * per_layer + 61 * 48) + 12 * 3 * 20 * 48
        assert model.flops_per_token(20) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_kv_heads": 4}, r"model\.n_kv_heads=4 does not divide model\.n_heads=6.*: 2, 3, 6"),
        ({"n_heads": 7}, r"model\.n_heads=7 does not divide model\.d_model=48.*: 4, 6, 8"),
        (
            {"n_heads": 16, "n_kv_heads": 2},
            r"model\.d_model=48 / model\.n_heads=16.*model\.d_model=64",
        ),
        ({"rope_theta": 0.0}, r"model\.rope_theta=0\.0"),
        ({"norm_eps": float("inf")}, r"model\.norm_eps=inf"),
        ({"n_kv_heads": 0}, r"model\.n_kv_heads=0"),
    ],
)
def test_bad_sizes_are_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Llama(**SIZES | change)


def test_too_long_a_sequence_is_named() -> None:
    with pytest.raises(ValueError, match=r"25 tokens.*model\.max_position_embeddings=24"):
        Llama(**SIZES)(torch.zeros(1, 25, dtype=torch.long))


def test_trunk_is_one_graph() -> None:
    model = Llama(**SIZES)
    tokens_bt = torch.randint(0, SIZES["vocab_size"], (2, 24))
    whole = torch.compile(model.features, fullgraph=True, backend="eager")
    torch.testing.assert_close(whole(tokens_bt), model.features(tokens_bt))
