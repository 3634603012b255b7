"""Checkpoints of many ranks: each reads its slices alone, from files that it opens once."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from llmexp.checkpoint import hashes, loading, saving
from llmexp.checkpoint.folders import MANIFEST
from llmexp.checkpoint.pieces import named_tensors, piece_of
from llmexp.mesh.pretend import pretended

RANKS = 8


def values(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float32) + len(name)).view(shape)


def state(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """This rank's parts of a model and of its moments, whose values are known."""
    from torch.distributed.fsdp import fully_shard  # a second, which no collection needs

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 24), nn.LayerNorm(24), nn.Linear(24, 19))
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,), mesh_dim_names=("shard",)))
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    return model, optimizer


def pieces_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    for name, p in named_tensors(model).items():
        yield name, piece_of(p)
        for key in ("exp_avg", "exp_avg_sq"):
            yield f"{name}/{key}", piece_of(optimizer.state[p][key])


def on_each_rank(
    work: Callable[[int], Any], folder: Path, ranks: Sequence[int] = range(RANKS)
) -> list[Any]:
    """Return what the work of each rank returns, in a process of its own: torch keeps the first
    rank's place in a mesh."""
    found = []
    for rank in ranks:
        child = os.fork()
        if not child:
            code = 1
            try:
                with pretended(RANKS, rank):
                    (folder / f"{rank}.json").write_text(json.dumps(work(rank)))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0, rank
        found.append(json.loads((folder / f"{rank}.json").read_text()))
    return found


def put(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for name, piece in pieces_of(model, optimizer):
        box = [slice(o, o + n) for o, n in zip(piece.offset, piece.local.shape, strict=True)]
        piece.local.copy_(values(name, piece.shape)[tuple(box)])


def right(model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    for name, piece in pieces_of(model, optimizer):
        box = [slice(o, o + n) for o, n in zip(piece.offset, piece.local.shape, strict=True)]
        assert torch.equal(piece.local, values(name, piece.shape)[tuple(box)]), name
    return all(float(state["step"]) == 1 for state in optimizer.state.values())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("slices")

    def save(rank: int) -> None:
        model, optimizer = state(0)
        put(model, optimizer)
        held = saving.snapshot(model, [optimizer], rank, RANKS, False)
        saving.write_pieces(root, 3, held)
        if rank == RANKS - 1:  # the last here; a run's rank 0 when all have written
            saving.commit_checkpoint(root, 3, held, {}, {}, None)

    on_each_rank(save, tmp_path_factory.mktemp("notes"))
    return root


def resume(root: Path, rank: int) -> bool:
    model, optimizer = state(1)
    joined: Any = SimpleNamespace(rank=rank, world_size=RANKS, distributed=False)
    loaded = loading.newest_whole(root, print, joined)
    assert loaded is not None
    loading.restore_model(loaded, model)
    loading.restore_optimizers(loaded, model, [optimizer])
    return right(model, optimizer)


def test_a_resume_opens_four_files_a_rank_and_hashes_each_byte_once(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Manifest, state, and the two files with its own slices, which it also hashes."""
    manifest = json.loads((saved / "step_00000003" / MANIFEST).read_text())
    original = hashes.OpenFiles.fingerprint
    opened, hashed = Counter[str](), Counter[str]()

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and Path(str(arguments[0])).name in (MANIFEST, *manifest["files"]):
            opened[Path(str(arguments[0])).name] += 1

    def fingerprint(self: hashes.OpenFiles, file: Path) -> dict[str, Any]:
        found = original(self, file)
        hashed[file.name] += found["size"]
        return found

    monkeypatch.setattr(hashes.OpenFiles, "fingerprint", fingerprint)

    def work(rank: int) -> tuple[dict[str, int], dict[str, int]]:
        sys.addaudithook(note)  # stays: in a process of its own
        assert resume(saved, rank)
        return opened, hashed

    found = on_each_rank(work, tmp_path)
    all_opened = sum((Counter(one) for one, _ in found), Counter[str]())
    tensors = [name for name in manifest["files"] if name.endswith(".safetensors")]
    assert len(tensors) == 2 * RANKS
    assert {all_opened[name] for name in tensors} == {1}
    assert all_opened.total() <= 4 * RANKS, all_opened
    all_hashed = sum((Counter(one) for _, one in found), Counter[str]())
    assert all_hashed == {name: one["size"] for name, one in manifest["files"].items()}


def test_what_is_wrong_with_a_slice_or_the_index_is_named(saved: Path, tmp_path: Path) -> None:
    """Each by the rank that finds it: a file that is cut, and an index whose text has changed."""
    folder = tmp_path / "step_00000003"
    folder.mkdir()
    for file in (saved / "step_00000003").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    text = (folder / MANIFEST).read_text()
    name = "optimizer-00002-of-00008.safetensors"
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    share = sorted(json.loads(text)["files"]).index(name) % RANKS
    loading.read_checkpoint(folder, hash_share=(share + 1, RANKS))
    with pytest.raises(loading.CheckpointError, match=name):
        loading.read_checkpoint(folder, hash_share=(share, RANKS))
    (folder / name).write_bytes(whole[:-1])
    with pytest.raises(loading.CheckpointError, match=f"{name} does not match the size"):
        loading.read_checkpoint(folder, hash_share=None)
    (folder / name).write_bytes(whole)

    def cut(rank: int) -> bool:
        model, optimizer = state(1)
        loaded = loading.read_checkpoint(folder, hash_share=None)
        loading.restore_model(loaded, model)
        (folder / name).write_bytes(whole[:-1])
        with pytest.raises(loading.CheckpointError, match=f"{name} cannot be read: it ends"):
            loading.restore_optimizers(loaded, model, [optimizer])
        return True

    assert on_each_rank(cut, tmp_path, [2]) == [True]
    (folder / name).write_bytes(whole)
    at = text.index("0.weight") + 20
    changed = text[:at] + ("1" if text[at] != "1" else "2") + text[at + 1 :]
    (folder / MANIFEST).write_text(changed)
    with pytest.raises(loading.CheckpointError, match=f"the index in {MANIFEST} does not match"):
        loading.read_checkpoint(folder)
