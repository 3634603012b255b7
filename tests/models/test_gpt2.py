"""GPT-2: causal, initial weights, refusals. tests/exchange/test_families.py compares it with
transformers' own."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmexp.models.gpt2 import GPT2

SIZES = dict(
    vocab_size=61,
    max_position_embeddings=24,
    n_layers=3,
    n_heads=4,
    d_model=32,
    d_ff=80,
    dropout=0.0,
)


@settings(max_examples=15)
@given(length=st.integers(2, 24), data=st.data())
def test_a_token_changes_no_earlier_logit(length: int, data: st.DataObject) -> None:
    torch.manual_seed(1)
    model = GPT2(**SIZES).double()
    position = data.draw(st.integers(1, length - 1))
    tokens_bt = torch.randint(0, SIZES["vocab_size"], (1, length))
    changed_bt = tokens_bt.clone()
    changed_bt[0, position] = (changed_bt[0, position] + 1) % SIZES["vocab_size"]
    with torch.no_grad():
        before, after = model(tokens_bt)[0], model(changed_bt)[0]
    torch.testing.assert_close(before[:position], after[:position], rtol=0, atol=1e-14)
    assert not torch.equal(before[position], after[position])


def test_initial_weights_have_the_stated_spread() -> None:
    torch.manual_seed(2)
    model = GPT2(500, 128, 8, 4, 128, 512, 0.0)
    for name, parameter in model.named_parameters():
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


def test_weights_depend_on_the_seed_alone_also_by_way_of_meta() -> None:
    torch.manual_seed(3)
    first = GPT2(**SIZES)
    with torch.device("meta"):
        late = GPT2(**SIZES)
    assert all(parameter.is_meta for parameter in late.parameters())
    late.to_empty(device="cpu")
    torch.manual_seed(3)
    late.init_weights()
    for name, value in first.state_dict().items():
        assert torch.equal(value, late.state_dict()[name]), name


def test_dropout_acts_in_training_only() -> None:
    torch.manual_seed(4)
    model = GPT2(**SIZES | {"dropout": 0.3})
    tokens_bt = torch.randint(0, SIZES["vocab_size"], (2, 24))
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_heads": 5}, r"model\.n_heads=5 does not divide model\.d_model=32.*: 2, 4, 8"),
        ({"n_layers": 0}, r"model\.n_layers=0: must be an integer above 0"),
        ({"vocab_size": None}, r"model\.vocab_size=None"),
        ({"d_ff": 4.0}, r"model\.d_ff=4\.0"),
        ({"d_model": True}, r"model\.d_model=True"),
        ({"dropout": 1.0}, r"model\.dropout=1\.0"),
        ({"dropout": -0.1}, r"model\.dropout=-0\.1"),
        ({"dropout": float("nan")}, r"model\.dropout=nan"),
    ],
)
def test_bad_sizes_are_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GPT2(**SIZES | change)


def test_too_long_a_sequence_is_named() -> None:
    with pytest.raises(ValueError, match=r"25 tokens.*model\.max_position_embeddings=24"):
        GPT2(**SIZES)(torch.zeros(1, 25, dtype=torch.long))


def test_trunk_is_one_graph() -> None:
    model = GPT2(**SIZES)
    tokens_bt = torch.randint(0, SIZES["vocab_size"], (2, 24))
    whole = torch.compile(model.features, fullgraph=True, backend="eager")
    torch.testing.assert_close(whole(tokens_bt), model.features(tokens_bt))
