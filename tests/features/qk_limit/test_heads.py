"""QK-Clip against float64 loops: the largest logit of each head, and what becomes of weights."""

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from llmexp import mesh
from llmexp.config.values import ConfigError
from llmexp.data.window import Window
from llmexp.features.qk_limit import heads as logits
from llmexp.features.qk_limit.assembly import check_heads
from llmexp.features.qk_limit.train import QkLimit
from llmexp.models.gpt2 import GPT2
from llmexp.models.llama import Llama
from llmexp.models.operands import IGNORE_INDEX

WINDOW = Window(0, [], 0, 0)
ALONE = mesh.join("cpu", "single", 1, 1, 1)
SIZES = {"vocab_size": 24, "max_position_embeddings": 12, "n_layers": 2, "n_heads": 4}
SIZES |= {"d_model": 32, "d_ff": 16}
END = 3  # the last id of a document


def scaled(kind: type[nn.Module], **more) -> nn.Module:
    """A model with logits of order 1, and biases."""
    model = kind(**SIZES, **more)
    torch.manual_seed(1)
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)
    return model.double().train()


def seen_heads(q_bhtk: Tensor, k_bgtk: Tensor, sees) -> list[float]:
    """The largest logit of each head over what `sees(row, t, s)` lets it see."""
    b, h, t, width = q_bhtk.shape
    shared = h // k_bgtk.shape[1]
    return [
        max(
            float(q_bhtk[row, head, at] @ k_bgtk[row, head // shared, s]) / math.sqrt(width)
            for row, at, s in itertools.product(range(b), range(t), range(t))
            if sees(row, at, s)
        )
        for head in range(h)
    ]


CASES = {
    "plain": {},
    "documents": {"document_end": END},
    "masks": {"document_end": END, "document_spans": False},
    "window": {"sliding_window": 4},
    "chunks": {},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("groups", [4, 2, 1])
def test_the_largest_logit_is_over_what_is_seen_in_rows_with_targets(case, groups, monkeypatch):
    model = scaled(Llama, n_kv_heads=groups)
    for name, value in CASES[case].items():
        setattr(model, name, value)
    if case == "chunks":
        monkeypatch.setattr(logits, "_MOST", 1)
    attentions = logits.attentions_of(model)
    limit = QkLimit(ALONE, model, 1.0, 3)
    found: dict[int, list[Tensor]] = {}
    for i, attention in enumerate(attentions):

        def kept(*inputs, i=i, whole=attention.heads):
            found.setdefault(i, []).append(out := whole(*inputs))
            return out

        monkeypatch.setattr(attention, "heads", kept)
    tokens = torch.randint(24, (6, 12), generator=torch.Generator().manual_seed(5))
    tokens[0, 4] = tokens[3, 6] = END
    targets = tokens.roll(-1, 1)
    targets[1] = IGNORE_INDEX  # a row that is missing
    targets[2, :-1] = IGNORE_INDEX
    limit.backward_start(WINDOW)
    for rows in (slice(0, 3), slice(3, 6)):
        limit.forward_start(targets[rows])
        model(tokens[rows])
    with torch.no_grad():
        model.eval()
        model(tokens[1:4])  # an evaluation does not count
    documents = (tokens == END).cumsum(1) - (tokens == END).long()

    def sees(row: int, t: int, s: int) -> bool:
        same = "document_end" not in CASES[case] or documents[row, t] == documents[row, s]
        near = t - s < CASES[case].get("sliding_window", 99)
        return s <= t and bool(same) and near and row != 1

    for i, attention in enumerate(attentions):
        q, k = (torch.cat([heads[j] for heads in found[i][:2]]).detach() for j in (0, 1))
        wanted = seen_heads(q, k, sees)
        torch.testing.assert_close(
            attention.largest_h, torch.tensor(wanted, dtype=torch.float64), rtol=1e-13, atol=0
        )


@pytest.mark.parametrize(
    ("kind", "knobs"),
    [
        (GPT2, {}),
        (Llama, {"n_kv_heads": 4, "biases": "qkv"}),
        (Llama, {"n_kv_heads": 2, "biases": "qkv"}),
    ],
)
def test_heads_above_the_limit_come_down_to_it_and_others_stay(kind, knobs):
    """The same window has logits of at most the limit afterwards; where no query head shares its
    keys, queries and keys of a head are scaled alike."""
    model = scaled(kind, **knobs)
    attentions = logits.attentions_of(model)
    tokens = torch.randint(24, (3, 12), generator=torch.Generator().manual_seed(5))
    watch = QkLimit(ALONE, model, 1e9, 3)

    def largest() -> Tensor:
        watch.backward_start(WINDOW)
        model(tokens)
        return torch.stack([a.largest_h.clone() for a in attentions])

    before = largest()
    tau = float(before.median())
    old = {name: p.detach().clone() for name, p in model.named_parameters()}
    watch = QkLimit(ALONE, model, tau, 3)
    largest()
    watch.updated(WINDOW, False)
    assert float(watch.found["attention_logit_max"]) == float(before.max())
    assert float(watch.found["heads/5"]) == float((before > tau).sum()) > 0
    now = {name: p.detach().clone() for name, p in model.named_parameters()}
    shared = attentions[0].q_proj.out_features != attentions[0].k_proj.out_features
    for i in range(len(attentions)):
        for head in range(4):
            factor = min(1.0, tau / float(before[i, head]))
            rows = slice(head * 8, head * 8 + 8)
            for part in ("q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias"):
                name = f"blocks.{i}.attention.{part}"
                if not (shared and part[0] == "k"):
                    wanted = old[name][rows] * (factor if shared else math.sqrt(factor))
                    torch.testing.assert_close(now[name][rows], wanted, rtol=1e-14, atol=0)
    scaled_ones = ("q_proj",) if shared else ("q_proj", "k_proj")
    others = [name for name in old if not any(part in name for part in scaled_ones)]
    assert all(torch.equal(now[name], old[name]) for name in others)
    # the first block has the same input as before, so its logits are known
    after = largest()[0]
    torch.testing.assert_close(after, before[0].clamp(max=tau), rtol=1e-12, atol=0)
    watch.updated(WINDOW, True)  # the update of this window was skipped
    assert all(torch.equal(now[name], p) for name, p in model.named_parameters())


def test_a_model_without_such_heads_is_refused():
    check_heads(scaled(GPT2), 100.0)
    strange = scaled(GPT2)
    strange.blocks[0].attention = nn.Linear(32, 32)
    for model, why in (
        (scaled(Llama, n_kv_heads=2, qk_norm="head"), "qk_norm normalizes queries and keys"),
        (nn.Linear(2, 2), "no heads of attention that llmexp knows"),
        (strange, "no heads of attention that llmexp knows"),
    ):
        with pytest.raises(ConfigError, match=why):
            check_heads(model, 100.0)
