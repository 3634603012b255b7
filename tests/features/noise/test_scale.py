"""The gradient noise scale on problems whose noise is known, and each layout's measurement against
plain autograd."""

import functools
import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from llmexp import mesh
from llmexp.data.window import Window
from llmexp.features.noise.scale import DECAY, NORMAL, NoiseScale, _student
from llmexp.features.noise.train import Noise, batch_now
from llmexp.optim import precision
from llmexp.run import Run
from llmexp.run.stages import BatchStage, Begin
from llmexp.train.clipping import Rule
from llmexp.train.step import Setup, train_step
from tests import reference
from tests.conftest import Result, train
from tests.tools import weights
from tests.train.test_end import made

LENGTH, VOCABULARY, WIDTH = 8, 64, 24


class Gaussian(nn.Module):
    """The nll of target t is w . table[t]: whatever w is, the gradient of a target is its row of
    the table, so its mean and covariance over uniform targets are those of the rows, exactly."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(0)
        self.table = torch.randn(VOCABULARY, WIDTH, generator=rng, dtype=torch.float64).to(dtype)
        self.w = nn.Parameter(torch.zeros(WIDTH, dtype=dtype))

    def forward(self, tokens_bt: torch.Tensor, targets_bt: torch.Tensor) -> torch.Tensor:
        return (self.table[targets_bt[targets_bt >= 0]] @ self.w).sum()

    def noise_scale(self) -> float:
        """tr(Sigma) / |G|^2 of the mean gradient of LENGTH independent targets."""
        table = self.table.double().numpy()
        mean = table.mean(0)
        return float(((table - mean) ** 2).sum(1).mean() / LENGTH / (mean @ mean))


def measure(
    steps: int, accumulation: int, masked: float, *, kind: str = "fp64", every: int = 1
) -> tuple[NoiseScale, Gaussian]:
    """Windows of `accumulation` micro-batches of 2 sequences through the real step, at learning
    rate 0."""
    model = Gaussian(precision.parameter_dtype(kind))
    model.w.grad = torch.zeros_like(model.w)
    joined = mesh.join("cpu", "single", 1, 1, 1)
    optimizer = torch.optim.SGD([model.w], lr=1.0)
    optimizer.param_groups[0]["initial_lr"] = 1.0
    s = Setup(
        mesh=joined, model=model, loss=model, module=model, parameters=[model.w],
        optimizers=[optimizer],
        scaler=precision.Scaler(kind, joined.device, 1024.0, 100),
        clipping=Rule(None, joined, model, [optimizer]),
        arithmetic="fp32" if kind == "fp16" else kind, rate_factor=lambda u: 0.0,
        stage_rate=lambda step: 1.0,
    )  # fmt: skip
    noise, rng = Noise(s, every, LENGTH), torch.Generator().manual_seed(1)
    s.features.append(noise)
    for step in range(steps):
        targets = torch.randint(VOCABULARY, (accumulation, 2, LENGTH), generator=rng)
        targets[torch.rand(targets.shape, generator=rng) < masked] = -100
        window = Window(step, [(t, t) for t in targets], int((targets >= 0).sum()), 0)
        seen = train_step(s, window, lambda: 0).read()
        assert ("small_targets" in seen.more) == (accumulation > 1 and (step + 1) % every == 0)
        noise.finished(seen)
    return noise.scale, model


@pytest.mark.parametrize(("masked", "kind"), [(0.6, "fp64"), (0.3, "fp16")])
def test_known_noise_is_found(masked, kind):
    """The mean of n estimates is off by their deviation / sqrt(n), which the interval states: 4 of
    them are missed once in 16,000 times. Smoothing by 0.99 counts the last (1 + 0.99) / (1 - 0.99)
    = 199 measurements."""
    noise, model = measure(400, 4, masked, kind=kind)
    found, truth = noise.figures(), model.noise_scale()
    assert noise.measurements == 400
    low, middle, high = (found[f"noise_scale{end}"] for end in ("_low", "", "_high"))
    more = 4 / NORMAL - 1
    assert low - more * (middle - low) < truth < high + more * (high - middle)
    # Not vacuous: 95 % of 199 measurements of this problem lie within a factor of 2.
    assert truth / 2 < low < high < truth * 2


def test_measured_every_so_often_and_never_with_one_micro_batch():
    assert measure(10, 2, 0.0, every=3)[0].measurements == 3
    assert measure(3, 1, 0.0)[0].measurements == 0


def test_the_interval_holds_the_truth_as_often_as_it_says():
    """400 runs of 60 measurements; 95 % of them, with a deviation of sqrt(0.95 x 0.05 / 400) = 1.1
    %: 4 of those and 1 % for what the delta to a normal distribution costs with products of
    Gaussians."""
    rng, hits, runs, d = np.random.default_rng(0), 0, 400, 30
    mean, deviation = np.full(d, 0.3), rng.uniform(0.5, 1.5, d)
    truth = (deviation**2).sum() / (mean @ mean)
    for _ in range(runs):
        noise = NoiseScale(LENGTH)
        first = mean + deviation * rng.standard_normal((60, d)) / math.sqrt(4)
        rest = mean + deviation * rng.standard_normal((60, d)) / math.sqrt(12)
        for small, other in zip(first, rest, strict=True):
            big = (4 * small + 12 * other) / 16
            noise.add(float(small @ small), 4 * LENGTH, float(big @ big), 16 * LENGTH)
        found = noise.figures()
        hits += found["noise_scale_low"] < truth < found["noise_scale_high"]
    assert 0.95 - 0.044 - 0.01 <= hits / runs <= 0.95 + 0.044 + 0.01


POSITIVE, SIZE = st.floats(1e-3, 1e3), st.integers(1, 50)


@given(st.lists(st.tuples(POSITIVE, POSITIVE, SIZE, SIZE), min_size=1, max_size=30))
def test_smoothing_is_that_of_the_formula(entries):
    """S and G from their definition (A.1), each smoothed with bias correction, in numpy."""
    noise = NoiseScale(LENGTH)
    estimates = []
    for small_square, big_square, size, more in entries:
        noise.add(small_square, size, big_square, size + more)
        # E|g_B|^2 = |G|^2 + tr(Sigma) / B
        a = np.array([[1.0, LENGTH / size], [1.0, LENGTH / (size + more)]])
        estimates.append(np.linalg.solve(a, [small_square, big_square]))
    age = DECAY ** np.arange(len(entries))[::-1]
    g, s = (age[:, None] * estimates).sum(0) / age.sum()
    size = np.abs(np.array(estimates)).max(0)
    found = noise.figures()
    if s < -1e-9 * size[1] or g < -1e-9 * size[0]:
        assert found == {}
    elif s > 1e-6 * size[1] and g > 1e-6 * size[0]:  # else what cancels decides
        assert found["noise_scale"] == pytest.approx(s / g, rel=1e-6)
        if (high := found.get("noise_scale_high")) is not None:
            assert 0 <= found["noise_scale_low"] <= found["noise_scale"] <= high
    again = NoiseScale(LENGTH)  # a resume changes nothing
    again.load_state_dict(json.loads(json.dumps(noise.state_dict())))
    for one in (noise, again):
        one.add(2.0, 8, 1.0, 32)
    assert (again.state_dict(), again.figures()) == (noise.state_dict(), noise.figures())


def test_what_cannot_be_measured_is_left_out():
    noise, inf = NoiseScale(LENGTH), math.inf
    bad = [(inf, 8, 1, 16), (1, 0, 1, 16), (2, 16, 1, 16), (math.nan, 8, 1, 16), (2, 8, inf, 16)]
    for one in bad:
        noise.add(*one)
    assert noise.measurements == 0
    assert noise.figures() == {}
    noise.add(1.0, 8, 2.0, 16)  # the larger batch has the larger norm: tr(Sigma) < 0
    assert noise.figures() == {}
    assert "not known" in noise.verdict(16)


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(3, 3.1824), (5, 2.5706), (10, 2.2281), (30, 2.0423), (1e9, 1.95996)]
)
def test_students_quantile(freedom, quantile):
    """From printed tables; the expansion ends at the third order: 1 % off at 3 degrees of
    freedom."""
    assert _student(freedom) == pytest.approx(quantile, rel=0.3 / freedom**3 + 3e-5)


@pytest.mark.parametrize(
    ("scale", "spread", "words"),
    [
        (100, 0.1, "is far below"), (10, 0.1, "is near the"), (1, 0.1, "is far above"),
        (40, 0.3, "is near or far below"), (2.5, 0.3, "is near or far above"),
        (10, 20, "not known"),
    ],
)  # fmt: skip
def test_the_verdict_says_what_the_interval_allows(scale, spread, words):
    """Against a batch of 10 sequences, of which small batches hold 5."""
    noise, rng = NoiseScale(LENGTH), np.random.default_rng(0)
    for s in scale * (1 + spread * rng.permutation(np.linspace(-1, 1, 41))):
        noise.add(1 + s / 5, 5 * LENGTH, 1 + s / 10, 10 * LENGTH)
    verdict = noise.verdict(10)
    assert words in verdict, verdict
    if words != "not known":
        assert f"{scale:g} sequences (95 % interval" in verdict
    masked = noise.verdict(40)
    assert "(the targets of 10 whole sequences)" in masked


def test_a_fork_with_a_ramp_measures_its_own_batch_and_before_its_first_step_its_parents():
    loop = made(step=4)
    noise = Noise(SimpleNamespace(parameters=[], mesh=None), 1, 12)  # type: ignore[arg-type]
    noise.begin(loop)
    noise.scale.add(2.0, 12, 1.0, 48)
    loop.features.append(noise)
    run = SimpleNamespace(
        ramp="0: 4, 400: 8", first_step=4, sequence_length=12, total_sequences=100,
        begin=Begin(step=4, sequences=16, tokens=192, tokens_seen=180),
        stages=(BatchStage(0, 4, 16, 4, 1), BatchStage(400, 9, 36, 8, 2)),
    )  # fmt: skip
    for name in ("stage_at", "sequences_at", "tokens_at"):
        setattr(run, name, functools.partial(getattr(Run, name), run))
    loop.parts.run = run
    verdict = loop.features.by_name("status")["noise"]["verdict"]
    assert verdict.startswith("whether real_batch_size 4 is large")
    # two steps on: of 2 x 48 tokens 72 were targets
    loop.progress.step, loop.meter.tokens_seen = 6, lambda: 180 + 72  # type: ignore[method-assign]
    assert batch_now(loop) == (4, 3.0)


# One step of 8 sequences with masked targets: the layout, micro-batches a rank, and the rows of
# each of its small batches.
LAYOUTS = {
    "ddp, one micro-batch a rank": ("ddp", 1, [range(4), range(4, 8)]),
    "ddp": ("ddp", 2, [range(2), range(4, 6)]),
    "fsdp": ("fsdp", 2, [[0, 1, 4, 5]]),
    "tp": ("tp", 2, [range(4)]),
}


def square_and_targets(
    result: Result, stream: np.ndarray, rows: range | list[int]
) -> tuple[float, int]:
    """|gradient of the mean nll of these sequences|^2 and their valid targets, by autograd through
    the reference."""
    w = {k: v.double().requires_grad_() for k, v in weights(result, 0).items()}
    at = np.array(rows)[:, None] * 12 + np.arange(13)
    ids = torch.from_numpy(stream[at].astype(np.int64))
    logits = reference.gpt2_logits(w, ids[:, :-1], 2, 2)
    targets = ids[:, 1:].masked_fill(ids[:, 1:] == 10, -100)
    nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    return sum(float(v.grad.square().sum()) for v in w.values()), int((targets >= 0).sum())


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in ("tp", "ddp"))) for name in LAYOUTS],
)
def test_each_layout_measures_what_autograd_finds(tmp_path: Path, tokens: Path, layout: str):
    """fp64, one step: S and |G|^2 are differences of squares of like size, so 1e-12 of them becomes
    1e-9 at most."""
    parallelism, accumulation, small_batches = LAYOUTS[layout]
    result = train(
        tmp_path, "run", "data=tokens", f"data.train_files=[{tokens}]", "data.shuffle=false",
        "data.ignore_id=10", "data.val_ratio=0", "batch.real_batch_size=8", "train.max_steps=1",
        "precision=fp64", "metrics.noise_scale_every=1", "checkpoint.save_initial=true",
        f"parallelism={parallelism}", "parallelism.nproc_per_node=2",
        f"batch.gradient_accumulation_steps={accumulation}",
    )  # fmt: skip
    stream = np.load(tokens)
    found = [square_and_targets(result, stream, rows) for rows in small_batches]
    total = sum(n for _, n in found)
    small, small_size = sum(square * n for square, n in found) / total, total / len(found) / 12
    big, count = square_and_targets(result, stream, range(8))
    g, s = np.linalg.solve([[1, 1 / small_size], [1, 12 / count]], [small, big])
    state = torch.load(result.checkpoint(1) / "state.pt", weights_only=True)["noise"]["sums"]
    assert state[:3] == [1, 1.0, 1.0]
    np.testing.assert_allclose(state[3:5], [s, g], rtol=1e-9)
    assert state[-1] == pytest.approx(count / 12, rel=1e-14)
    assert count < 8 * 12  # some are masked
    known = pytest.approx(s / g, rel=1e-8) if s > 0 and g > 0 else None
    assert result.rows()[-1].get("noise_scale") == known
