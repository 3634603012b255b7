"""The loop of docs/automation.md runs as it stands there, with fewer steps and runs."""

import re

import pytest

from tests.conftest import ROOT


@pytest.mark.usefixtures("forking")
def test_the_loop_of_the_page_decides(tmp_path, monkeypatch, capsys):
    page = (ROOT / "docs/automation.md").read_text(encoding="utf-8")
    (loop,) = re.findall(r"```python\n(.*?)```", page, re.S)
    assert len(loop.splitlines()) <= 36
    for there, instead in (
        ("train.max_steps=20", "train.max_steps=4"),
        (
            '"tracker=none", ',
            '"tracker=none", "metrics.picture=false", "train.sample_tokens=0", '
            '"train.eval_tokens=64", "data.n_tokens=5000", ',
        ),
        ("train.seed=1,2,3", "train.seed=1,2"),
        ('"sgd"), 9, 24', '"sgd"), 2, 0'),
    ):
        assert there in loop
        loop = loop.replace(there, instead)
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(loop, names)
    headline, settings = capsys.readouterr().out.splitlines()
    assert headline == names["answer"]["headline"]
    assert "optimizer=sgd" in settings
    with pytest.raises(SystemExit, match="out_of_range: batch"):
        names["llmexp"]("plan", "--json", "batch.real_batch_size=7", "batch.micro_batch_size=2")
