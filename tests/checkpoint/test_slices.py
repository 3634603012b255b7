"""Checkpoints of many ranks: each reads its slices alone, from files that it opens once."""

import json
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from llmexp.checkpoint import hashes, loading, saving
from llmexp.checkpoint.folders import MANIFEST
from llmexp.checkpoint.slices import named_tensors, piece_of
from llmexp.mesh.fake_group import pretended

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


def pieces_of(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Give this rank's piece of each tensor, and what it has to hold."""
    for name, p in named_tensors(model).items():
        tensors = {"": p, **{key: optimizer.state[p][key] for key in ("exp_avg", "exp_avg_sq")}}
        for key, tensor in tensors.items():
            piece = piece_of(tensor)
            box = [slice(o, o + n) for o, n in zip(piece.offset, piece.local.shape, strict=True)]
            yield piece.local, values(name + key, piece.shape)[tuple(box)]


def on_each_rank(work: Callable[[int], Any], folder: Path) -> list[Any]:
    """Return what the work of each rank returns, in a process of its own: torch keeps the first
    rank's place in a mesh."""
    found = []
    for rank in range(RANKS):
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


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("slices")

    def save(rank: int) -> None:
        model, optimizer = state(0)
        for piece, wanted in pieces_of(model, optimizer):
            piece.copy_(wanted)
        held = saving.snapshot(model, [optimizer], rank, RANKS, False)
        saving.write_pieces(root, 3, held)
        if rank == RANKS - 1:  # the last here; a run's rank 0 when all have written
            saving.commit_checkpoint(root, 3, held, {}, {}, None)

    on_each_rank(save, tmp_path_factory.mktemp("notes"))
    return root


def resume(root: Path, rank: int) -> None:
    model, optimizer = state(1)
    joined: Any = SimpleNamespace(rank=rank, world_size=RANKS, distributed=False)
    loaded = loading.newest_whole(root, print, joined)
    assert loaded is not None
    loading.restore_model(loaded, model)
    loading.restore_optimizers(loaded, model, [optimizer])
    assert all(torch.equal(piece, wanted) for piece, wanted in pieces_of(model, optimizer))
    assert all(float(state["step"]) == 1 for state in optimizer.state.values())


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
        resume(saved, rank)
        return opened, hashed

    found = on_each_rank(work, tmp_path)
    all_opened = sum((Counter(one) for one, _ in found), Counter[str]())
    tensors = [name for name in manifest["files"] if name.endswith(".safetensors")]
    assert len(tensors) == 2 * RANKS
    assert {all_opened[name] for name in tensors} == {1}
    assert all_opened.total() <= 4 * RANKS, all_opened
    all_hashed = sum((Counter(one) for _, one in found), Counter[str]())
    assert all_hashed == {name: one["size"] for name, one in manifest["files"].items()}
