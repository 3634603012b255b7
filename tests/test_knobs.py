"""What a knob changes is said in one place, and that is true."""

from __future__ import annotations

from llmexp.knobs import affects, fields, is_record, may_change


def test_the_lists_of_keys_come_from_one_place():
    """Resuming, telling points apart and comparing ask the same question of the same declarations."""
    assert {meta["affects"] for meta in fields().values()} == {"result", "rounding", "nothing"}
    said = {"train.seed": "result", "batch.micro_batch_size": "rounding", "tracker.name": "nothing",
            "data.cache_dir": "nothing", "model.d_model": "result", "of.nobody": "result"}  # fmt: skip
    assert {key: affects(key) for key in said} == said
    for key in (*fields(), *said):
        assert not is_record(key) or may_change(key), key
    assert may_change("hooks")
    assert not may_change("optimizer.lr")
    assert not may_change("train.twin")
