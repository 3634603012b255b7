"""Checkpoints: whole or absent, readable under any layout of ranks, pruned without losing the last
good one."""

import contextlib
import errno
import hashlib
import importlib
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
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
from llmexp.checkpoint.slices import named_tensors
from llmexp.checkpoint.stored import DTYPES_BY_NAME
from llmexp.checkpoint.tensor_files import write_tensors
from llmexp.config.values import ConfigError
from llmexp.folders.rundir import CHECKPOINTS
from llmexp.mesh.split import is_split
from llmexp.system.fileio import sha256
from llmexp.train.beginning import parents_checkpoint
from tests.conftest import HANG_S, ROOT, environment
from tests.tools import amend, equal

MODEL = "model.safetensors"


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("cache", torch.ones(2), persistent=False)


def save(
    root: Path,
    step: int,
    model: nn.Module | None = None,
    optimizers: Sequence[torch.optim.Optimizer] = (),
    saved: Sequence[int] = (),
    held: saving.Pieces | None = None,
    keep: int | None = 2,
) -> Path:
    """A whole save of one process, of what is `held` already or of a model."""
    held = held or saving.snapshot(model or Tied(), list(optimizers), 0, 1, False)
    saving.write_pieces(root, step, held)
    facts = {"progress": {"step": step}}, {"tokens_seen": 1}
    return saving.commit_checkpoint(root, step, held, *facts, keep, saved)


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

    def manifest(name: str) -> str:
        return (save(tmp_path / name, 1, model, [optimizer]) / MANIFEST).read_text()

    found = {manifest(str(number)) for number in range(8)}
    assert len(found) == 1
    with torch.no_grad():
        model.weight[1, 2] = torch.nextafter(model.weight[1, 2], torch.tensor(9.0))
    before, after = (json.loads(text)["files"] for text in (found.pop(), manifest("ulp")))
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


@pytest.mark.parametrize("how", ["changed", "changed and set back", "removed", "cut"])
def test_a_file_that_changes_after_its_hash_is_named_before_the_weights_are_used(tmp_path, how):
    """Also where a program sets its time back; pages of a removed one stay readable."""
    hashed = None if how == "cut" else (0, 1)
    loaded = loading.read_checkpoint(save(tmp_path, 1), hash_share=hashed)
    file = loaded.path / MODEL
    before, content = file.stat(), bytearray(file.read_bytes())
    content[-1] ^= 1
    time.sleep(0.05)  # a clock of files may have steps of some milliseconds
    if how == "removed":
        file.unlink()
    else:
        file.write_bytes(content[: -9 if how == "cut" else None])
    if how == "changed and set back":
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    words = {"cut": "it ends", "removed": ".*No such file"}.get(how, "it was changed while it was")
    with pytest.raises(loading.CheckpointError, match=f"{MODEL} cannot be read: {words}"):
        loading.restore_model(loaded, Tied())


def saves(root: Path, *many: int, loaded: int | None = None) -> list[int]:
    """Those of one process, which may have begun from a checkpoint; what is there after them."""
    saved = [] if loaded is None else [loaded]
    for step in many:
        save(root, step, saved=saved)
        saved.append(step)
    return there(root)


def there(root: Path) -> list[int]:
    """The steps of all that lies there, which has to be checkpoints."""
    return sorted(int(path.name.removeprefix("step_")) for path in root.iterdir())


def test_the_newest_are_kept_and_damaged_ones_do_not_count(tmp_path):
    assert saves(tmp_path, 100, 200, 300) == [200, 300]
    (tmp_path / "step_00000300" / loading.STATE).write_bytes(b"x")
    warnings: list[str] = []
    assert loading.newest_whole(tmp_path, warnings.append).step == 200
    assert "step_00000300 is damaged" in warnings[0]
    (tmp_path / "step_00000200" / MANIFEST).unlink()  # killed while it was being pruned
    assert saves(tmp_path, 210, 220, loaded=200) == [210, 220, 300]
    save(tmp_path, 300, saved=[210, 220])  # the damaged one's place
    assert loading.newest_whole(tmp_path, warnings.append).step == 300
    assert there(tmp_path) == [220, 300]
    (tmp_path / "step_00000300" / loading.STATE).write_bytes(b"x")
    assert saves(tmp_path, 400, loaded=220) == [220, 300, 400]  # two that are whole
    assert saves(tmp_path, 500, 600, loaded=400) == [500, 600]


def full(*arguments: Any, **more: Any) -> None:
    raise RuntimeError("unexpected pos 64 vs 0")  # what torch.save says on a full disk


def no_place(source: Path, target: Path, rename: Callable = os.rename) -> None:
    if target.name == "step_00000200" and source.name == ".step_00000200.tmp":
        raise OSError(errno.EIO, "Input/output error")
    rename(source, target)


@pytest.mark.parametrize(
    ("module", "name", "instead", "error"),
    [
        (saving, "write_tensors", full, r"saving .*step_00000200.* failed"),
        (torch, "save", full, r"saving .*step_00000200.* failed"),
        (os, "rename", no_place, "Input/output error"),
        (None, "another rank", None, "written-00001"),
        (None, "a kill", None, ""),
    ],
)
def test_a_save_that_does_not_come_to_its_end_leaves_what_was_there(
    tmp_path, monkeypatch, module, name, instead, error
):
    save(tmp_path, 100)
    path = save(tmp_path, 200)
    before = (path / MANIFEST).read_bytes()
    if module:
        monkeypatch.setattr(module, name, instead)
    held = saving.snapshot(Tied(), [], 0, 1 if name != "another rank" else 2, False)
    if name == "a kill":
        saving.write_pieces(tmp_path, 300, held)
        assert len(list(tmp_path.iterdir())) == 3
    else:
        with pytest.raises(OSError, match=error):
            save(tmp_path, 200, held=held)
    saving.remove_leftovers(tmp_path)
    assert there(tmp_path) == [100, 200]
    assert loading.newest_whole(tmp_path, print).step == 200
    assert (path / MANIFEST).read_bytes() == before


def test_what_could_not_be_read_again_is_not_saved(tmp_path):
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=float(1))
    optimizer.param_groups[0]["extra"] = np.float64(1)  # weights_only refuses numpy scalars
    with pytest.raises(OSError, match=r"saving .* failed: Weights only load failed"):
        save(tmp_path, 100, model, [optimizer])
    with pytest.raises(ValueError, match="optimizer 0 holds parameters that are not in the model"):
        saving.snapshot(Tied(), [optimizer], 0, 1, False)


def moved_out(content: dict) -> dict:
    files = {f"../{name}" if name == MODEL else name: f for name, f in content["files"].items()}
    return content | {"files": files}


def indexed(at: int, value: Any) -> Callable[[dict], dict]:
    """Change a field of where the tensor `scale` lies."""

    def change(content: dict) -> dict:
        index = json.loads(content["index"])
        index["model"]["scale"][0][at] = value
        text = json.dumps(index)
        return content | {"index": text, "index_sha256": hashlib.sha256(text.encode()).hexdigest()}

    return change


# Files that are gone, cut short or have another bit, and other formats:
# tests/faults/test_records.py.
DAMAGE = {
    "100": lambda content: [],
    f"'../{MODEL}', which is not a file of a checkpoint": moved_out,
    "the index in manifest.json does not match": lambda content: without(content, "index"),
    "scale do not add up": indexed(4, [1]),
    "names 'state.json', which the manifest": indexed(0, "state.json"),
    "names no file with tensors": lambda c: c | {"files": without(c["files"], MODEL)},
}


def without(tree: dict, name: str) -> dict:
    return {key: value for key, value in tree.items() if key != name}


@pytest.mark.parametrize("said", DAMAGE)
def test_damage_is_named(tmp_path, said):
    path = save(tmp_path, 100)
    changed = DAMAGE[said](json.loads((path / MANIFEST).read_text()))
    (path / MANIFEST).write_text(json.dumps(changed))
    if "../" in said:
        (path / MODEL).rename(tmp_path / MODEL)
    with pytest.raises(loading.CheckpointError, match=said):
        loading.read_checkpoint(path)
    with pytest.raises(loading.CheckpointError, match="all 1 checkpoints are damaged"):
        loading.newest_whole(tmp_path, lambda text: None)


def test_a_pickle_is_not_run(tmp_path):
    canary = tmp_path / "canary"

    class Bomb:
        def __reduce__(self):
            return (open, (str(canary), "w"))

    for name in (loading.STATE, MODEL, "optimizer.safetensors"):
        path = save(tmp_path, 100)
        torch.save(Bomb(), path / name)
        amend(path / MANIFEST, files={name: hashes.fingerprint(path / name)})
        with contextlib.suppress(loading.CheckpointError):  # its bytes are taken for numbers
            loading.restore_model(loading.read_checkpoint(path), Tied())
        assert not canary.exists()


def test_another_model_or_optimizer_is_refused_before_anything_changes(tmp_path):
    def sgd(*parameters: Tensor, lr: float = 9.0) -> torch.optim.SGD:
        return torch.optim.SGD(parameters, lr=lr, momentum=0.5)

    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    optimizer = sgd(*model.parameters(), lr=0.5)
    average = {"ema": {"0.bias": torch.ones(2)}}
    held = saving.snapshot(model, [optimizer], 0, 1, False, average)
    loaded = loading.read_checkpoint(save(tmp_path, 1, held=held))
    for last, differing in (
        (nn.Linear(2, 2, bias=False), r"1\.bias"),
        (nn.Linear(2, 1), r"1\.weight: \(2, 2\) for \(1, 2\), 1\.bias: \(2,\) for \(1,\)"),
    ):
        other = nn.Sequential(nn.Linear(3, 2), last)
        before = {k: v.clone() for k, v in other.state_dict().items()}
        with pytest.raises(loading.CheckpointError, match=f"another model shape.*: {differing}"):
            loading.restore_model(loaded, other)
        with pytest.raises(loading.CheckpointError, match="another model shape"):
            loading.restore_optimizers(loaded, other, [sgd(*other.parameters())])
        assert equal(dict(other.state_dict()), before)
    weights, biases = ([layer.weight for layer in model], [layer.bias for layer in model])
    for others in ([sgd(*weights)], [sgd(*weights), sgd(*biases)]):
        words = r"has other optimizers; differing: 0/0\.bias, 0/1\.bias"
        with pytest.raises(loading.CheckpointError, match=words):
            loading.restore_optimizers(loaded, model, others)
        assert others[0].param_groups[0]["lr"] == 9.0
    own = {name: torch.zeros_like(t) for name, t in named_tensors(model).items()}
    words = r"ema\.safetensors does not hold all tensors; missing: 0\.weight, 1\.bias"
    with pytest.raises(loading.CheckpointError, match=words):
        loading.fill_all(loaded, own, loaded.tensors["ema"])
    assert not own["0.bias"].any()


def test_groups_find_their_values_by_name_and_dtypes_stay(tmp_path):
    """Another split into groups, other kernels, states of another dtype and shape than the
    parameter's."""
    model = nn.Linear(3, 2).bfloat16()
    groups = [{"params": [model.weight], "lr": 0.5, "betas": (0.1, 0.2)}]
    groups += [{"params": [model.bias], "lr": 0.25}]
    optimizer = torch.optim.AdamW(groups, fused=True)
    moment, rows = torch.randn(2, 3, dtype=torch.float64), torch.randn(2, 1)
    expected = {"exp_avg": moment, "rows": rows, "step": torch.tensor(7.0)}
    optimizer.state[model.weight] |= {**expected, "note": [1, None]}
    loaded = loading.read_checkpoint(save(tmp_path, 1, model, [optimizer]))
    other = nn.Linear(3, 2).double()
    loading.restore_model(loaded, other)
    assert other.weight.dtype == torch.float64  # the model's own, as the checkpoint's values
    assert torch.equal(other.weight, model.weight.double())
    groups = [{"params": [p], "lr": 1.0} for p in (other.bias, other.weight)]
    new = torch.optim.AdamW(groups, foreach=False)
    # gone after the restore: the checkpoint has none
    new.state[other.bias]["exp_avg"] = torch.ones(2)
    loading.restore_optimizers(loaded, other, [new])
    assert [g["lr"] for g in new.param_groups] == [0.25, 0.5]
    assert new.param_groups[1]["betas"] == (0.1, 0.2)
    found = [(g["fused"], g["foreach"], len(g["params"])) for g in new.param_groups]
    assert found == [(None, False, 1)] * 2
    assert list(new.state) == [other.weight]
    assert equal(dict(new.state[other.weight]), {**expected, "note": [1, None]})


def test_training_goes_on_while_a_snapshot_is_written(tmp_path):
    """A tied parameter is saved once, and comes back as one."""
    model, gate, expected = Tied(), threading.Event(), []

    def job(step: int, pieces: saving.Pieces) -> None:
        gate.wait(30)
        save(tmp_path, step, held=pieces, keep=None)

    with ThreadPoolExecutor(1) as writer:
        for step in (1, 2, 3):
            expected.append({name: t.detach().clone() for name, t in named_tensors(model).items()})
            pieces = saving.snapshot(model, [], 0, 1, copy=True)
            writer.submit(job, step, pieces)
            with torch.no_grad():
                model.embed.weight.add_(1)
        gate.set()
    found = [load_file(path / MODEL) for path in checkpoint_folders(tmp_path)]
    assert sorted(found[0]) == ["embed.weight", "scale"]
    assert equal(found, expected)
    loaded = loading.newest_whole(tmp_path, print)
    loading.restore_model(loaded, model)
    assert torch.equal(model.head.weight, expected[2]["embed.weight"])
    assert model.head.weight is model.embed.weight
    assert loaded.state["progress"] == {"step": 3}


def test_a_hanging_save_does_not_keep_a_failed_process_alive():
    code = (
        "import time\nfrom concurrent.futures import ThreadPoolExecutor\n"
        "from llmexp.system.child import end_process\n"
        "ThreadPoolExecutor(1).submit(time.sleep, 600)\nend_process(3)"
    )
    env = environment(PYTHONPATH=str(ROOT))
    assert subprocess.run([sys.executable, "-c", code], env=env, timeout=HANG_S).returncode == 3


# Layouts: every one saves, and reads what every one has saved. All in one group of four processes,
# of which a layout takes the first 1 to 4.

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
        self.up, self.down = nn.Linear(3, 9), nn.Linear(9, 5)
        self.gain, self.one = nn.Parameter(torch.empty(2)), nn.Parameter(torch.empty(1))
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.empty(3))
        self.double()


def value_of(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """What tensor `name` holds: integers, different at each place, for each name and seed."""
    start = 1000 * seed + 100 * sorted(Odd().state_dict()).index(name)
    return torch.arange(start, start + torch.Size(shape).numel(), dtype=torch.float64).view(shape)


def expected(seed: int, steps: int = 2) -> dict[str, dict[str, Tensor]]:
    """Parameters and buffers ("") and the optimizer's tensors in closed form. With betas of 1/2 and
    the constant gradient v both moments are (1 - 2**-steps) times v and v**2: integers below 2**26
    over 4, exact in float64 whatever the kernel."""
    share, found = 1 - 0.5**steps, {}
    for name, t in named_tensors(Odd()).items():
        v = found[name] = {"": value_of(name, tuple(t.shape), seed)}
        if name != "table":
            v["step"] = torch.tensor(float(steps))
            v |= {"exp_avg": share * v[""], "exp_avg_sq": share * v[""] ** 2}
    return found


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
    if "tp" in layout:
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


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for p in model.parameters():
        p.grad = p.detach().clone()
    optimizer.step()


def check(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """All tensors, gathered by torch, are what the seed says; states are laid out as their
    parameters."""
    tensors, wanted = named_tensors(model), expected(seed)
    assert tensors.keys() == wanted.keys()
    assert len(optimizer.state) == len(wanted) - 1
    for name, t in tensors.items():
        held = {"": t.detach()} | (optimizer.state[t] if name != "table" else {})
        assert held.keys() == wanted[name].keys()
        for key, found in held.items():
            whole = found.full_tensor() if is_split(found) else found
            assert torch.equal(whole, wanted[name][key]), (name, key)
            assert whole.dtype == wanted[name][key].dtype
            if key != "step":
                assert getattr(found, "placements", None) == getattr(t, "placements", None)
                assert found.stride() == t.stride()


class Four:
    """One of four ranks, with the meshes of all layouts."""

    def __init__(self, rank: int, folder: str) -> None:
        import torch.distributed as dist
        from torch.distributed.device_mesh import DeviceMesh

        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=4,
            timeout=timedelta(seconds=60),
        )  # fmt: skip
        self.rank, self.root, self.barrier = rank, Path(folder), dist.barrier

        self.opened, self.hashed, original = Counter(), Counter(), hashes.OpenFiles.fingerprint

        def note(event: str, arguments: tuple) -> None:
            if event == "open":
                self.opened[Path(str(arguments[0])).name] += 1

        def fingerprint(files: hashes.OpenFiles, file: Path) -> dict[str, Any]:
            found = original(files, file)
            self.hashed[file.name] += found["size"]
            return found

        sys.addaudithook(note)
        hashes.OpenFiles.fingerprint = fingerprint

        def mesh(ranks: list, *names: str) -> DeviceMesh:
            return DeviceMesh("cpu", ranks, mesh_dim_names=names)

        self.meshes = {  # made by all four, also by those that a layout leaves out
            "ddp": dist.new_group([0, 1]),
            "fsdp": mesh([0, 1], "dp"),
            "fsdp3": mesh([0, 1, 2], "dp"),
            "hsdp": mesh([[0, 1], [2, 3]], "replicate", "shard"),
            "tp": mesh([0, 1], "tp"),
            "fsdp_tp": mesh([[0, 1], [2, 3]], "dp", "tp"),
        }

    def save(self, layout: str, where: str, step: int, seed: int) -> None:
        from torch.distributed.tensor.debug import CommDebugMode

        world, pieces = LAYOUTS[layout], None
        if self.rank < world:
            model, optimizer = build(layout, self.meshes, seed)
            take_step(model, optimizer)
            take_step(model, optimizer)
            check(model, optimizer, seed)
            with CommDebugMode() as counted:
                pieces = saving.snapshot(model, [optimizer], self.rank, world, copy=seed % 2 == 0)
            assert counted.get_total_counts() == 0  # nothing is gathered
            saving.write_pieces(self.root / where, step, pieces)
        self.barrier()
        if self.rank == 0:
            saving.commit_checkpoint(self.root / where, step, pieces, {}, {}, None)
        self.barrier()

    def read(self, saved: str, layout: str) -> None:
        from torch.distributed.tensor.debug import CommDebugMode

        world = LAYOUTS[layout]
        if self.rank >= world:
            return
        alone: Any = SimpleNamespace(rank=self.rank, world_size=world, distributed=False)
        self.opened.clear()
        self.hashed.clear()
        loaded = loading.newest_whole(self.root / saved, print, alone)
        assert loaded is not None
        model, optimizer = build(layout, self.meshes, 20)
        with CommDebugMode() as counted:
            loading.restore_model(loaded, model)
            loading.restore_optimizers(loaded, model, [optimizer])
        assert counted.get_total_counts() == 0
        if saved == layout:
            notes = json.dumps([self.opened, self.hashed])
            (self.root / f"{saved}-{self.rank}.json").write_text(notes)
        check(model, optimizer, list(LAYOUTS).index(saved) + 1)
        take_step(model, optimizer)  # what was restored is fit for use

    def damage_and_choose(self, damaged: int, chosen: int | None) -> None:
        """Four ranks share out the hashing; damage that one of them finds sends all of them to the
        checkpoint before."""
        path = self.root / "shared" / f"step_{damaged:08d}"
        file = sorted(json.loads((path / MANIFEST).read_text())["files"])[damaged % 2]
        self.barrier()
        if self.rank == 0:
            data = bytearray((path / file).read_bytes())
            data[-1] ^= 1
            (path / file).write_bytes(data)
        self.barrier()
        joined: Any = SimpleNamespace(rank=self.rank, world_size=4, distributed=True)
        warnings: list[str] = []
        if chosen is None:
            with pytest.raises(loading.CheckpointError, match="all 3 checkpoints are damaged"):
                loading.newest_whole(path.parent, warnings.append, joined)
        else:
            loaded = loading.newest_whole(path.parent, warnings.append, joined)
            assert loaded is not None
            assert loaded.step == chosen
        (said,) = [w for w in warnings if path.name in w]
        assert ("as another rank found" not in said) == (self.rank == damaged % 2)


def on_four_ranks(rank: int, folder: str) -> None:
    four = Four(rank, folder)
    for number, layout in enumerate(LAYOUTS, 1):
        four.save(layout, layout, 5, number)
    for saved, layout in itertools.product(LAYOUTS, LAYOUTS):
        if is_read(saved, layout):
            four.read(saved, layout)
    for step in (1, 2, 3):
        four.save("hsdp", "shared", step, 29 + step)
    for damaged, chosen in ((3, 2), (2, 1), (1, None)):
        four.damage_and_choose(damaged, chosen)
    four.barrier()
    torch.distributed.destroy_process_group()
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
    wanted = {
        f"0/{name}/{key}" if key else name: value
        for name, values in expected(number).items()
        for key, value in values.items()
    }
    times = {name: torch.zeros(t.shape) for name, t in wanted.items()}
    largest = dict.fromkeys(wanted, 0)
    writers: set[int] = set()
    for file in (saved_by_all / layout / "step_00000005").glob("*.safetensors"):
        words = file.stem.split("-")
        assert words[1:] == [] or words[2:] == ["of", f"{ranks:05d}"]
        writers.add(int(words[1]) if words[1:] else 0)
        with safe_open(file, "pt") as opened:
            for name, at in json.loads(opened.metadata()["pieces"]).items():
                piece, whole = opened.get_tensor(name), wanted[name]
                assert (at["shape"], at["dtype"]) == ([*whole.shape], str(whole.dtype)[6:])
                sides = zip(at["offset"], piece.shape, strict=True)
                here = tuple(slice(o, o + n) for o, n in sides)
                assert torch.equal(whole[here], piece), name
                times[name][here] += 1
                largest[name] = max(largest[name], piece.numel())
    assert all(bool((t == 1).all()) for t in times.values())
    replicas_do_not_write = {"ddp": 1, "hsdp": 2}
    assert writers == set(range(replicas_do_not_write.get(layout, ranks)))
    for name, t in wanted.items():
        size = list(t.shape)
        if "tp" in layout and ("up." in name or "down.weight" in name) and size:
            dim = 0 if "up." in name else 1
            size[dim] = -(-size[dim] // 2)
        if "sdp" in layout and name != "table" and size:
            size[0] = -(-size[0] // (3 if layout == "fsdp3" else 2))
        assert largest[name] == torch.Size(size).numel(), name


def test_a_resume_opens_its_own_files_alone_and_hashes_each_byte_once(saved_by_all):
    """Manifest, state, and the two files with its own slices, which it also hashes; and the first
    rank's for a buffer."""
    files = json.loads((saved_by_all / "fsdp3/step_00000005" / MANIFEST).read_text())["files"]
    opened, hashed = Counter(), Counter()
    for rank in range(3):
        one, two = json.loads((saved_by_all / f"fsdp3-{rank}.json").read_text())
        opened.update({name: n for name, n in one.items() if name in (MANIFEST, *files)})
        hashed.update(two)
    by_all = [MANIFEST, loading.STATE, min(files)]
    assert opened == {name: 3 if name in by_all else 1 for name in (MANIFEST, *files)}
    assert hashed == {name: one["size"] for name, one in files.items()}


@pytest.mark.slow
def test_four_ranks_hold_no_more_than_their_shares():
    """Of 23 M parameters, by the benchmark that docs/large-models.md has figures of."""
    sizes = ["--layers", "4", "--width", "512", "--vocabulary", "20000"]
    command = [sys.executable, "benchmarks/held.py", *sizes]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
