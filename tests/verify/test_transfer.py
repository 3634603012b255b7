"""`llmexp verify transfer`: what it measures, what it lets pass, and that a rate carries over."""

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from llmexp.cli.running import function_of, read_line
from llmexp.compose import app
from llmexp.config.convert import with_knobs
from llmexp.config.values import ConfigError
from llmexp.optim.updating import set_rate
from llmexp.train.assembly.assemble import assemble
from llmexp.verify import transfer
from llmexp.verify.reference import windows_in_order
from llmexp.verify.runs import trial
from tests.conftest import TINY, llmexp

BASE = [*TINY, "data=synthetic", "data.n_tokens=4000", "train.device=cpu"]
MUP = ["model.parametrization=mup", "model.base_width=16"]


def config_of(*overrides: str) -> Any:
    args = read_line("verify", function_of("verify"), ["transfer", *overrides])
    with app.composed(args, "verify") as (cfg, _several):
        return app.typed_config(cfg)


def test_the_largest_slope_of_either_sign_counts():
    """Planted: sizes of a with slope 0.05, changes -0.45; b does not move at one width."""
    widths = np.array(transfer.WIDTHS)
    found = {"a": [widths**0.05, widths**-0.45], "logits": [widths**-0.7, widths**0.3]}
    of = transfer.slopes_over_width(found, transfer.WIDTHS)
    for which, slope, passed in ((0, 0.05, True), (1, 0.45, False)):
        size, limit, layer = transfer.largest(of, which)
        assert (size, layer) == (pytest.approx(slope, rel=1e-9), "a")
        assert transfer.at_most("", size, limit).passed is passed
    found["b"] = [widths**0.0, np.array([1.0, 1.0, 0.0, 1.0])]
    size, limit, layer = transfer.largest(transfer.slopes_over_width(found, transfer.WIDTHS), 1)
    assert layer == "b"
    assert transfer.at_most("", size, limit).passed is False


def test_activations_are_those_of_the_model_and_change_by_its_steps():
    """Against AdamW by hand: at the first step all entries move by the rate, but for the decay."""
    config = transfer.prepared(config_of(*BASE, *MUP, "optimizer.lr=1e-3"))
    assert config.batch.sequence_length == 12
    knobs = {"d_model": 32, "d_ff": 48}
    parts = assemble(with_knobs(trial(config, 1), model=knobs))
    model = parts.new_model()
    found = transfer.moved(parts.config, 1)
    tokens = windows_in_order(parts, [transfer.SEQUENCES])[0][:, :-1]
    seen = model.token_embedding.weight.detach()[tokens]
    size, change = found["token_embedding"]
    assert size == pytest.approx(float(seen.abs().mean()), rel=0.02)
    assert change == pytest.approx(1e-3, rel=0.02)  # 1e-8 beside gradients, and the decay of 1e-4
    assert list(found) == [
        "token_embedding", "blocks.0.attention", "blocks.0.mlp", "blocks.0",
        "blocks.1.attention", "blocks.1.mlp", "blocks.1", "logits",
    ]  # fmt: skip


def test_mup_is_held_against_the_standard_one_and_all_is_recorded(tmp_path, monkeypatch, capsys):
    """On widths of a moment: what is printed fits 100 columns."""
    monkeypatch.setattr(transfer, "WIDTHS", (16, 32, 64))
    monkeypatch.setattr(transfer, "_SEEDS", 2)
    monkeypatch.setenv("COLUMNS", "100")
    checks = transfer.verify(config_of(*BASE, *MUP), tmp_path, 3, False)
    assert len(checks) == 3
    out = capsys.readouterr().out.splitlines()
    assert max(map(len, out)) <= 100
    assert out[0].startswith("mup, widths 16, 32, 64: 2 layers, 3 steps of 8 sequences of 12 ")
    assert sum(line.startswith(("blocks", "token", "logits")) for line in out) == 8
    recorded = json.loads((tmp_path / "transfer.json").read_text())
    assert recorded.keys() == {"widths", "mup", "standard"}
    for kind in ("mup", "standard"):
        assert np.array([*recorded[kind].values()]).shape == (8, 2, 3)
    first = [recorded[kind]["blocks.1"][1][0] for kind in ("mup", "standard")]
    assert first[0] == pytest.approx(first[1], rel=0.05)  # at the base width; attention differs
    last = [recorded[kind]["blocks.1"][1][-1] for kind in ("mup", "standard")]
    assert last[1] > 2 * last[0]
    slopes = transfer.slopes_over_width(recorded["standard"], (16, 32, 64))
    assert checks[2].found == pytest.approx(transfer.largest(slopes, 1)[0])


def test_a_model_without_a_width_of_ours_is_refused(tmp_path, monkeypatch):
    config = config_of(*BASE)
    monkeypatch.setattr(transfer.LanguageModel, "is_ours", lambda self: False)
    with pytest.raises(ConfigError, match="verify transfer widens GPT-2, Llama and their"):
        transfer.verify(config, tmp_path, 3, False)


@pytest.mark.slow
def test_mup_passes_and_the_standard_parametrization_fails(tmp_path):
    """As shipped: the default model and data, and its exit codes."""
    run = ["verify", "transfer", "tracker=none", "precision=fp32"]
    mup = ["model.parametrization=mup", "model.base_width=256", "hydra.run.dir=mup"]
    found = llmexp(*run, *mup, cwd=tmp_path, timeout=3000)
    assert found.code == 0, found.out + found.err
    plain = llmexp(*run, "--shrink", "hydra.run.dir=plain", cwd=tmp_path, timeout=3000)
    assert plain.code == 1, plain.out + plain.err
    verdict = json.loads((tmp_path / "plain/verify.json").read_text())
    assert [check["passed"] for check in verdict["checks"]] == [False, False, None]
    assert verdict["checks"][2]["what"].startswith("no control")


RATES = [2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3]
STEPS = 100


def best_rate(config: Any, kind: str, width: int) -> float:
    """The minimum of a parabola through the lowest loss and its neighbours, over the logarithm of
    the rate."""
    losses = []
    for lr in RATES:
        sizes = {"d_model": width, "d_ff": 4 * width, "n_heads": width // 64}
        sizes |= {"parametrization": kind, "base_width": 256 if kind == "mup" else None}
        run = with_knobs(trial(config, STEPS), model=sizes, optimizer={"lr": lr})
        parts = assemble(run)
        model: Any = parts.new_model()
        optimizers = parts.build_optimizers(model)
        *windows, last = windows_in_order(parts, [8] * STEPS + [64])

        def loss(rows: torch.Tensor, model: Any = model) -> torch.Tensor:
            return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

        for number, rows in enumerate(windows):
            model.zero_grad()
            loss(rows).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            set_rate(optimizers, parts.rate_factor(number))
            for optimizer in optimizers:
                optimizer.step()
        with torch.no_grad():
            losses.append(float(loss(last)))
    print(kind, width, [round(x, 3) for x in losses])
    at = int(np.argmin(losses))
    assert 0 < at < len(RATES) - 1, losses
    three = slice(at - 1, at + 2)
    curve = np.polyfit(np.log2(RATES[three]), losses[three], 2)
    return float(2 ** (-curve[1] / (2 * curve[0])))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_best_rate_of_a_narrow_model_is_that_of_wide_ones_with_mup_only(seed):
    """Two layers, 100 steps of 8 x 32 bytes of text: widths 64, 128 and 256, heads 64 wide. There
    mup of the base width 256 is the standard parametrization at 256."""
    config = config_of(
        "tracker=none", "precision=fp32", "model.n_layers=2", "batch.sequence_length=32",
        "schedule=linear", "schedule.warmup_ratio=0.1", "train.compile=false",
        f"train.seed={seed}",
    )  # fmt: skip
    widest = best_rate(config, "standard", 256)
    for kind, moves in (("mup", False), ("standard", True)):
        found = [best_rate(config, kind, 64), best_rate(config, kind, 128), widest]
        print(kind, found)
        assert (max(found) / min(found) > math.sqrt(2)) == moves, (kind, found)
