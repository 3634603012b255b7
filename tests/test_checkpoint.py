"""Checkpoints: whole or absent, pruned without losing the last good one, damage is seen."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from llmexp import checkpoint


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("cache", torch.ones(2), persistent=False)


def save(root, step, keep=2, model=None):
    return checkpoint.save(root, step, model or Tied(), {"progress": {"step": step}}, {"tokens_seen": 1}, keep)


def test_a_tied_parameter_is_saved_once_and_comes_back(tmp_path):
    model = Tied()
    loaded = checkpoint.load(save(tmp_path, 3, model=model))
    assert sorted(loaded.tensors) == ["embed.weight", "scale"]
    other = Tied()
    checkpoint.load_model(other, loaded.tensors)
    assert torch.equal(other.head.weight, model.embed.weight)
    assert other.head.weight is other.embed.weight
    with pytest.raises(checkpoint.CheckpointError, match="another model shape"):
        checkpoint.load_model(nn.Linear(2, 2), loaded.tensors)


def test_the_newest_are_kept_and_damaged_newer_ones_do_not_count(tmp_path):
    for step in (100, 200, 300):
        save(tmp_path, step)
    assert [p.name for p in checkpoint.steps(tmp_path)] == ["step_00000200", "step_00000300"]
    (tmp_path / "step_00000300" / checkpoint.STATE).write_bytes(b"x")
    warnings: list[str] = []
    assert checkpoint.latest(tmp_path, warnings.append).step == 200
    assert "step_00000300 is damaged" in warnings[0]
    for step in (210, 220):
        save(tmp_path, step)
    assert [p.name[-3:] for p in checkpoint.steps(tmp_path)] == ["210", "220", "300"]
    save(tmp_path, 300)  # the damaged one's place
    assert checkpoint.latest(tmp_path, warnings.append).step == 300
    assert [p.name[-3:] for p in checkpoint.steps(tmp_path)] == ["220", "300"]


def test_leftovers_of_a_killed_save_go_away(tmp_path):
    leftover = tmp_path / ".step_00000100.77.tmp"
    leftover.mkdir(parents=True)
    (leftover / "model.safetensors").write_bytes(b"half")
    save(tmp_path, 200)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000200"]


def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch):
    save(tmp_path, 100)

    def full(*arguments, **more):
        raise RuntimeError("unexpected pos 64 vs 0")  # what torch.save says on a full disk

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match=r"saving .*step_00000200 failed"):
        save(tmp_path, 200)
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000100"]
    assert checkpoint.latest(tmp_path, print).step == 100


@pytest.mark.parametrize(
    "damage", ["manifest gone", "manifest no json", "newer version", "file gone", "bit", "symlink"]
)
def test_damage_is_named(tmp_path, damage):
    path = save(tmp_path, 100)
    manifest, model = path / checkpoint.MANIFEST, path / checkpoint.MODEL
    if damage == "manifest gone":
        manifest.unlink()
    elif damage == "manifest no json":
        manifest.write_text("{")
    elif damage == "newer version":
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format_version": 99}))
    elif damage == "file gone":
        model.unlink()
    elif damage == "bit":
        data = bytearray(model.read_bytes())
        data[-1] ^= 1
        model.write_bytes(data)
    else:
        model.rename(tmp_path / "elsewhere")
        model.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(checkpoint.CheckpointError, match="version 99" if damage == "newer version" else "100"):
        checkpoint.load(path)
    with pytest.raises(checkpoint.CheckpointError, match="all 1 checkpoints are damaged"):
        checkpoint.latest(tmp_path, lambda text: None)


def test_a_pickle_is_not_run(tmp_path):
    path = save(tmp_path, 100)
    canary = tmp_path / "canary"

    class Bomb:
        def __reduce__(self):
            return (open, (str(canary), "w"))

    torch.save(Bomb(), path / checkpoint.STATE)
    manifest = json.loads((path / checkpoint.MANIFEST).read_text())
    manifest["files"][checkpoint.STATE] = checkpoint._fingerprint(path / checkpoint.STATE)
    (path / checkpoint.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(checkpoint.CheckpointError, match="cannot be read"):
        checkpoint.load(path)
    assert not canary.exists()
