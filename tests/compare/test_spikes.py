"""What a comparison tells of spikes: those that status.json of each run has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llmexp.compare.comparing import compare
from llmexp.compare.table import columns_in_full, lines, to_json
from tests.compare.synthetic import make_run


def made(folder: Path, *found: dict[str, Any] | None) -> None:
    """Two settings of two seeds, and what the runs record of spikes."""
    points = [(limit, seed) for limit in (0.5, 1.0) for seed in (1, 2)]
    for (limit, seed), spikes in zip(points, found, strict=True):
        status = {} if spikes is None else {"spikes": spikes}
        make_run(folder / f"{limit} {seed}", max_norm=limit, seed=seed, status=status)


def spikes(number: int, tokens: int, module: str | None = None) -> dict[str, Any]:
    first = {"rose_first": {"module": module, "spikes": 1}} if module else {}
    return {"spikes": number, "spike_tokens": tokens} | first


def test_spikes_are_told_of_each_setting(tmp_path):
    calm = spikes(0, 0)
    made(tmp_path, calm, calm, spikes(3, 5000, "blocks.1.mlp"), spikes(1, 1000, "blocks.1.mlp"))
    c = compare([tmp_path])
    told = {r["clip.max_norm"]: r for r in json.loads(to_json(c))["runs"]}
    keys = ("spikes", "spike_tokens", "rose_first")
    assert [told[0.5][key] for key in keys] == [0, 0, None]
    assert [told[1.0][key] for key in keys] == [2, 3000, "blocks.1.mlp"]
    (note,) = [note for note in c.notes if note.startswith("Spikes")]
    assert note == (
        "Spikes: clip=1.0 2 a run, 3,000 tokens until the loss was back, blocks.1.mlp rose first "
        "most often in 2 of 2 runs."
    )
    assert set(keys[:2]) <= columns_in_full(c).keys()
    assert any("tokens in" in line for line in lines(c, 300))


def test_nothing_is_told_where_no_run_records_them(tmp_path):
    made(tmp_path, None, None, None, None)
    c = compare([tmp_path])
    assert "spike" not in to_json(c)
    assert "rose_first" not in to_json(c)


def test_damaged_records_are_passed_over(tmp_path):
    made(tmp_path, {"spikes": "x", "rose_first": 3}, spikes(2, 10, "a"), None, None)
    assert '"rose_first": "a"' in to_json(compare([tmp_path]))
