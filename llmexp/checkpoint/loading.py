"""Read checkpoints: folders of hashed files, under any layout of ranks, without unpickling.

step_00000100/model.safetensors      parameters and persistent buffers under clean names
              optimizer.safetensors  optimizer tensors as <optimizer index>/<parameter name>/<key>
              ema.safetensors        and others: tensors of features, named as in model.safetensors
              state.pt               plain containers (torch.load(weights_only=True)), other buffers
              manifest.json          format, step, geometry (for people), size and sha256 of
                                     each file, the index of all pieces; written last

Where tensors are sharded, every rank writes the pieces that it holds
(model-00002-of-00004.safetensors). A piece is a box of a full tensor; the index tells the full
shape, the box's offset and its place in the file, so a reader opens only files that hold something
of its own boxes, whatever the layouts of saving and loading. The header of a file tells the same.
saving.py writes them.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from llmexp.checkpoint.folders import MANIFEST, checkpoint_folders, step_of
from llmexp.checkpoint.hashes import (
    CheckpointError,
    OpenFiles,
    open_undamaged,
)
from llmexp.checkpoint.slices import (
    Box,
    Piece,
    StoredPiece,
    named_tensors,
    names_by_id,
    piece_of,
    room_for,
)
from llmexp.checkpoint.stored import copy_overlap, read_index_entry
from llmexp.config.values import Plain
from llmexp.mesh.groups import Mesh, any_rank
from llmexp.optim.eval_weights import finish, swaps_weights
from llmexp.optim.states import traits_of
from llmexp.system.fileio import check_format, file_state, sha256, text_sha256

CHECKPOINT_FORMAT = 1
STATE = "state.pt"
_NEEDED = ("model", "optimizer")  # kinds of files with tensors; others are of features
FILE_NAME = re.compile(r"([a-z0-9_]+)(-\d+-of-\d+)?\.safetensors|state\.pt")
# The keys of a parameter group about kernels: they belong to the layout, not to the run.
NOT_RESTORED = ("params", "foreach", "fused", "capturable", "differentiable")


StoredPieces = dict[str, list[StoredPiece]]  # the pieces of tensors, by their names


@dataclass(frozen=True)
class Loaded:
    """Hold a checkpoint that was found whole, with the pieces of each tensor by its name."""

    path: Path
    step: int
    manifest: Plain
    state: Plain
    tensors: dict[str, StoredPieces]  # by kind: model, optimizer, of features
    seen: dict[Path, tuple[int, ...]]  # the files as they were before they were hashed
    open_files: OpenFiles

    @property
    def model(self) -> StoredPieces:
        return self.tensors["model"]

    @property
    def optimizer(self) -> StoredPieces:
        return self.tensors.get("optimizer", {})

    @property
    def digest(self) -> str:
        """Return the checkpoint's identity: the sha256 of its manifest."""
        return sha256(self.path / MANIFEST)

    @property
    def kept(self) -> list[int]:
        """Return the steps of the checkpoints that its run has kept with it, its own the last."""
        steps = self.manifest.get("kept") or []  # a damaged one may lack them
        return [*(step for step in steps if step < self.step), self.step]


def newest_whole(
    root: Path,
    warn: Callable[[str], None],
    joined: Mesh | None = None,
    kinds: tuple[str, ...] | None = None,
    step: int | None = None,
) -> Loaded | None:
    """Return the newest checkpoint whose manifest and hashes hold, or that of the `step` alone.

    Damaged ones are skipped with a warning. Ranks that are `joined` call together, share out the
    hashing, and get the same one; those that know a damage name it. `kinds`: see `read_checkpoint`.
    None when there is no checkpoint at all. Raises CheckpointError when there are some and all are
    damaged, and ConfigError for one of another format, on all ranks.
    """
    found = [path for path in checkpoint_folders(root) if step in (None, step_of(path))]
    share = (0, 1) if joined is None else (joined.rank, joined.world_size)
    for path in reversed(found):
        loaded, wrong = None, "damaged, as another rank found, and not used"
        try:
            loaded = read_checkpoint(path, kinds, share)
        except CheckpointError as error:
            wrong = f"damaged and not used: {error}"
        bad = loaded is None
        if not (bad if joined is None else any_rank(joined, bad)[0]):
            return loaded
        warn(f"checkpoint {path.name} is {wrong}")
    if found:
        raise CheckpointError(
            "damaged_file",
            f"{root}: all {len(found)} checkpoints are damaged; not starting from scratch over "
            "them: put a whole copy of one in its place, or move this folder away to start again",
        )
    return None


def read_checkpoint(
    path: Path,
    kinds: tuple[str, ...] | None = None,
    hash_share: tuple[int, int] | None = (0, 1),
) -> Loaded:
    """Check one checkpoint and read all of it but the tensors, on the CPU.

    Of the files with tensors those of `kinds` alone are opened, or all. `hash_share`: (rank,
    world), this rank hashes every world-th file; None: no file is hashed. Sizes are checked all the
    same, and nothing is unpickled. Raises CheckpointError naming the damage, ConfigError for
    another format.
    """
    manifest = _read_manifest(path)
    files = sorted(manifest["files"].items())
    seen: dict[Path, tuple[int, ...]] = {}
    hashed: dict[Path, Plain] = {}
    if kinds is None:
        there = {re.split(r"[-.]", name)[0] for name, _ in files if name != STATE}
        kinds = (*_NEEDED, *sorted(there - {*_NEEDED}))
    for number, (name, expected) in enumerate(files):
        if not FILE_NAME.fullmatch(name):
            text = f"names {name[:100]!r}, which is not a file of a checkpoint"
            raise CheckpointError("damaged_file", f"{path / MANIFEST} {text}")
        file = path / name
        try:
            seen[file] = file_state(file)
        except OSError:
            raise CheckpointError("damaged_file", f"{file} is missing") from None
        if not name.startswith((*kinds, STATE)):
            continue
        if not isinstance(expected, dict) or seen[file][1] != expected.get("size"):
            raise CheckpointError(
                "damaged_file", f"{file} does not match the size and sha256 of its manifest"
            )
        if hash_share is not None and number % hash_share[1] == hash_share[0]:
            hashed[file] = expected
    open_files = open_undamaged(hashed)
    if STATE not in manifest["files"]:
        raise CheckpointError("damaged_file", f"{path / STATE} is missing in {MANIFEST}")
    try:
        with open_files.whole(path / STATE) as file:
            state = torch.load(file, map_location="cpu", weights_only=True)
        if not isinstance(state, dict):
            raise ValueError(f"{STATE} holds no section of values")
        pieces = _pieces(path, manifest, kinds)
    except Exception as error:
        raise CheckpointError("damaged_file", f"{path} cannot be read: {error}") from None
    return Loaded(path, manifest["step"], manifest, state, pieces, seen, open_files)


def _read_manifest(path: Path) -> Plain:
    """Return the manifest, with a step and files in it. Raises CheckpointError and ConfigError."""
    file = path / MANIFEST
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        there = int(manifest["format"])  # before the keys, which may be others
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            "damaged_file", f"{file} is missing or unreadable ({error})"
        ) from None
    check_format(file, there, CHECKPOINT_FORMAT)
    if not (isinstance(manifest.get("step"), int) and isinstance(manifest.get("files"), dict)):
        raise CheckpointError("damaged_file", f"{file} is missing or unreadable (no step or files)")
    return dict(manifest)


def _pieces(path: Path, manifest: Plain, kinds: tuple[str, ...]) -> dict[str, StoredPieces]:
    """Return the pieces of each tensor of these kinds, from the index in the manifest.

    Raises ValueError where the pieces do not make up the tensors."""
    files, index = manifest["files"], manifest.get("index")
    if not all(any(n.startswith(k) for n in files) for k in kinds if k in _NEEDED):
        raise ValueError("the manifest names no file with tensors")
    if text_sha256(str(index)) != manifest.get("index_sha256"):
        raise ValueError(f"the index in {MANIFEST} does not match its sha256")
    found, entries = dict[str, StoredPieces](), json.loads(str(index))
    for kind in kinds:
        found[kind] = {}
        for name, of_ranks in entries.get(kind, {}).items():
            parts = [read_index_entry(path, entry, files) for entry in of_ranks]
            if sum(math.prod(p.size) for p in parts) != math.prod(full := parts[0].shape):
                raise ValueError(f"the pieces of {name} do not add up to a tensor of shape {full}")
            found[kind][name] = parts
    return found


def restore_model(loaded: Loaded, model: nn.Module, computed: bool = True) -> None:
    """Copy the checkpoint's tensors into the model; dtypes and devices stay.

    Without `computed` buffers that no state dict holds stay as the model has made them. Raises
    CheckpointError listing the names or shapes that differ, before anything is changed.
    """
    own = named_tensors(model)
    refuse_other_model(loaded, own)
    fill_all(loaded, own, loaded.model)
    try:
        buffers = loaded.state["buffers"]
        wanted = buffers if computed else buffers.keys() & model.state_dict().keys()
        if wanted:
            _restore_buffers({name: buffers[name] for name in wanted}, model)
    except (AttributeError, KeyError) as error:
        raise CheckpointError(
            "damaged_file", f"{loaded.path / STATE}: other buffers: {error}"
        ) from None


@torch.no_grad()
def _restore_buffers(buffers: Mapping[str, Tensor], model: nn.Module) -> None:
    """Give buffers their values in place, where they fit, as a model may know one by other names.

    Names that had one tensor when they were saved have one again.
    """
    device, made = next(model.parameters()).device, dict[int, Tensor]()
    for name, value in buffers.items():
        module, _, last = name.rpartition(".")
        owner = model.get_submodule(module)
        if last not in owner._buffers:
            owner.register_buffer(last, None, persistent=False)
        there: Any = owner._buffers[last]
        if id(value) not in made:
            free = there is not None and all(there is not other for other in made.values())
            if free and (there.shape, there.dtype) == (value.shape, value.dtype):
                made[id(value)] = there.copy_(value)
            else:
                made[id(value)] = value.to(device)
        owner._buffers[last] = made[id(value)]


def fill_all(loaded: Loaded, tensors: Mapping[str, Tensor], pieces: StoredPieces) -> None:
    """Fill what this rank holds of tensors from the pieces of the same names.

    Files of which it holds nothing are not opened. Raises CheckpointError, also where the files
    lack a name."""
    if missing := sorted(tensors.keys() - pieces.keys()):
        like = next(iter(pieces.values()))[0].file
        raise CheckpointError(
            "damaged_file", f"{like} does not hold all tensors; missing: {', '.join(missing[:8])}"
        )
    _fill(loaded, [(piece_of(tensor), pieces[name]) for name, tensor in tensors.items()])


def _fill(loaded: Loaded, wanted: Iterable[tuple[Piece, list[StoredPiece]]]) -> None:
    """Fill boxes of tensors from the stored pieces that overlap them, file by file.

    Raises CheckpointError."""
    by_file: dict[Path, list[tuple[Piece, StoredPiece]]] = {}
    for own, pieces in wanted:
        for piece in pieces:
            by_file.setdefault(piece.file, []).append((own, piece))
    for file, pairs in by_file.items():
        try:
            read = functools.partial(loaded.open_files.read, file)
            used = [copy_overlap(own, piece, read) for own, piece in pairs]
            if any(used) and file_state(file) != loaded.seen[file]:
                raise ValueError("it was changed while it was read; resume again")
        except Exception as error:
            raise CheckpointError("damaged_file", f"{file} cannot be read: {error}") from None
        loaded.open_files.close(file)


def read_tensor(loaded: Loaded, name: str, box: Box | None = None) -> Tensor:
    """Return a box of a parameter, or all of it, in the dtype it was saved in.

    Raises CheckpointError."""
    pieces = loaded.model[name]
    box = box or [(0, size) for size in pieces[0].shape]
    found = torch.empty([b - a for a, b in box], dtype=pieces[0].dtype)
    _fill(loaded, [(Piece(found, pieces[0].shape, tuple(a for a, _ in box)), pieces)])
    return found


def restore_optimizers(
    loaded: Loaded, model: nn.Module, optimizers: list[Optimizer], values: bool = True
) -> None:
    """Put the checkpoint's states and the `values` of the parameter groups into the optimizers.

    A group takes its values (rate, betas, ...) from the group that its first parameter was saved
    in, as the split into groups may have been another one. torch's load_state_dict is not used
    because it wants whole tensors and casts them to the parameters' dtype. Raises CheckpointError
    listing the parameters that differ, before anything is changed.
    """
    refuse_other_model(loaded, named_tensors(model))
    names = names_by_id(model, optimizers)
    described = loaded.state["optimizers"]
    own = {
        f"{number}/{names[id(p)]}": (p, group)
        for number, optimizer in enumerate(optimizers)
        for group in optimizer.param_groups
        for p in group["params"]
    }
    saved = {
        f"{number}/{name}": group
        for number, optimizer in enumerate(described)
        for group in optimizer["groups"]
        for name in group["params"]
    }
    if differing := sorted(own.keys() ^ saved.keys()):
        raise CheckpointError(
            "wrong_weights",
            f"{loaded.path} has other optimizers; differing: {', '.join(differing[:8])}",
        )

    for number, (optimizer, plain) in enumerate(zip(optimizers, described, strict=True)):
        traits = traits_of(optimizer)
        counters = traits.counters if traits else ()  # no values that somebody has set
        for group in optimizer.param_groups:
            there = saved[f"{number}/{names[id(group['params'][0])]}"] if group["params"] else {}
            for key, value in there.items():
                if (values or key in counters) and key not in NOT_RESTORED:
                    group[key] = value
        optimizer.state.clear()
        for name, states in plain["state"].items():
            optimizer.state[own[f"{number}/{name}"][0]] = dict(states)
    wanted = []
    for full_name, pieces in loaded.optimizer.items():
        name, _, key = full_name.rpartition("/")
        parameter, group = own[name]
        state = room_for(parameter.detach(), key, pieces[0], group)
        wanted.append((piece_of(state), pieces))
        optimizers[int(name.partition("/")[0])].state[parameter][key] = state
    _fill(loaded, wanted)
    for optimizer, plain in zip(optimizers, described, strict=True):
        # states that were taken apart, and a second set of weights
        if any(plain["state"].values()) or swaps_weights(optimizer):
            finish(optimizer)


def refuse_other_model(loaded: Loaded, own: dict[str, Tensor]) -> None:
    """Raise CheckpointError where the model has other tensors than the checkpoint."""
    differing = sorted(own.keys() ^ loaded.model.keys()) or [
        f"{name}: {loaded.model[name][0].shape} for {tuple(t.shape)}"
        for name, t in own.items()
        if loaded.model[name][0].shape != tuple(t.shape)
    ]
    if differing:
        raise CheckpointError(
            "wrong_weights",
            f"the checkpoint has another model shape; differing: {', '.join(differing[:8])}",
        )
