import math

import pytest
import torch
from torch import Tensor, nn

from llmexp.models.gpt2 import GPT2
from llmexp.models.sampling import generate


class Fixed(nn.Module):
    """Always the same logits; notes the lengths and modes it was called with."""

    def __init__(self, logits: list[float]) -> None:
        super().__init__()
        self.logits_v = torch.tensor(logits)
        self.lengths: list[int] = []
        self.modes: list[bool] = []

    def forward(self, tokens_bt: Tensor) -> Tensor:
        self.lengths.append(tokens_bt.shape[1])
        self.modes.append(self.training)
        return self.logits_v.expand(*tokens_bt.shape, -1)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_greedy_follows_the_argmax_of_the_cropped_context() -> None:
    torch.manual_seed(0)
    model = GPT2(30, 8, 2, 2, 16, 32).eval()
    expected = [3, 1, 4]
    for _ in range(12):
        with torch.no_grad():
            expected.append(int(model(torch.tensor([expected[-8:]]))[0, -1].argmax()))
    assert (
        list(generate(model, [3, 1, 4], 12, 0.0, None, seeded(), context_length=8)) == expected[3:]
    )


def test_context_never_exceeds_its_length() -> None:
    model = Fixed([0.0, 1.0])
    assert len(list(generate(model, [0] * 5, 4, 1.0, None, seeded(), context_length=6))) == 4
    assert model.lengths == [5, 6, 6, 6]


@pytest.mark.parametrize("temperature", [0.0, 0.5, 2.0])
def test_ids_that_are_not_allowed_never_come_out(temperature: float) -> None:
    model = Fixed([0.0, 1.0, 2.0, 50.0, 60.0])
    allowed_v = torch.tensor([True, False, True])
    assert set(generate(model, [0], 200, temperature, None, seeded(), 4, allowed_v)) <= {0, 2}
    assert set(generate(model, [0], 20, temperature, 4, seeded(), 4, torch.arange(9) == 1)) == {1}


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, None), (0.5, None), (2.0, 2), (1.0, 100)])
def test_frequencies_are_the_softmax(temperature: float, top_k: int | None) -> None:
    logits = [0.3, 1.2, -0.5, 0.9]
    n = 4000
    kept = sorted(logits, reverse=True)[: top_k or 4]
    weights = [math.exp(z / temperature) if z in kept else 0.0 for z in logits]
    drawn = list(generate(Fixed(logits), [0], n, temperature, top_k, seeded(1), 4))
    for token, weight in enumerate(weights):
        p = weight / sum(weights)
        # Five deviations of a binomial share; exactly none where p is 0.
        assert abs(drawn.count(token) / n - p) <= 5 * math.sqrt(p * (1 - p) / n)


def test_equal_logits_do_not_widen_top_k() -> None:
    assert len(set(generate(Fixed([1.0] * 10), [0], 300, 1.0, 3, seeded(), 4))) == 3


def test_the_generator_is_the_only_randomness() -> None:
    model = Fixed([0.0] * 50)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = list(generate(model, [0], 30, 1.0, None, seeded(2), 4))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert list(generate(model, [0], 30, 1.0, None, seeded(2), 4)) == first
    assert list(generate(model, [0], 30, 1.0, None, seeded(3), 4)) != first


def test_modes_are_as_before_between_and_after_tokens() -> None:
    inner = Fixed([0.0, 1.0])
    model = nn.Sequential(inner, nn.Identity())
    model.train()
    model[1].eval()
    for _ in generate(model, [0], 3, 1.0, None, seeded(), 4):
        assert (model.training, inner.training, model[1].training) == (True, True, False)
    assert inner.modes == [False] * 3
    assert (model.training, inner.training, model[1].training) == (True, True, False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], 1, 1.0, None, 4), "empty prompt"),
        (([0], -1, 1.0, None, 4), "max_new_tokens=-1"),
        (([0], 1, -1.0, None, 4), r"temperature=-1\.0"),
        (([0], 1, math.nan, None, 4), "temperature=nan"),
        (([0], 1, 1.0, 0, 4), "top_k=0"),
        (([0], 1, 1.0, None, 0), "context_length=0"),
    ],
)
def test_bad_settings_are_named_at_the_call(arguments: tuple, message: str) -> None:
    prompt, count, temperature, top_k, context_length = arguments
    with pytest.raises(ValueError, match=message):
        generate(Fixed([0.0]), prompt, count, temperature, top_k, seeded(), context_length)
