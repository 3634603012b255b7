"""However a window is cut, a run computes what one big float64 batch computes: loss, norm, lr, parameters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Result, train
from safetensors.torch import load_file

from tests import reference

# 50 sequences of 12 tokens, 65 of them in 5 windows of 16: the epoch ends inside a window, the last has one row.
SETTINGS = [
    "data=tokens", "data.shuffle=false", "data.ignore_id=10", "train.max_epochs=1.3", "train.log_every=1",
    "train.eval_every=null", "batch.real_batch_size=16", "optimizer.lr=0.02", "schedule.warmup_steps=2",
    "clip.max_norm=0.9", "checkpoint.save_initial=true", "checkpoint.keep=null", "train.data_digest=true",
    "train.tail=keep", "data.val_ratio=0", "model.vocab_size=64", "tokenizer=bytes",
]  # fmt: skip
CUTS = {"16x1": (16, 1), "4x4": (4, 4), "1x16": (1, 16)}


def cut_run(folder: Path, tokens: Path, name: str, micro: int, accum: int, *more: str) -> Result:
    cut = [f"batch.micro_batch_size={micro}", f"batch.gradient_accumulation_steps={accum}"]
    return train(folder, name, *SETTINGS, f"data.train_files=[{tokens}]", *cut, *more)


def expected(result: Result, tokens: Path, **more) -> reference.Reference:
    settings = {
        "real_batch": 16, "length": 12, "total_sequences": 65, "lr": 0.02, "warmup": 2, "end_ratio": 0.1,
        "max_norm": 0.9, "ignore_id": 10, "n_layers": 2, "n_heads": 2, **more,
    }  # fmt: skip
    return reference.train(load_file(result.checkpoint(0) / "model.safetensors"), np.load(tokens), **settings)


def compare(result: Result, want: reference.Reference, loss: float, norm: float, weights: float) -> None:
    rows = result.rows()
    assert [r["step"] for r in rows] == list(range(1, len(want.losses) + 1))
    assert [r["target_tokens"] for r in rows] == want.counts
    assert rows[-1]["tokens_seen"] == sum(want.counts)
    np.testing.assert_allclose([r["lr"] for r in rows], want.rates, rtol=1e-14)
    np.testing.assert_allclose([r["train/loss"] for r in rows], want.losses, rtol=loss)
    np.testing.assert_allclose([r["grad_norm"] for r in rows], want.norms, rtol=norm)
    clipped = [min(n, 0.9 * n / (n + 1e-6), 0.9) for n in want.norms]
    np.testing.assert_allclose([r["grad_norm_post_clip"] for r in rows], clipped, rtol=max(norm, 2e-6))
    assert [r["clipped_share"] for r in rows] == [float(n > 0.9) for n in want.norms]
    assert 0 < sum(n > 0.9 for n in want.norms) < len(want.norms)  # the case must show both
    final = load_file(result.checkpoint(len(rows)) / "model.safetensors")
    assert final.keys() == want.weights.keys()
    for name, tensor in final.items():
        error = (tensor.double() - want.weights[name]).abs().max() / want.weights[name].abs().max()
        assert error < weights, f"{name}: {error:.2e}"


@pytest.fixture(scope="module")
def fp64(tmp_path_factory, tokens) -> dict[str, Result]:
    folder = tmp_path_factory.mktemp("fp64")
    runs = {name: cut_run(folder, tokens, name, *cut, "precision=fp64") for name, cut in CUTS.items()}
    runs["4x2 on 2 ranks"] = cut_run(
        folder, tokens, "ddp", 4, 2, "precision=fp64", "parallelism=ddp", "parallelism.nproc_per_node=2"
    )
    return runs


@pytest.mark.parametrize("cut", [*CUTS, "4x2 on 2 ranks"])
def test_float64_equals_one_big_batch(fp64, tokens, cut):
    compare(fp64[cut], expected(fp64[cut], tokens), loss=1e-12, norm=1e-12, weights=1e-11)


def test_every_cut_sees_the_same_rows(fp64):
    digests = [[row["data_digest"] for row in run.rows()] for run in fp64.values()]
    assert all(d == digests[0] for d in digests)
    assert len(set(digests[0])) == len(digests[0])


def test_two_ranks_print_once(fp64):
    out = fp64["4x2 on 2 ranks"].out
    assert sum("step" in line and "1/5" in line for line in out.splitlines()) == 1, out


def test_unmasked_and_unclipped(tmp_path, tokens):
    result = cut_run(tmp_path, tokens, "run", 5, 1, "precision=fp64", "batch.real_batch_size=5", "data.ignore_id=null",
                     "clip=none", "train.max_epochs=0.5")  # fmt: skip
    want = expected(result, tokens, real_batch=5, total_sequences=25, ignore_id=None, max_norm=None)
    np.testing.assert_allclose([r["train/loss"] for r in result.rows()], want.losses, rtol=1e-12)
    np.testing.assert_allclose([r["grad_norm"] for r in result.rows()], want.norms, rtol=1e-12)
    assert all(r["grad_norm"] == r["grad_norm_post_clip"] and not r["clipped_share"] for r in result.rows())


# Rounding in the lower precisions. Unit roundoffs: fp32 6e-8, fp16 5e-4, bf16 4e-3.
#  loss    a mean of ~190 terms, each a dozen roundings deep whose errors are partly common: 16 u for fp32, about u for
#          the autocast ones, where the residual stream and the sum are fp32 and only matmul inputs are rounded.
#  norm    one more pass through the same roundings, no averaging over targets: 16 u fp32, 5 u with autocast.
#  weights Adam divides each entry by its own size, so an entry whose gradient is at the noise level may move by lr in
#          either direction: after five steps of at most lr = 0.02 on weights of size ~0.1 that bounds fp32 poorly, so
#          what is asserted is 5 x lr x (relative norm error) x 1/u-free headroom 16 for fp32, and that no weight
#          of the autocast runs strays by more than all updates together (5 x 0.02 on a largest weight of ~0.1).
@pytest.mark.parametrize(
    ("precision", "loss", "norm"),
    [("fp32", 16 * 6e-8, 64 * 6e-8), ("bf16", 4e-3, 5 * 4e-3), ("fp16", 5e-4, 5 * 5e-4)],
)
def test_lower_precisions_stay_within_their_rounding(tmp_path, tokens, precision, loss, norm):
    for name in ("16x1", "4x4"):
        result = cut_run(tmp_path, tokens, name, *CUTS[name], f"precision={precision}", "optimizer.eps=1e-2")
        want = expected(result, tokens, eps=1e-2)
        compare(result, want, loss=loss, norm=norm, weights=4 * norm)


def test_the_loss_scale_is_in_no_figure(tmp_path, tokens):
    """The norm is read after unscaling: a scale of 2^10 or 2^4 changes nothing that is logged but itself."""
    rows = [
        cut_run(tmp_path, tokens, f"s{scale}", 4, 4, "precision=fp16", f"precision.init_scale={scale}").rows()
        for scale in (16, 1024)
    ]
    assert [r["loss_scale"] for r in rows[0]] == [16.0] * 5
    assert [r["loss_scale"] for r in rows[1]] == [1024.0] * 5
    for a, b in zip(*rows, strict=True):
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=2.5e-3)
        assert a["train/loss"] == pytest.approx(b["train/loss"], rel=5e-4)


def test_a_window_without_valid_targets_is_passed(tmp_path):
    """No update, no nan, counted; the schedule waits, the data position does not."""
    stream = np.array([1, 2, 3] * 24 + [1] + [10] * 48 + [1, 2, 3] * 24 + [4], dtype=np.uint16)  # rows 6..9 are masked
    path = tmp_path / "t.npy"
    np.save(path, stream)
    result = cut_run(tmp_path, path, "run", 1, 2, "precision=fp64", "batch.real_batch_size=2", "train.max_epochs=1")
    want = expected(result, path, real_batch=2, total_sequences=(len(stream) - 1) // 12)
    rows = result.rows()
    empty = [i for i, n in enumerate(want.counts) if n == 0]
    assert empty
    assert [i for i, r in enumerate(rows) if r["skipped"]] == empty
    assert rows[-1]["skipped_steps"] == len(empty)
    assert all("train/loss" not in rows[i] and "grad_norm" not in rows[i] for i in empty)
    for i, row in enumerate(rows):
        assert row["lr"] == pytest.approx(want.rates[i], rel=1e-14)
        if i not in empty:
            assert row["train/loss"] == pytest.approx(want.losses[i], rel=1e-12)
            assert row["grad_norm"] == pytest.approx(want.norms[i], rel=1e-12)
    final = load_file(result.checkpoint(len(rows)) / "model.safetensors")
    for name, tensor in final.items():
        assert torch.allclose(tensor, want.weights[name], rtol=0, atol=1e-11)
