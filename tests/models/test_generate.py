import math

import pytest
import torch
from torch import Tensor, nn

from llmexp.models.documents import KVCache
from llmexp.models.gpt2 import GPT2
from llmexp.models.llama import Llama, RopeScaling
from llmexp.models.sampling import generate


class Fixed(nn.Module):
    """Always the same logits; notes the lengths it was called with."""

    def __init__(self, logits: list[float]) -> None:
        super().__init__()
        self.logits_v = torch.tensor(logits)
        self.lengths: list[int] = []

    def forward(self, tokens_bt: Tensor) -> Tensor:
        self.lengths.append(tokens_bt.shape[1])
        return self.logits_v.expand(*tokens_bt.shape, -1)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Flipped(GPT2):
    def forward(self, tokens_bt: Tensor) -> Tensor:
        return -super().forward(tokens_bt)


class Halved(Llama):
    def hidden(self, tokens_bt: Tensor) -> Tensor:
        return super().hidden(tokens_bt) / 2


MODELS = {
    "gpt2": lambda: GPT2(30, 8, 2, 4, 16, 32),
    "llama": lambda: Llama(
        30, 8, 2, 4, 2, 16, 24, qk_norm="head", sliding_window=8,
        rope_scaling=RopeScaling(8.0, 1.0, 4.0, original_max_position_embeddings=8),
    ),
    "a narrow window": lambda: Llama(30, 8, 2, 4, 4, 16, 24, sliding_window=4),
    "another forward": lambda: Flipped(30, 8, 2, 4, 16, 32),
    "another features": lambda: Halved(30, 8, 2, 4, 4, 16, 24),
    "documents": lambda: GPT2(30, 8, 2, 4, 16, 32),
}  # fmt: skip


@pytest.mark.parametrize("kind", MODELS)
def test_greedy_follows_the_argmax_of_the_cropped_context(kind: str) -> None:
    """In float64, where rounding decides nothing; those that remember compute each token once."""
    torch.manual_seed(0)
    model = MODELS[kind]().double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.3)
    model.document_end = 3 if kind == "documents" else None
    expected = [3, 1, 4]
    for _ in range(12):
        with torch.no_grad():
            expected.append(int(model(torch.tensor([expected[-8:]]))[0, -1].argmax()))
    lengths: list[int] = []
    model.token_embedding.register_forward_hook(lambda _, tokens, out: lengths.append(out.shape[1]))
    found = list(generate(model, [3, 1, 4], 12, 0.0, None, seeded(), context_length=8))
    assert found == expected[3:]
    remembers = kind in ("gpt2", "llama")
    assert lengths == [3, *([1] * 5 if remembers else range(4, 9)), *[8] * 6]


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_what_is_remembered_gives_the_hidden_states_of_the_whole(kind: str) -> None:
    torch.manual_seed(1)
    model = MODELS[kind]().double().eval()
    tokens_bt = torch.randint(0, 30, (2, 8))
    past = KVCache()
    parts = [model.hidden(part, past) for part in tokens_bt.split([3, 1, 1, 1, 1, 1], 1)]
    # float64 through two layers, of sums in another order
    torch.testing.assert_close(torch.cat(parts, 1), model.hidden(tokens_bt), rtol=0, atol=1e-13)
    with pytest.raises(ValueError, match="9 tokens"):
        model.hidden(tokens_bt[:, :1], past)


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
