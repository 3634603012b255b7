"""Rates count the work that was done: against the operations that torch counts in the model."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from llmexp.folders import rundir
from llmexp.train.assembly.assemble import assemble
from tests.conftest import Result, train
from tests.tools import cut_after
from tests.train.resumed import ends

LENGTH = 12


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of data of which about half of the targets are masked, and of short documents."""
    folder, draw = tmp_path_factory.mktemp("half"), np.random.default_rng(0)
    ids = np.where(draw.random(901) < 0.5, 7, draw.integers(0, 60, 901))
    np.save(folder / "half.npy", ids.astype(np.uint16))
    np.save(folder / "labels.npy", np.where(ids == 7, -100, ids).astype(np.int32))
    for number in range(60):
        (folder / f"{number}.txt").write_text("a line of text")
    return folder


def counted_per_sequence(folder: Path) -> int:
    """The operations of a forward and backward pass of the model over a sequence, by torch."""
    config = rundir.built_config(folder)
    with torch.random.fork_rng():
        model = assemble(config).new_model()
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, LENGTH, dtype=torch.int64)).sum().backward()
    return counter.get_total_flops()


def check(run: Result, sizes: dict[int, int]) -> None:
    """Each row's rates against the sequences of its steps, which `sizes` has by step."""
    facts, each = run.json("run.json"), counted_per_sequence(run.folder)
    assert each == facts["flops_per_token"] * LENGTH
    before, computed, ranks = min(sizes) - 1, 0, facts["world_size"]
    for row in run.rows():
        steps = range(before + 1, row["step"] + 1)
        sequences, before = sum(sizes[step] for step in steps), row["step"]
        seconds = row["step_time"] * len(steps)
        assert row["tokens_per_sec"] * seconds == pytest.approx(sequences * LENGTH)
        assert row["tokens_per_sec_per_rank"] == pytest.approx(row["tokens_per_sec"] / ranks)
        work = row["tflops_per_sec_per_rank"] * ranks * 1e12 * seconds
        assert work == pytest.approx(sequences * each)
        computed += work
    assert computed == pytest.approx(facts["total_flops"])
    summary = run.json("status.json")["summary"]
    own = summary["mean tokens_per_sec"] * summary["train_time"]
    assert own == pytest.approx(sum(sizes.values()) * LENGTH)


SIX = ["batch.micro_batch_size=2", "batch.real_batch_size=4", "train.max_steps=6"]
SIX += ["train.log_every=2"]
TOKENS = ["data=tokens", "data.train_files=half.npy", "data.ignore_id=7"]


@pytest.mark.parametrize(
    ("more", "sizes"),
    [
        (TOKENS, [4] * 6),
        ([*TOKENS[:2], "data.train_labels=labels.npy", "data.val_ratio=0"], [4] * 6),
        ([*TOKENS, "parallelism=ddp", "parallelism.nproc_per_node=2"], [4] * 6),
        (["data=text", "data.train_files=*.txt", "batch.document_mask=true"], [4] * 6),
        # a window that is not full, whose last micro-batch is filled up
        ([*TOKENS, "train.max_steps=null", "train.max_tokens=228"], [4] * 4 + [3]),
        ([*TOKENS, "batch.real_batch_size=null", "batch.ramp={0: 2, 48: 4}"], [2] * 2 + [4] * 4),
    ],
)
def test_rates_count_the_tokens_that_are_computed(half, tmp_path, monkeypatch, more, sizes):
    """Whatever masks their targets, in any stage, and however often rows are written; those that
    fill a window up are not counted."""
    monkeypatch.chdir(half)
    run = train(half, tmp_path.name, *SIX, *more)
    check(run, dict(enumerate(sizes, 1)))
    assert run.rows()[-1]["tokens_seen"] < sum(sizes) * LENGTH  # some are masked


def test_a_resumed_run_and_a_fork_count_what_they_have_computed(half, tmp_path, monkeypatch):
    monkeypatch.chdir(half)
    whole = train(half, tmp_path.name, *TOKENS, *SIX, "checkpoint.every=3")
    cut = cut_after(whole, half, 3)
    ends(half, "resume", cut.name)
    for row in Result(0, "", "", cut).rows():  # that of step 4 from one step of this attempt
        assert row["tokens_per_sec"] * row["step_time"] == pytest.approx(4 * LENGTH)
    given = [f"fork.run={whole.folder.name}", "fork.step=3", "train.max_steps=9"]
    fork = ends(half, "train", *given, "hydra.run.dir=fork")
    check(fork, dict.fromkeys(range(4, 10), 4))
