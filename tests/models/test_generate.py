import math

import pytest
import torch
from torch import Tensor, nn

from llmexp.models.documents import KVCache
from llmexp.models.gpt2 import GPT2
from llmexp.models.llama import Llama, RopeScaling
from llmexp.models.sampling import generate


class Fixed(nn.Module):
    """Always the same logits."""

    def __init__(self, logits: list[float]) -> None:
        super().__init__()
        self.logits_v = torch.tensor(logits)

    def forward(self, tokens_bt: Tensor) -> Tensor:
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
    if remembers:
        tokens_bt, past = torch.randint(0, 30, (2, 8)), KVCache()
        parts = [model.hidden(part, past) for part in tokens_bt.split([3, 1, 1, 1, 1, 1], 1)]
        # float64 through two layers, of sums in another order
        whole = model.hidden(tokens_bt)
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-12, atol=1e-12)
        with pytest.raises(ValueError, match="9 tokens"):
            model.hidden(tokens_bt[:, :1], past)


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, None), (0.5, None), (2.0, 2), (1.0, 100)])
def test_frequencies_are_the_softmax_of_the_largest(temperature: float, top_k: int | None) -> None:
    logits = [0.3, 1.2, -0.5, 0.9]
    n = 4000
    kept = sorted(logits, reverse=True)[: top_k or 4]
    weights = [math.exp(z / temperature) if z in kept else 0.0 for z in logits]
    drawn = list(generate(Fixed(logits), [0], n, temperature, top_k, seeded(1), 4))
    for token, weight in enumerate(weights):
        p = weight / sum(weights)
        # Five deviations of a binomial share; exactly none where p is 0.
        assert abs(drawn.count(token) / n - p) <= 5 * math.sqrt(p * (1 - p) / n)
    # equal logits do not widen top_k
    assert len(set(generate(Fixed([1.0] * 10), [0], 300, temperature, 3, seeded(), 4))) == 3


@pytest.mark.parametrize("temperature", [0.0, 0.5, 2.0])
def test_ids_that_are_not_allowed_never_come_out(temperature: float) -> None:
    model = Fixed([0.0, 1.0, 2.0, 50.0, 60.0])
    allowed_v = torch.tensor([True, False, True])
    assert set(generate(model, [0], 200, temperature, None, seeded(), 4, allowed_v)) <= {0, 2}
    assert set(generate(model, [0], 20, temperature, 4, seeded(), 4, torch.arange(9) == 1)) == {1}


def test_the_generator_is_the_only_randomness() -> None:
    def drawn(seed: int) -> list[int]:
        return list(generate(Fixed([0.0] * 50), [0], 30, 1.0, None, seeded(seed), 4))

    before = torch.get_rng_state()
    first = drawn(2)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert drawn(2) == first != drawn(3)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"prompt_tokens": []}, "empty prompt"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1"),
        ({"temperature": -1.0}, r"temperature=-1\.0"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"top_k": 0}, "top_k=0"),
        ({"context_length": 0}, "context_length=0"),
    ],
)
def test_bad_settings_are_named_at_the_call(changed: dict, message: str) -> None:
    given = {"prompt_tokens": [0], "max_new_tokens": 1, "temperature": 1.0, "top_k": None}
    with pytest.raises(ValueError, match=message):
        generate(Fixed([0.0]), generator=seeded(), **given | {"context_length": 4} | changed)
