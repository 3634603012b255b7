"""A stranger's checkpoint and run folder: nothing in them is run, followed, or believed."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from llmexp import checkpoint, saving
from llmexp.__main__ import run
from llmexp.config import plain
from tests.conftest import TINY
from tests.test_security import composed, home

__all__ = ["home"]  # a fixture


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0).reshape(3, 2))


@pytest.fixture
def saved(tmp_path) -> Path:
    root = tmp_path / "run" / "checkpoints"
    root.mkdir(parents=True)
    pieces = saving.snapshot(Plain(), [], 0, 1, False)
    saving.write(root, 100, pieces)
    saving.commit(root, 100, pieces, {"note": [1, "two"]}, {}, 3)
    assert checkpoint.load(root / "step_00000100").step == 100
    return root / "step_00000100"


def rewrite(path: Path, **changes: object) -> None:
    """The manifest again, with the right hashes: whoever makes a bad checkpoint can hash."""
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"] = {n: checkpoint.fingerprint(path / n) for n in manifest["files"]}
    (path / "manifest.json").write_text(json.dumps(manifest | changes))


def bad_pieces(path: Path, **changes: object) -> None:
    """The header's account of the one tensor, changed."""
    file = path / "model.safetensors"
    with checkpoint.safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    pieces = json.loads(metadata["pieces"])
    pieces["weight"] |= changes
    save_file(load_file(file), file, metadata=metadata | {"pieces": json.dumps(pieces)})
    rewrite(path)


def long_header(path: Path) -> None:
    (path / "model.safetensors").write_bytes((2**62).to_bytes(8, "little") + b"{}")
    rewrite(path)


def packed(path: Path) -> None:
    with zipfile.ZipFile(path / "state.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(50_000_000))
    rewrite(path)


def linked(path: Path, name: str) -> None:
    moved = path.parent.parent / f"moved-{Path(name).name}"
    os.replace(path / name, moved)
    (path / name).symlink_to(moved)


DAMAGE = {
    "a link for a file": (lambda p: linked(p, "model.safetensors"), "is missing"),
    "a link for the manifest": (lambda p: linked(p, "manifest.json"), "reached by a link"),
    "a manifest of 20 MB": (lambda p: rewrite(p, more="x" * 20_000_000), "larger than"),
    "a manifest that nests": (lambda p: (p / "manifest.json").write_text("[" * 200_000), "unreadable"),
    "a file outside": (lambda p: rewrite(p, files={"/etc/passwd": {}}), "no file of a checkpoint"),
    "a file above": (lambda p: rewrite(p, files={"../../state.pt": {}}), "no file of a checkpoint"),
    "a header longer than the file": (long_header, "a header of"),
    "a packed state": (packed, "is packed"),
    "a shape of terabytes": (lambda p: bad_pieces(p, shape=[2**40, 2**40]), "do not add up"),
    "a shape that overflows": (lambda p: bad_pieces(p, shape=[2**62, 2**62]), "do not add up"),
    "a negative shape": (lambda p: bad_pieces(p, shape=[-3, -2]), "is no shape"),
    "an offset outside": (lambda p: bad_pieces(p, offset=[1, 0]), "do not add up"),
    "a dtype that is a function": (lambda p: bad_pieces(p, dtype="load"), "is no dtype"),
    "a shape that is text": (lambda p: bad_pieces(p, shape="32"), "is no shape"),
    "a step that is text": (lambda p: rewrite(p, step="100"), "unreadable"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_bad_checkpoint_is_refused(saved, damage):
    make, says = DAMAGE[damage]
    make(saved)
    with pytest.raises(checkpoint.CheckpointError, match=says):
        checkpoint.load(saved)


def test_links_to_checkpoints_are_not_followed(saved, tmp_path):
    root = tmp_path / "other" / "checkpoints"
    root.mkdir(parents=True)
    (root / "step_00000200").symlink_to(saved)
    with pytest.raises(checkpoint.CheckpointError, match="all 1 checkpoints are damaged"):
        checkpoint.latest(root, print)
    whole = tmp_path / "third"
    whole.symlink_to(saved.parent)
    with pytest.raises(checkpoint.CheckpointError, match="is a link"):
        checkpoint.latest(whole, print)


def test_a_newer_format_is_never_passed_over(saved):
    newer = saved.with_name("step_00000200")
    newer.mkdir()
    version = checkpoint.FORMAT_VERSION
    (newer / "manifest.json").write_text(json.dumps({"format_version": version + 1, "step": 200, "files": {}}))
    with pytest.raises(checkpoint.NewerFormat, match=f"version {version + 1}, this program reads version {version}"):
        checkpoint.latest(saved.parent, print)
    assert issubclass(checkpoint.NewerFormat, checkpoint.CheckpointError)


def test_pieces_may_not_overlap():
    def stored(offset: tuple[int, ...], size: tuple[int, ...]) -> checkpoint.Stored:
        return checkpoint.Stored(Path("x"), (8, 8), offset, size, torch.float32)

    rows, columns = [stored((i, 0), (1, 8)) for i in range(8)], [stored((0, i), (8, 1)) for i in range(8)]
    blocks = [stored((i, j), (4, 2)) for i in (0, 4) for j in (0, 2, 4, 6)]
    for pieces in (rows, columns, blocks):
        assert not checkpoint._overlapping(pieces)
        for i in range(len(pieces)):
            assert checkpoint._overlapping([*pieces[:i], *pieces[i + 1 :], pieces[(i + 3) % len(pieces)]])


LAUGHS = "\n".join(["a: &a [x, x, x, x, x, x, x, x, x]"] + [
    f"{n}: &{n} [*{p}, *{p}, *{p}, *{p}, *{p}, *{p}, *{p}, *{p}, *{p}]"
    for p, n in zip("abcdefghijkl", "bcdefghijklm", strict=True)
])  # fmt: skip
CONFIGS = {
    "python tags": ("x: !!python/object/apply:os.system ['touch canary']", "cannot be read"),
    "laughs": (LAUGHS, "more than 10,000 values"),
    "not yaml": ("a: [", "cannot be read"),
    "a list": ("- 1", "holds no config"),
    "binary": ("\x00\x01", "cannot be read"),
}


@pytest.mark.parametrize("what", CONFIGS)
def test_a_strangers_config_runs_nothing_and_takes_no_time(home, capsys, what):
    (home / "run").mkdir()
    text, says = CONFIGS[what]
    (home / "run" / "config.yaml").write_text(text)
    for command in (["sample", "run"], ["resume", "run"], ["compare", "run"], ["runs", "run"]):
        (home / "run" / "run.json").write_text("{}")
        code = run(command)
        out, err = capsys.readouterr()
        assert code == 2 or command[0] in ("compare", "runs"), out
        assert "Traceback" not in err
        assert says in err or command[0] in ("compare", "runs"), err
        assert not (home / "canary").exists()


def test_a_strangers_parts_are_not_called(home, capsys, saved):
    config = plain(composed(*TINY, "data=synthetic", "data.n_tokens=5000"))
    other = saved.parent.parent
    evil = {
        "model": {"_target_": "os.system", "command": "touch canary"},
        "tokenizer": {"_target_": "llmexp.data.tokenizers.os.system", "command": "touch canary"},
    }
    (other / "run.json").write_text(json.dumps({"sequence_length": 12}))
    for section, values in evil.items():
        (other / "config.yaml").write_text(json.dumps(config | {section: values}))
        assert run(["sample", str(other)]) == 2
        assert f"{section}._target_=" in capsys.readouterr().err
    assert not list(home.rglob("canary"))
