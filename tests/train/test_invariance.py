"""However a window is cut, a run computes what one big float64 batch computes: loss, norm, lr,
parameters."""

import re
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from llmexp.checkpoint import loading
from llmexp.folders.rows import read_rows
from tests import reference
from tests.conftest import Result, train
from tests.tools import agree, weights

LIMIT = 1.5  # of the gradient norm; some steps are above it, some below

# 50 sequences of 12 tokens, 65 of them in 5 windows of 16: the epoch ends inside a window, the last
# has one row.
SETTINGS = [
    "data=tokens", "data.shuffle=false", "data.ignore_id=10", "data.val_ratio=0",
    "train.max_epochs=1.3", "train.tail=keep", "train.log_every=1", "train.eval_every=null",
    "train.data_digest=true", "batch.real_batch_size=16", "optimizer.lr=0.02",
    "schedule.warmup_steps=2", f"clip.max_norm={LIMIT}", "checkpoint.save_initial=true",
    "checkpoint.keep=null", "metrics.layers_every=1",
    "optimizer.groups=[{match: '*.q_proj.*', lr: 3, weight_decay: 0}, {match: '*.attention.*'}, "
    "{match: 'blocks.*', lr: 0.5, weight_decay: 4}]",
]  # fmt: skip
CUTS = {"16x1": (16, 1), "4x4": (4, 4), "1x16": (1, 16)}
# Each with its cut of the 16 sequences: micro_batch_size, gradient_accumulation_steps, and where
# the ranks stand.
RANKS = {
    "ddp 2": (4, 2, "ddp", "nproc_per_node=2"),
    "fsdp 2": (2, 4, "fsdp", "nproc_per_node=2"),
    "fsdp 2, communicating once, full recomputation": (
        4, 2, "fsdp", "nproc_per_node=2", "fsdp_communication=once", "activation_checkpointing=full"
    ),
    "hsdp 2x2": (2, 2, "hsdp", "nproc_per_node=4", "replicate_size=2"),
    "tp 2": (4, 4, "tp", "nproc_per_node=2"),
    "fsdp_tp 2x2, selective recomputation": (
        8, 1, "fsdp_tp", "nproc_per_node=4", "tensor_parallel_size=2",
        "activation_checkpointing=selective"
    ),
    "fsdp_tp 2x2, tokens shared too": (
        4, 2, "fsdp_tp", "nproc_per_node=4", "tensor_parallel_size=2", "sequence_parallel=true"
    ),
}  # fmt: skip


def layout(name: str) -> list[str]:
    micro, accum, *ranks = (*CUTS.get(name, ()), *RANKS.get(name, ()))
    cut = [f"batch.micro_batch_size={micro}", f"batch.gradient_accumulation_steps={accum}"]
    kind = [f"parallelism={kind}" for kind in ranks[:1]]
    return [*cut, *kind, *(f"parallelism.{more}" for more in ranks[1:])]


def factors(name: str) -> tuple[float, float]:
    """Those of the groups in SETTINGS."""
    if "q_proj" in name:
        return 3.0, 0.0
    return (0.5, 4.0) if "blocks" in name and ".attention." not in name else (1.0, 1.0)


def expected(result: Result, tokens: Path, **more) -> reference.Reference:
    settings = {
        "real_batch": 16, "length": 12, "total_sequences": 65, "lr": 0.02, "warmup": 2,
        "end_ratio": 0.1, "max_norm": LIMIT, "ignore_id": 10, "n_layers": 2, "n_heads": 2,
        "factors": factors, **more,
    }  # fmt: skip
    return reference.train(weights(result, 0), np.load(tokens), **settings)


def compare(
    result: Result, want: reference.Reference, loss: float, norm: float, moved_by: float
) -> None:
    rows = result.rows()
    assert [r["step"] for r in rows] == list(range(1, len(want.losses) + 1))
    assert [r["target_tokens"] for r in rows] == want.counts
    assert rows[-1]["tokens_seen"] == sum(want.counts)
    np.testing.assert_allclose([r["lr"] for r in rows], want.rates, rtol=1e-14)
    agree(result, want, loss, norm, moved_by)
    clipped = [n * min(1.0, LIMIT / (n + 1e-6)) for n in want.norms]
    np.testing.assert_allclose([r["grad_norm_post_clip"] for r in rows], clipped, rtol=norm)
    assert [r["clip_fraction"] for r in rows] == [float(n > LIMIT) for n in want.norms]
    assert 0 < sum(n > LIMIT for n in want.norms) < len(want.norms)  # the case must show both


# Parts of the others; tests/mesh/test_parallel.py holds each layout against one rank.
PARTS = ("fsdp 2", "hsdp 2x2", "tp 2", "fsdp_tp 2x2, selective recomputation")
FIRST = [name for name in (*CUTS, *RANKS) if name not in PARTS]
ALL = [*FIRST, *(pytest.param(name, marks=pytest.mark.slow) for name in PARTS)]


@pytest.fixture(scope="module")
def settings(tokens) -> list[str]:
    return [*SETTINGS, f"data.train_files=[{tokens}]"]


@pytest.fixture(scope="module")
def fp64(runs, settings) -> Callable[[str], Result]:
    return lambda name: runs(*settings, "precision=fp64", *layout(name))


@pytest.mark.parametrize("cut", ALL)
def test_float64_equals_one_big_batch(fp64, tokens, cut):
    """Norms of each module, and the forward pass of the window's first sequence, too."""
    result = fp64(cut)
    want = expected(result, tokens)
    compare(result, want, loss=1e-12, norm=1e-12, moved_by=1e-11)
    found = read_rows(result.folder / "layers.jsonl")
    assert [row["step"] for row in found] == list(range(1, len(want.layers) + 1))
    for row, layers in zip(found, want.layers, strict=True):
        assert row.keys() == {"step", "tokens_seen", *layers}
        for key, values in layers.items():
            if isinstance(values, list):
                values = {f"blocks.{i}": value for i, value in enumerate(values)}
            # an update is a difference of weights: their rounding, 2e-16 of up to 1, beside 1e-3
            assert row[key] == pytest.approx(values, rel=1e-9, abs=0), key


def test_every_cut_begins_with_the_same_state_and_sees_the_same_rows(fp64):
    """All layouts share the state before the first update bit for bit."""
    digests = [[row["data_digest"] for row in fp64(name).rows()] for name in FIRST]
    assert all(d == digests[0] for d in digests)
    assert len(set(digests[0])) == len(digests[0])
    first, *others = (loading.read_checkpoint(fp64(name).checkpoint(0)) for name in FIRST)
    for name in first.model:
        value = loading.read_tensor(first, name)
        assert all(torch.equal(loading.read_tensor(other, name), value) for other in others)


def test_of_two_ranks_one_prints_and_each_says_when_it_began(fp64):
    run = fp64("ddp 2")
    # rows that come quickly are shown by the last of them
    assert sum("step" in line and "5/5" in line for line in run.out.splitlines()) == 1, run.out
    logs = "".join(path.read_text() for path in (run.folder / "logs").rglob("*") if path.is_file())
    for text, rank in ((run.out, 0), (logs, 1)):
        (began,) = re.findall(rf"^start +(\S+ \S+), rank {rank} of 2 on cpu$", text, re.M)
        ended = (run.folder / "metrics.jsonl").stat().st_mtime
        assert ended - 1200 < time.mktime(time.strptime(began, "%Y-%m-%d %H:%M:%S")) <= ended
    assert "rank 1 of 2" not in run.out


def test_unmasked_and_unclipped(runs, settings, tokens):
    five = ["batch.micro_batch_size=5", "batch.real_batch_size=5", "train.max_epochs=0.5"]
    plain = ["data.ignore_id=null", "clip.max_norm=null", "precision=fp64"]
    result = runs(*settings, *five, *plain)
    want = expected(result, tokens, real_batch=5, total_sequences=25, ignore_id=None, max_norm=None)
    rows = result.rows()
    np.testing.assert_allclose([r["train/loss"] for r in rows], want.losses, rtol=1e-12)
    np.testing.assert_allclose([r["grad_norm"] for r in rows], want.norms, rtol=1e-12)
    assert all(r["grad_norm"] == r["grad_norm_post_clip"] and not r["clip_fraction"] for r in rows)


# What rounding may do. With unit roundoff u (half an ulp) a value that went through D independent
# roundings is off by about u sqrt(D). A gradient of this model has seen about 30 matmuls, norms and
# sums: g = 6 u. In fp32 the sums themselves round too, over up to 192 rows: g = 6 u sqrt(192). Then
#   gradient norm  off by at most the gradient's relative error, g;
#   loss           a mean over at least 100 targets with independent errors, g / 10;
#   displacement   of the parameters: eps = 0.01 keeps Adam close to linear in the gradient, and
#                  each of the 5 steps adds its own g to what it inherits: 5 g.
ROUNDOFF = {"fp32": 2**-24 * 192**0.5, "bf16": 2**-9, "fp16": 2**-12}


@pytest.mark.parametrize(
    "precision",
    ["fp16", *(pytest.param(p, marks=pytest.mark.slow) for p in ROUNDOFF if p != "fp16")],
)
def test_lower_precisions_stay_within_their_rounding(runs, settings, tokens, precision):
    g = 6 * ROUNDOFF[precision]
    for name in ("16x1", "4x4"):
        chosen = [f"precision={precision}", "optimizer.eps=1e-2"]
        result = runs(*settings, *layout(name), *chosen)
        compare(result, expected(result, tokens, eps=1e-2), loss=g / 10, norm=g, moved_by=5 * g)


def test_a_window_without_valid_targets_is_passed(tmp_path):
    """No update, no nan, counted; the schedule waits, the data position does not."""
    path = tmp_path / "t.npy"  # rows 6..9 are masked
    stream = [1, 2, 3] * 24 + [1] + [10] * 48 + [1, 2, 3] * 24 + [4]
    np.save(path, np.array(stream, dtype=np.uint16))
    two = ["batch.micro_batch_size=1", "batch.real_batch_size=2", "train.max_epochs=1"]
    result = train(tmp_path, "run", *SETTINGS, f"data.train_files=[{path}]", *two, "precision=fp64")
    want = expected(result, path, real_batch=2, total_sequences=(len(stream) - 1) // 12)
    rows = result.rows()
    empty = [i for i, n in enumerate(want.counts) if n == 0]
    assert empty
    assert [i for i, r in enumerate(rows) if r["skipped"]] == empty
    assert rows[-1]["skipped_steps"] == len(empty)
    assert [r["lr"] for r in rows] == pytest.approx(want.rates, rel=1e-14)
    for i, row in enumerate(rows):
        assert ("train/loss" in row, "grad_norm" in row) == (i not in empty, i not in empty)
        if i not in empty:
            assert row["train/loss"] == pytest.approx(want.losses[i], rel=1e-12)
            assert row["grad_norm"] == pytest.approx(want.norms[i], rel=1e-12)
    for name, tensor in weights(result, len(rows)).items():
        assert torch.allclose(tensor, want.weights[name], rtol=0, atol=1e-11)
