"""The start lines of a run: where it computes, since when, and how far its data go."""

import re
import time

import pytest

from llmexp.__main__ import run
from tests.conftest import TINY, train

SHORT = [
    "data=synthetic", "data.n_tokens=2000", "train.max_steps=3", "batch.real_batch_size=8",
    "checkpoint.every=null",
]  # fmt: skip


def test_start_time_rank_and_device(tmp_path):
    before = time.strftime("%Y-%m-%d %H:%M:%S")
    two = train(tmp_path, "two", *SHORT, "parallelism=ddp", "parallelism.nproc_per_node=2")
    told = dict(re.findall(r"^start +(\S+ \S+), rank (\d of 2 on cpu)$", two.out, re.M))
    assert list(told.values()) == ["0 of 2 on cpu"]
    logs = "".join(path.read_text() for path in (two.folder / "logs").rglob("*") if path.is_file())
    told |= dict(re.findall(r"^start (\S+ \S+), rank (1 of 2 on cpu)$", logs, re.M))
    assert "1 of 2 on cpu" in told.values()
    assert all(before <= moment <= time.strftime("%Y-%m-%d %H:%M:%S") for moment in told)


@pytest.mark.parametrize(
    ("tokens", "rest"),
    [
        (1201, ""),
        (1202, ", 1 token left over"),
        (1212, ", 11 tokens left over"),
    ],
)
def test_an_epoch_in_steps_and_the_tokens_that_fill_no_sequence(
    tokens, rest, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert run(["plan", *TINY, *SHORT, "data.val_ratio=0", f"data.n_tokens={tokens}"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"train {tokens:,} tokens, 100 sequences of 12{rest}" in out
    assert out.partition("sequences of 12")[2].startswith(rest or " validation")
    assert "= 288 tokens = 0.24 epochs of 12.5 steps" in out
