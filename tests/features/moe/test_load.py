"""Ten steps of a run against a loop over tokens: losses, weights, biases and rows, however the
batch is cut; a run that stops and goes on; balance by layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from llmexp.folders.rows import read_rows
from llmexp.models.llama import Llama
from tests.conftest import llmexp
from tests.models.mixture import loops_in, moved, window_loss
from tests.tools import weights
from tests.train.resumed import goes_on

LENGTH, STEPS, REAL, RATE, LR = 12, 10, 8, 0.01, 0.5
END, IGNORED = 256, 10
SIZES = {"n_layers": 3, "n_heads": 2, "n_kv_heads": 2, "d_model": 8, "d_ff": 12}
SIZES |= {"n_experts": 6, "d_expert": 4, "first_dense_layers": 1, "n_shared_experts": 1}
SETTINGS = [
    "model=moe_tiny", *(f"model.{key}={value}" for key, value in SIZES.items()),
    "model.max_position_embeddings=32", f"batch.sequence_length={LENGTH}", "data=tokens",
    "data.shuffle=false", f"data.ignore_id={IGNORED}", "data.val_ratio=0", "precision=fp64",
    "batch.document_mask=true", f"batch.real_batch_size={REAL}", "train.max_tokens=900",
    "train.tail=keep", "train.log_every=1", "train.eval_every=null", "optimizer=sgd",
    "optimizer.momentum=0", f"optimizer.lr={LR}", "schedule=constant", "clip=none",
    "checkpoint.save_initial=true", "checkpoint.every=5", "tracker=none", "train.sample_tokens=0",
    "metrics.picture=false", "metrics.layers_every=5", "checkpoint.keep=null", "model.norm=pre",
]  # fmt: skip
BALANCES = {
    "bias": ["model.router=sigmoid", f"model.balance_rate={RATE}"],
    "sequence": ["model.balance=sequence", "model.balance_loss=0.2", "model.router_z_loss=0.05"],
}
CUTS = {
    "8x1": ["batch.micro_batch_size=8"],
    "1x8": ["batch.micro_batch_size=1"],
    "2x4, again": ["batch.micro_batch_size=2", "parallelism.activation_checkpointing=full"],
    "ddp 2": ["batch.micro_batch_size=2", "parallelism=ddp", "parallelism.nproc_per_node=2"],
    "fsdp 2": ["batch.micro_batch_size=4", "parallelism=fsdp", "parallelism.nproc_per_node=2"],
    "hsdp 2x2": [
        "batch.micro_batch_size=2", "parallelism=hsdp", "parallelism.nproc_per_node=4",
        "parallelism.replicate_size=2", "parallelism.activation_checkpointing=selective",
    ],
    "tp 2": ["batch.micro_batch_size=4", "parallelism=tp", "parallelism.nproc_per_node=2"],
    "fsdp_tp 2x2": [
        "batch.micro_batch_size=2", "parallelism=fsdp_tp", "parallelism.nproc_per_node=4",
        "parallelism.tensor_parallel_size=2",
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ids with documents, ids to ignore, and a sequence of the fourth step without any target."""
    rng = np.random.default_rng(2)
    ids = rng.integers(0, 40, 80 * LENGTH + 1)
    ids[rng.random(len(ids)) < 0.05] = END
    ids[30 * LENGTH : 31 * LENGTH + 1] = IGNORED
    path = tmp_path_factory.mktemp("stream") / "ids.npy"
    np.save(path, ids.astype(np.uint16))
    return path


@pytest.fixture(scope="module")
def trained(runs: Any, stream: Path) -> Any:
    return lambda balance, cut: runs(*settings(stream, balance, cut))


def settings(stream: Path, balance: str, cut: str) -> list[str]:
    return [*SETTINGS, f"data.train_files=[{stream}]", *BALANCES[balance], *CUTS[cut]]


class Wanted:
    """What the loop comes to from a run's first weights."""

    def __init__(self, first: dict[str, Tensor], stream: Path, balance: str) -> None:
        sigmoid = balance == "bias"
        router = "sigmoid" if sigmoid else "softmax"
        model = Llama(320, 32, **SIZES, balance=balance, router=router).double()
        model.load_state_dict(first)
        model.document_end = END
        loops = loops_in(model, router=router, per_token=2, norm_topk=True)
        ids = torch.from_numpy(np.load(stream).astype(np.int64))
        alpha, z_factor = (0.0, 0.0) if sigmoid else (0.2, 0.05)
        self.losses: list[float] = []
        self.rows: list[dict[str, float]] = []
        for step in range(STEPS):
            rows = range(step * REAL, min((step + 1) * REAL, 75))
            tokens = torch.stack([ids[r * LENGTH : (r + 1) * LENGTH] for r in rows])
            targets = torch.stack([ids[r * LENGTH + 1 : (r + 1) * LENGTH + 1] for r in rows])
            targets[(targets == IGNORED) | (tokens == END)] = -100
            model.zero_grad()
            whole, nll = window_loss(model, loops, tokens, targets, alpha, z_factor)
            whole.backward()
            self.losses.append(nll)
            counts = (targets != -100).sum(1).tolist()
            self.rows.append(figures(loops, counts))
            with torch.no_grad():
                for p in model.parameters():
                    p -= LR * p.grad
                for loop in loops if sigmoid else ():
                    moved(loop.router.balance_bias, loop.loads, counts, RATE)
        self.weights = model.state_dict()


def figures(loops: Any, counts: list[int]) -> dict[str, float]:
    load = np.array(
        [np.sum([ld for ld, c in zip(p.loads, counts, strict=True) if c], 0) for p in loops]
    )
    share = load / load.mean(1, keepdims=True)

    def mean(values: Any) -> float:
        return float(np.average(np.array(values, dtype=float), axis=-1, weights=counts).mean())

    return {
        "moe/load_max": share.max(),
        "moe/load_cv": share.std(1).mean(),
        "moe/entropy": mean([p.entropies for p in loops]),
        "moe/balance_loss": mean([[b.detach() for b, _ in p.losses] for p in loops]),
        "moe/z_loss": mean([[z.detach() for _, z in p.losses] for p in loops]),
        "moe/dead": (load == 0).sum(),
    }


@pytest.fixture(scope="module")
def wanted(trained: Any, stream: Path) -> Any:
    found = {b: Wanted(weights(trained(b, "8x1"), 0), stream, b) for b in BALANCES}
    return found.__getitem__


# Of four ranks each layout runs by default with one of the two balances.
MORE = [("bias", "hsdp 2x2"), ("sequence", "fsdp_tp 2x2")]
CASES = [
    pytest.param(balance, cut, marks=[pytest.mark.slow] * ((balance, cut) in MORE))
    for cut in CUTS
    for balance in BALANCES
]


@pytest.mark.parametrize(("balance", "cut"), CASES)
def test_any_cut_is_the_loop(trained: Any, wanted: Any, balance: str, cut: str) -> None:
    """The last window is short, so micro-batches are filled up and a rank has no row of its own."""
    result, want = trained(balance, cut), wanted(balance)
    rows = result.rows()
    (line,) = [one for one in read_rows(result.folder / "layers.jsonl") if one["step"] == STEPS]
    assert list(line["moe/load_max"]) == ["blocks.1", "blocks.2"]
    assert max(line["moe/load_max"].values()) == rows[-1]["moe/load_max"]
    np.testing.assert_allclose([r["train/loss"] for r in rows], want.losses, rtol=1e-12)
    for row, own in zip(rows, want.rows, strict=True):
        for key, value in own.items():
            assert row[key] == pytest.approx(value, rel=1e-12), key
    first, found = weights(result, 0), weights(result, STEPS)
    assert found.keys() == want.weights.keys()
    for name, value in want.weights.items():
        moved_by = (value - first[name]).abs().max()
        assert (found[name] - value).abs().max() <= 1e-11 * moved_by, name
        assert moved_by, name


def test_experts_of_a_model_of_ones_own_are_balanced(tmp_path: Path) -> None:
    """And a model that calls something else by that name trains."""
    for kind in ("Sparse", "Named"):
        found = llmexp(
            "train", "~model", f"+model={{_target_: own.sparse.{kind}, n_experts: 4}}",
            "data=synthetic", "data.n_tokens=3000", "batch.sequence_length=12", "tracker=none",
            "train.max_steps=2", "train.sample_tokens=0", "train.eval_every=null", "precision=fp64",
            "metrics.picture=false", f"hydra.run.dir={kind}", "--allow=own", cwd=tmp_path,
        )  # fmt: skip
        assert found.code == 0, found.err
        assert all(("moe/load_max" in row) == (kind == "Sparse") for row in found.rows())
        if kind == "Sparse":
            bias = weights(found, 2)["blocks.0.mlp.router.balance_bias"]
            assert bias.abs().max() == pytest.approx(2e-3)


@pytest.mark.parametrize("cut", ["1x8", "ddp 2"])
def test_a_killed_run_goes_on_to_the_same_bits(
    trained: Any, runs: Any, stream: Path, tmp_path: Path, cut: str
) -> None:
    part = runs.copy(tmp_path / "run", *settings(stream, "bias", cut), step=5)
    goes_on(part, trained("bias", cut))
