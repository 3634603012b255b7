"""The start lines of a run say how far its data go."""

import pytest

from llmexp.__main__ import run
from tests.conftest import TINY

SHORT = ["data=synthetic", "data.val_ratio=0", "train.max_steps=3", "batch.real_batch_size=8"]


@pytest.mark.parametrize(
    ("tokens", "rest"), [(1201, ""), (1202, ", 1 token left over"), (1212, ", 11 tokens left over")]
)
def test_an_epoch_in_steps_and_the_tokens_that_fill_no_sequence(
    tokens, rest, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert run(["plan", *TINY, *SHORT, f"data.n_tokens={tokens}"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"train {tokens:,} tokens, 100 sequences of 12{rest}" in out
    assert out.partition("sequences of 12")[2].startswith(rest or " validation")
    assert "= 288 tokens = 0.24 epochs of 12.5 steps" in out
