"""Checkpoints: whole or absent, readable under any layout of ranks, pruned without losing the last
good one."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from llmexp import mesh
from llmexp.checkpoint import hashes, loading, saving
from llmexp.checkpoint.folders import MANIFEST, checkpoint_folders
from llmexp.checkpoint.pieces import named_tensors
from llmexp.checkpoint.stored import DTYPES_BY_NAME
from llmexp.checkpoint.tensor_files import write_tensors
from llmexp.mesh.split import is_split
from llmexp.runs.rundir import CHECKPOINTS
from llmexp.settings.values import ConfigError
from llmexp.system.fileio import sha256
from llmexp.train.beginning import parents_checkpoint
from tests.conftest import HANG_S, ROOT, environment

MODEL = "model.safetensors"


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("cache", torch.ones(2), persistent=False)


def save(root, step, keep=2, model=None, optimizers=(), rank=0, world=1, copy=False, saved=()):
    """One process's whole save."""
    held = saving.snapshot(model or Tied(), list(optimizers), rank, world, copy)
    saving.write_pieces(root, step, held)
    return saving.commit_checkpoint(
        root, step, held, {"progress": {"step": step}}, {"tokens_seen": 1}, keep, saved
    )


def rewrite(path: Path, file: str) -> None:
    """Makes the manifest agree with what the file now holds."""
    manifest = json.loads((path / MANIFEST).read_text())
    manifest["files"][file] = hashes.fingerprint(path / file)
    (path / MANIFEST).write_text(json.dumps(manifest))


def test_a_tied_parameter_is_saved_once_and_comes_back(tmp_path):
    model = Tied()
    path = save(tmp_path, 3, model=model)
    assert sorted(load_file(path / MODEL)) == ["embed.weight", "scale"]
    loaded, other = loading.read_checkpoint(path), Tied()
    loading.restore_model(loaded, other)
    assert torch.equal(other.head.weight, model.embed.weight)
    assert other.head.weight is other.embed.weight
    assert loaded.state["progress"] == {"step": 3}


def test_a_file_of_tensors_is_as_its_library_writes_it(tmp_path):
    """To the byte, but for the order of the metadata, which is random there; and with its hash."""
    made = {f"b {name}": torch.ones(3, 5).to(dtype) for name, dtype in DTYPES_BY_NAME.items()}
    made |= {
        "a": torch.randn(4, 6).T,
        "none": torch.zeros(0, 3),
        "one": torch.tensor(2.5),
        "ä": torch.ones(1),
    }
    noted, begins = write_tensors(tmp_path / "own", made, {"format": "pt"})
    whole = {name: t.contiguous() for name, t in made.items()}
    save_file(whole, tmp_path / "theirs", {"format": "pt"})
    assert (tmp_path / "own").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert noted == hashes.fingerprint(tmp_path / "own")
    content = (tmp_path / "own").read_bytes()
    for name, t in whole.items():
        raw = t.reshape(-1).view(torch.uint8).numpy().tobytes()
        assert content[begins[name] :][: len(raw)] == raw, name


def test_equal_states_give_equal_files_and_one_ulp_another_hash(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    found = []
    for number in range(8):
        path = save(tmp_path / str(number), 1, model=model, optimizers=[optimizer])
        found.append((path / MANIFEST).read_text())
    assert len(set(found)) == 1
    with torch.no_grad():
        model.weight[1, 2] = torch.nextafter(model.weight[1, 2], torch.tensor(9.0))
    path = save(tmp_path / "ulp", 1, model=model, optimizers=[optimizer])
    before, after = (
        json.loads(text)["files"] for text in (found[0], (path / MANIFEST).read_text())
    )
    assert before["optimizer.safetensors"] == after["optimizer.safetensors"]
    assert before[MODEL] != after[MODEL]


def test_a_fork_knows_its_parents_checkpoint_by_its_manifest(tmp_path):
    manifest = save(tmp_path / CHECKPOINTS, 1) / MANIFEST
    joined = mesh.join("cpu", "single", 1, 1, 1)
    parent: Any = SimpleNamespace(folder=tmp_path, step=1, digest=sha256(manifest))
    assert parents_checkpoint(parent, joined, print).step == 1
    parent.digest = "0" * 64
    with pytest.raises(ConfigError, match="is another one than when this fork was made"):
        parents_checkpoint(parent, joined, print)


@pytest.mark.parametrize("set_back", [False, True])
def test_a_file_that_changes_after_its_hash_is_named_before_the_weights_are_used(
    tmp_path, set_back
):
    """Also where a program sets its time back."""
    path = save(tmp_path, 1)
    loaded, before = loading.read_checkpoint(path), (path / MODEL).stat()
    content = bytearray((path / MODEL).read_bytes())
    content[-1] ^= 1
    time.sleep(0.05)  # a clock of files may have steps of some milliseconds
    (path / MODEL).write_bytes(content)
    if set_back:
        os.utime(path / MODEL, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(loading.CheckpointError, match=f"{MODEL} was changed while it was read"):
        loading.restore_model(loaded, Tied())


def test_a_file_that_is_removed_while_it_is_read_is_named(tmp_path):
    """Its pages stay readable while it is open."""
    loaded = loading.read_checkpoint(save(tmp_path, 1))
    (loaded.path / MODEL).unlink()
    with pytest.raises(loading.CheckpointError, match=f"{MODEL} was changed while it was read"):
        loading.restore_model(loaded, Tied())


def test_an_average_that_lacks_a_parameter_is_refused_by_its_file(tmp_path):
    model = Tied()
    average = {"scale": torch.ones(1)}
    held = saving.snapshot(model, [], 0, 1, False, average)
    saving.write_pieces(tmp_path, 1, held)
    path = saving.commit_checkpoint(
        tmp_path, 1, held, {"progress": {"step": 1}}, {"tokens_seen": 1}, 2, ()
    )
    loaded = loading.read_checkpoint(path)
    own = {name: torch.zeros_like(t) for name, t in named_tensors(model).items()}
    words = r"ema\.safetensors does not hold all tensors; missing: embed\.weight"
    with pytest.raises(loading.CheckpointError, match=words):
        loading.fill_all(loaded, own, loaded.ema)
    assert not own["scale"].any()  # nothing was filled


def saves(root: Path, *many: int, loaded: int | None = None) -> list[str]:
    """Those of one process, which may have begun from a checkpoint; what is there after them."""
    saved = [] if loaded is None else [loaded]
    for step in many:
        save(root, step, saved=saved)
        saved.append(step)
    return [p.name[-3:] for p in checkpoint_folders(root)]


def test_the_newest_are_kept_and_damaged_newer_ones_do_not_count(tmp_path):
    saves(tmp_path, 100, 200, 300)
    assert [p.name for p in checkpoint_folders(tmp_path)] == ["step_00000200", "step_00000300"]
    (tmp_path / "step_00000300" / loading.STATE).write_bytes(b"x")
    warnings: list[str] = []
    assert loading.newest_whole(tmp_path, warnings.append).step == 200
    assert "step_00000300 is damaged" in warnings[0]
    (tmp_path / "step_00000200" / MANIFEST).unlink()  # killed while it was being pruned
    assert saves(tmp_path, 210, 220, loaded=200) == ["210", "220", "300"]
    save(tmp_path, 300, saved=[210, 220])  # the damaged one's place
    assert loading.newest_whole(tmp_path, warnings.append).step == 300
    assert sorted(p.name[-3:] for p in tmp_path.iterdir()) == ["220", "300"]


def test_a_damaged_older_one_is_not_one_of_the_kept(tmp_path):
    assert saves(tmp_path, 100, 137) == ["100", "137"]
    (tmp_path / "step_00000137" / loading.STATE).write_bytes(b"x")
    assert saves(tmp_path, 200, loaded=100) == ["100", "137", "200"]  # two that are whole
    assert saves(tmp_path, 300, 400, loaded=200) == ["300", "400"]


def test_leftovers_of_a_killed_save_go_away(tmp_path):
    pieces = saving.snapshot(Tied(), [], 0, 1, False)
    saving.write_pieces(tmp_path, 100, pieces)
    save(tmp_path, 200)
    assert len(list(tmp_path.iterdir())) == 2
    saving.remove_leftovers(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000200"]


@pytest.mark.parametrize("where", ["tensors", "state"])
def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch, where):
    save(tmp_path, 100)

    def full(*arguments, **more):
        raise RuntimeError("unexpected pos 64 vs 0")  # what torch.save says on a full disk

    monkeypatch.setattr(
        *((saving, "write_tensors") if where == "tensors" else (torch, "save")), full
    )
    with pytest.raises(OSError, match=r"saving .*step_00000200.* failed"):
        save(tmp_path, 200)
    assert [p for p in tmp_path.rglob("*") if p.is_file() and "200" in str(p)] == []
    saving.remove_leftovers(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000100"]
    assert loading.newest_whole(tmp_path, print).step == 100


def test_a_save_that_cannot_take_its_place_leaves_the_one_that_was_there(tmp_path, monkeypatch):
    path, real = save(tmp_path, 100), os.rename
    before = (path / MANIFEST).read_bytes()

    def rename(source, target):
        if target == path and source.name == ".step_00000100.tmp":
            raise OSError(errno.EIO, "Input/output error")
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(OSError, match="Input/output error"):
        save(tmp_path, 100)
    saving.remove_leftovers(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    assert (path / MANIFEST).read_bytes() == before


def test_a_save_that_lacks_a_rank_is_no_checkpoint(tmp_path):
    save(tmp_path, 100)
    pieces = saving.snapshot(Tied(), [], 0, 2, False)
    saving.write_pieces(tmp_path, 200, pieces)
    with pytest.raises(FileNotFoundError, match="written-00001"):
        saving.commit_checkpoint(tmp_path, 200, pieces, {}, {}, 2)
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000100"]


def test_what_could_not_be_read_again_is_not_saved(tmp_path):
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=float(1))
    optimizer.param_groups[0]["extra"] = np.float64(1)  # weights_only refuses numpy scalars
    with pytest.raises(OSError, match=r"saving .* failed: Weights only load failed"):
        save(tmp_path, 100, model=model, optimizers=[optimizer])
    with pytest.raises(ValueError, match="optimizer 0 holds parameters that are not in the model"):
        saving.snapshot(Tied(), [optimizer], 0, 1, False)


# Files that are gone, cut short or have another bit, and newer versions:
# tests/faults/test_records.py.
DAMAGE = ["manifest a list", "older version", "outside", "no index", "a part missing",
          "a file not named", "no tensors"]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named(tmp_path, damage):
    path = save(tmp_path, 100)
    manifest, model = path / MANIFEST, path / MODEL
    content = json.loads(manifest.read_text())
    said = "100"
    if damage == "manifest a list":
        manifest.write_text("[]")
    elif damage == "older version":
        manifest.write_text(json.dumps({**content, "format_version": 1}))
        said = "version 1, this program reads version 2"
    elif damage == "outside":
        model.rename(tmp_path / MODEL)
        content["files"][f"../{MODEL}"] = content["files"].pop(MODEL)
        manifest.write_text(json.dumps(content))
        said = f"'../{MODEL}', which is no file of a checkpoint"
    elif damage == "no index":
        del content["index"]
        manifest.write_text(json.dumps(content))
        said = "the index in manifest.json does not match"
    elif damage in ("a part missing", "a file not named"):
        index = json.loads(content["index"])
        missing = damage == "a part missing"
        index["model"]["scale"][0][4 if missing else 0] = [1] if missing else "state.json"
        content["index"] = json.dumps(index)
        content["index_sha256"] = hashlib.sha256(content["index"].encode()).hexdigest()
        manifest.write_text(json.dumps(content))
        said = "scale do not add up" if missing else "names 'state.json', which the manifest"
    else:
        del content["files"][MODEL]
        manifest.write_text(json.dumps(content))
        said = "names no file with tensors"
    with pytest.raises(loading.CheckpointError, match=said):
        loading.read_checkpoint(path)
    with pytest.raises(loading.CheckpointError, match="all 1 checkpoints are damaged"):
        loading.newest_whole(tmp_path, lambda text: None)


def test_a_pickle_is_not_run(tmp_path):
    canary = tmp_path / "canary"

    class Bomb:
        def __reduce__(self):
            return (open, (str(canary), "w"))

    for file in (loading.STATE, MODEL, "optimizer.safetensors"):
        path = save(tmp_path, 100)
        torch.save(Bomb(), path / file)
        rewrite(path, file)
        with contextlib.suppress(loading.CheckpointError):  # its bytes are taken for numbers
            loading.restore_model(loading.read_checkpoint(path), Tied())
        assert not canary.exists()


def test_another_model_or_optimizer_is_refused_before_anything_changes(tmp_path):
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    loaded = loading.read_checkpoint(save(tmp_path, 1, model=model, optimizers=[optimizer]))
    for other, differing in (
        (nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2, bias=False)), r"1\.bias"),
        (
            nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)),
            r"1\.weight: \(2, 2\) for \(1, 2\), 1\.bias: \(2,\) for \(1,\)",
        ),
    ):
        before = {k: v.clone() for k, v in other.state_dict().items()}
        with pytest.raises(
            loading.CheckpointError, match=f"another model shape; differing: {differing}"
        ):
            loading.restore_model(loaded, other)
        assert all(torch.equal(v, before[k]) for k, v in other.state_dict().items())
        with pytest.raises(loading.CheckpointError, match="another model shape"):
            loading.restore_optimizers(loaded, other, [torch.optim.SGD(other.parameters(), lr=9.0)])
    weights, biases = (
        [p for n, p in model.named_parameters() if n.endswith(end)] for end in ("weight", "bias")
    )
    halves = [torch.optim.SGD(weights, lr=9.0), torch.optim.SGD(biases, lr=9.0)]
    for others in ([torch.optim.SGD(weights, lr=9.0)], halves):
        with pytest.raises(
            loading.CheckpointError, match=r"has other optimizers; differing: 0/0\.bias, 0/1\.bias"
        ):
            loading.restore_optimizers(loaded, model, others)
        assert others[0].param_groups[0]["lr"] == 9.0


def test_groups_find_their_values_by_name_and_dtypes_stay(tmp_path):
    """Another split into groups, other kernels, states of another dtype and shape than the
    parameter's."""
    model = nn.Linear(3, 2).bfloat16()
    groups = [
        {"params": [model.weight], "lr": 0.5, "betas": (0.1, 0.2)},
        {"params": [model.bias], "lr": 0.25},
    ]
    optimizer = torch.optim.AdamW(groups, fused=True)
    moment, rows = torch.randn(2, 3, dtype=torch.float64), torch.randn(2, 1)
    optimizer.state[model.weight] |= {
        "exp_avg": moment,
        "rows": rows,
        "step": torch.tensor(7.0),
        "note": [1, None],
    }
    loaded = loading.read_checkpoint(save(tmp_path, 1, model=model, optimizers=[optimizer]))

    other = nn.Linear(3, 2).double()
    loading.restore_model(loaded, other)
    assert other.weight.dtype == torch.float64  # the model's own, as the checkpoint's values
    assert torch.equal(other.weight, model.weight.double())
    new = torch.optim.AdamW(
        [{"params": [other.bias], "lr": 1.0}, {"params": [other.weight], "lr": 1.0}], foreach=False
    )
    # gone after the restore: the checkpoint has none
    new.state[other.bias]["exp_avg"] = torch.ones(2)
    loading.restore_optimizers(loaded, other, [new])
    assert [g["lr"] for g in new.param_groups] == [0.25, 0.5]
    assert new.param_groups[1]["betas"] == (0.1, 0.2)
    assert [(g["fused"], g["foreach"], len(g["params"])) for g in new.param_groups] == [
        (None, False, 1)
    ] * 2
    state = new.state[other.weight]
    assert list(new.state) == [other.weight]
    assert state.pop("note") == [1, None]
    expected = {"exp_avg": moment, "rows": rows, "step": torch.tensor(7.0)}
    assert state.keys() == expected.keys()
    assert all(state[k].dtype == v.dtype and torch.equal(state[k], v) for k, v in expected.items())


def test_training_goes_on_while_a_snapshot_is_written(tmp_path):
    model, gate, expected, stages = Tied(), threading.Event(), [], []

    def job(step: int, pieces: saving.Pieces) -> None:
        gate.wait(30)
        saving.write_pieces(tmp_path, step, pieces)
        saving.commit_checkpoint(tmp_path, step, pieces, {}, {}, None)

    with ThreadPoolExecutor(1) as writer:
        for step in (1, 2, 3):
            expected.append(model.embed.weight.detach().clone())
            pieces = saving.snapshot(model, [], 0, 1, copy=True)
            stages.append(writer.submit(job, step, pieces))
            with torch.no_grad():
                model.embed.weight.add_(1)
        gate.set()
    assert [stage.result() for stage in stages] == [None] * 3
    found = [load_file(path / MODEL)["embed.weight"] for path in checkpoint_folders(tmp_path)]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_hanging_save_does_not_keep_a_failed_process_alive():
    code = (
        "import time\nfrom concurrent.futures import ThreadPoolExecutor\n"
        "from llmexp.system.child import end_process\n"
        "ThreadPoolExecutor(1).submit(time.sleep, 600)\nend_process(3)"
    )
    env = environment(PYTHONPATH=str(ROOT))
    assert subprocess.run([sys.executable, "-c", code], env=env, timeout=HANG_S).returncode == 3


# Layouts: every one saves, every one reads what every one has saved. All in one group of four
# processes, of which a layout takes the first 1 to 4.

LAYOUTS = {"single": 1, "ddp": 2, "fsdp": 2, "fsdp3": 3, "hsdp": 4, "tp": 2, "fsdp_tp": 4}
# The others have no cut that these two do not have.
ODD = ("fsdp3", "fsdp_tp")


def is_read(saved: str, layout: str) -> bool:
    """One rank reads what every layout has saved. Each of ODD reads both of them; each other layout
    is read by one of ODD and reads what the other one has saved."""
    number, reader = list(LAYOUTS).index(saved), list(LAYOUTS).index(layout)
    if layout == "single" or {saved, layout} <= {*ODD}:
        return True
    if layout in ODD:
        return layout == ODD[number % 2]
    return saved in ODD and saved != ODD[reader % 2]


class Odd(nn.Module):
    """Sizes that no number of ranks divides, one smaller than the ranks, and a tied parameter;
    float64."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 3)
        self.up = nn.Linear(3, 9)
        self.down = nn.Linear(9, 5)
        self.gain = nn.Parameter(torch.empty(2))
        self.one = nn.Parameter(torch.empty(1))
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.empty(3))
        self.double()


def value_of(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """What tensor `name` holds: integers, different at each place, for each name and seed."""
    start = 1000 * seed + 100 * sorted(Odd().state_dict()).index(name)
    return torch.arange(start, start + torch.Size(shape).numel(), dtype=torch.float64).view(shape)


def expected_state(seed: int, steps: int = 2) -> dict[str, dict[str, Tensor]]:
    """The optimizer's tensors in closed form. With betas of 1/2 and the constant gradient v both
    moments are (1 - 2**-steps) times v and v**2: integers below 2**26 over 4, exact in float64
    whatever the kernel."""
    share = 1 - 0.5**steps
    states = {}
    for name, p in Odd().named_parameters():
        v = value_of(name, tuple(p.shape), seed)
        states[name] = {
            "step": torch.tensor(float(steps)),
            "exp_avg": share * v,
            "exp_avg_sq": share * v**2,
        }
    return states


def build(layout: str, meshes: dict, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model in a layout, with values that belong to the seed, and its optimizer."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    model, mesh = Odd(), meshes.get(layout)
    with torch.no_grad():
        for name, t in named_tensors(model).items():
            t.copy_(value_of(name, tuple(t.shape), seed))
    if layout == "ddp":
        model = nn.parallel.DistributedDataParallel(model, process_group=mesh).module
    if layout in ("tp", "fsdp_tp"):
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh["tp"] if layout == "fsdp_tp" else mesh, plan)
    if "sdp" in layout:
        data_mesh = mesh["dp"] if layout == "fsdp_tp" else mesh
        fully_shard(model.up, mesh=data_mesh)
        fully_shard(model, mesh=data_mesh)
    plain = layout in ("single", "ddp")
    optimizer = torch.optim.AdamW(  # the rate is 0: parameters stay the integers that they are
        model.parameters(), lr=0.0, betas=(0.5, 0.5), fused=plain, foreach=None if plain else False
    )
    return model, optimizer


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if is_split(tensor) else tensor).detach()


def check(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """All tensors, gathered by torch, are what the seed says; states are laid out as their
    parameters."""
    tensors = named_tensors(model)
    assert set(tensors) == {*(n for n, _ in Odd().named_parameters()), "table"}
    for name, t in tensors.items():
        assert torch.equal(full(t), value_of(name, tuple(t.shape), seed)), name
    named = {id(t): name for name, t in tensors.items()}
    states, expected = {named[id(p)]: s for p, s in optimizer.state.items()}, expected_state(seed)
    assert states.keys() == expected.keys()
    for name, state in states.items():
        assert state.keys() == expected[name].keys()
        for key, t in state.items():
            assert torch.equal(full(t), expected[name][key]), (name, key)
            assert t.dtype == expected[name][key].dtype
            if key != "step":
                assert getattr(t, "placements", None) == getattr(tensors[name], "placements", None)
                assert t.stride() == tensors[name].stride()


def on_four_ranks(rank: int, folder: str) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.debug import CommDebugMode

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=4,
        timeout=timedelta(seconds=60),
    )
    meshes = {  # made by all four, also by those that a layout leaves out
        "ddp": dist.new_group([0, 1]),
        "fsdp": DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",)),
        "fsdp3": DeviceMesh("cpu", [0, 1, 2], mesh_dim_names=("dp",)),
        "hsdp": DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("replicate", "shard")),
        "tp": DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",)),
        "fsdp_tp": DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp")),
    }
    root = Path(folder)

    def save_all(layout: str, where: str, step: int, seed: int) -> None:
        world, pieces = LAYOUTS[layout], None
        if rank < world:
            model, optimizer = build(layout, meshes, seed)
            for _ in range(2):
                for p in model.parameters():
                    p.grad = p.detach().clone()
                optimizer.step()
            check(model, optimizer, seed)
            with CommDebugMode() as counted:
                pieces = saving.snapshot(model, [optimizer], rank, world, copy=seed % 2 == 0)
            assert counted.get_total_counts() == 0  # nothing is gathered
            saving.write_pieces(root / where, step, pieces)
        dist.barrier()
        if rank == 0:
            saving.commit_checkpoint(root / where, step, pieces, {}, {}, None)
        dist.barrier()

    for number, layout in enumerate(LAYOUTS):
        save_all(layout, layout, 5, number + 1)
    for number, saved in enumerate(LAYOUTS):
        for layout, world in LAYOUTS.items():
            if rank < world and is_read(saved, layout):
                alone: Any = SimpleNamespace(rank=rank, world_size=world, distributed=False)
                loaded = loading.newest_whole(root / saved, print, alone)
                assert loaded is not None
                model, optimizer = build(layout, meshes, 20)
                with CommDebugMode() as counted:
                    loading.restore_model(loaded, model)
                    loading.restore_optimizers(loaded, model, [optimizer])
                assert counted.get_total_counts() == 0
                check(model, optimizer, number + 1)
                for p in model.parameters():  # what was restored is fit for use
                    p.grad = p.detach().clone()
                optimizer.step()

    # Four ranks share out the hashing; damage that one of them finds sends all of them to the
    # checkpoint before.
    joined: Any = SimpleNamespace(rank=rank, world_size=4, distributed=True)
    save_all("hsdp", "shared", 1, 30)
    save_all("hsdp", "shared", 2, 31)
    save_all("hsdp", "shared", 3, 32)
    for damaged, chosen in ((3, 2), (2, 1), (1, None)):
        path = root / "shared" / f"step_{damaged:08d}"
        file = sorted(json.loads((path / MANIFEST).read_text())["files"])[damaged % 2]
        dist.barrier()
        if rank == 0:
            data = bytearray((path / file).read_bytes())
            data[-1] ^= 1
            (path / file).write_bytes(data)
        dist.barrier()
        warnings: list[str] = []
        if chosen is None:
            with pytest.raises(loading.CheckpointError, match="all 3 checkpoints are damaged"):
                loading.newest_whole(root / "shared", warnings.append, joined)
        else:
            loaded = loading.newest_whole(root / "shared", warnings.append, joined)
            assert loaded is not None
            assert loaded.step == chosen
        (said,) = [w for w in warnings if path.name in w]
        assert ("as another rank found" not in said) == (rank == damaged % 2)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads may abort the interpreter's finalisation


@pytest.fixture(scope="module")
def saved_by_all(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The matrix: runs with its own checks on the way and leaves the checkpoints behind."""
    folder = tmp_path_factory.mktemp("layouts")
    for name in ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"):
        importlib.import_module(name)  # once, not by each of the four
    torch.multiprocessing.start_processes(
        on_four_ranks, (str(folder),), nprocs=4, start_method="fork"
    )
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_element_is_written_once_and_no_rank_writes_more_than_its_share(saved_by_all, layout):
    """Read with safetensors alone: where each file says its pieces lie, they are what the closed
    form says."""
    ranks, number = LAYOUTS[layout], list(LAYOUTS).index(layout) + 1
    path = saved_by_all / layout / "step_00000005"
    expected = {
        name: value_of(name, tuple(t.shape), number) for name, t in named_tensors(Odd()).items()
    }
    expected |= {
        f"0/{name}/{k}": v
        for name, state in expected_state(number).items()
        for k, v in state.items()
    }
    times = {name: torch.zeros(t.shape) for name, t in expected.items()}
    largest = dict.fromkeys(expected, 0)
    writers: set[int] = set()
    for file in path.glob("*.safetensors"):
        words = file.stem.split("-")
        assert words[1:] == [] or words[2:] == ["of", f"{ranks:05d}"]
        writers.add(int(words[1]) if words[1:] else 0)
        with safe_open(file, "pt") as opened:
            for name, at in json.loads(opened.metadata()["pieces"]).items():
                piece = opened.get_tensor(name)
                assert (at["shape"], at["dtype"]) == (
                    [*expected[name].shape],
                    str(expected[name].dtype)[6:],
                )
                here = tuple(
                    slice(o, o + n) for o, n in zip(at["offset"], piece.shape, strict=True)
                )
                assert torch.equal(expected[name][here], piece), name
                times[name][here] += 1
                largest[name] = max(largest[name], piece.numel())
    assert all(bool((t == 1).all()) for t in times.values())
    replicas_do_not_write = {"ddp": 1, "hsdp": 2}
    assert writers == set(range(replicas_do_not_write.get(layout, ranks)))
    for name, t in expected.items():
        size = list(t.shape)
        if "tp" in layout and ("up." in name or "down.weight" in name) and size:
            dim = 0 if "up." in name else 1
            size[dim] = -(-size[dim] // 2)
        if "sdp" in layout and name != "table" and size:
            size[0] = -(-size[0] // (3 if layout == "fsdp3" else 2))
        assert largest[name] == torch.Size(size).numel(), name
