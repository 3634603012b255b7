"""Read the weights that a model begins with: of a Hugging Face folder, or of a checkpoint of ours.

They are read tensor by tensor, so that no second copy of the model is held.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from llmexp import mesh
from llmexp.checkpoint import loading
from llmexp.checkpoint.folders import MANIFEST, checkpoint_folder, is_step, step_of
from llmexp.checkpoint.loading import Loaded, read_tensor
from llmexp.checkpoint.slices import Box, named_tensors, piece_of
from llmexp.config.values import ConfigError, typed
from llmexp.folders import rundir
from llmexp.folders.naming import WEIGHTS, named_checkpoint
from llmexp.hf.families import USUAL, NameRule, from_config
from llmexp.hf.multipliers import multipliers
from llmexp.hf.sizes import FREE, deciding_knobs
from llmexp.metrics.keys import OTHER_WEIGHTS
from llmexp.models.common import all_finite
from llmexp.models.hf import weight_files
from llmexp.system.fileio import read_object
from llmexp.system.redact import warn
from llmexp.system.text import first_of

FLOATS = {"F64", "F32", "BF16", "F16"}
STARTS_AT_0 = ".balance_bias"  # a tensor that files may lack
GROWING = ("vocab_size", "max_position_embeddings")
# An option of each class of ours; the sizes of another one come from the folder.
OPTIONS = {"llmexp.models.gpt2.GPT2": "gpt2_small", "llmexp.models.llama.Llama": "llama_100m"}


@dataclass(frozen=True)
class WeightSource:
    """Weights in files, and the knobs of our model that computes the same.

    `folder`: of Hugging Face, or of a run. `rules`: how its tensors make ours; `shapes` and `read`
    (a box of one; None: all of it): by their names. `factor`: on each of our parameters, for the
    standard parametrization.
    """

    name: str
    folder: Path
    target: str
    knobs: Mapping[str, Any]
    rules: list[NameRule]
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str, Box | None], Tensor]
    factor: Callable[[str], float] = lambda name: 1.0


def open_source(given: Any, share: tuple[int, int] | None = (0, 1)) -> WeightSource:
    """Return the weights of a Hugging Face folder, or of RUN[@STEP].

    `share`: (rank, ranks) that hash the files of a checkpoint together; None: nobody does. Raises
    ConfigError, which the caller begins with the name that was given, as here all do.
    """
    if not isinstance(given, str):
        raise ConfigError("wrong_type", "is not a folder; for example model.init_from=gpt2-folder")
    folder = Path(given).expanduser()
    if folder.is_file():
        raise ConfigError(
            "unknown_file", f"is a file; name the folder that holds it: {folder.parent}"
        )
    if (folder / MANIFEST).is_file() and is_step(folder):
        name = f"{folder.parent.parent}@{step_of(folder)}"
        raise ConfigError("not_a_run", f"is a checkpoint; name it {name}")
    if folder.is_dir() and not rundir.is_run(folder):
        if not (folder / "config.json").is_file():
            raise ConfigError(
                "not_a_run",
                "is neither a run folder (no config.yaml) nor a Hugging Face folder (no "
                "config.json)",
            )
        return of_folder(folder)
    if not folder.exists() and "@" not in given:
        raise ConfigError(
            "unknown_file",
            "there is no such folder; a model of the hub is fetched by: hf download NAME "
            "--local-dir FOLDER",
        )
    path, step = named_checkpoint(str(folder))
    if step is None:
        if (step := rundir.newest_step(path)) is None:
            raise ConfigError("no_checkpoint", "has no checkpoint yet")
        if rundir.is_held(path):  # its newest checkpoint may be another one for each rank
            raise ConfigError("busy", f"is being trained; name a step, for example {given}@{step}")
    root = path / rundir.CHECKPOINTS
    loaded = loading.read_checkpoint(checkpoint_folder(root, step), ("model",), share)
    return of_checkpoint(loaded, rundir.built_config(path).model)


def open_checkpoint(
    path: Path, step: int | None, weights: str, joined: mesh.Mesh | None = None
) -> Loaded:
    """Return the weights of a run's checkpoint, as its `model`.

    `step` None: the newest whole one; a line names damaged ones. `weights`: one of naming.WEIGHTS.
    `joined`: ranks that share out the hashing. Raises CheckpointError and ConfigError.
    """
    root, kinds = path / rundir.CHECKPOINTS, ("model", weights)
    if weights not in WEIGHTS:
        raise ConfigError(
            "unknown_option", f"weights={weights}: must be one of {', '.join(WEIGHTS)}"
        )
    found: Loaded | None
    if joined is None and step is not None:
        found = loading.read_checkpoint(checkpoint_folder(root, step), kinds=kinds)
    else:
        found = loading.newest_whole(root, warn, joined, kinds, step)
    if found is None:
        raise ConfigError("no_checkpoint", f"{path}: has no checkpoint yet")
    if weights == "model":
        return found
    if not (other := found.tensors.get(weights)):
        asks = OTHER_WEIGHTS[weights][1]
        why = f"since the run has no {asks.partition('=')[0]}"
        way = f"leave {weights} out, or train with {asks}"
        raise ConfigError("no_checkpoint", f"{found.path}: holds no {weights}, {why}; {way}")
    return dataclasses.replace(found, tensors=found.tensors | {"model": found.model | other})


def of_checkpoint(loaded: Loaded, section: Mapping[str, Any]) -> WeightSource:
    """Return the weights of a checkpoint of ours, whose run had this model section."""
    rules = [NameRule(name, (name,)) for name in loaded.model]
    shapes = {name: pieces[0].shape for name, pieces in loaded.model.items()}
    return WeightSource(
        str(loaded.path),
        loaded.path.parent.parent,
        str(section["_target_"]),
        deciding_knobs(section),
        rules,
        shapes,
        lambda name, box: read_tensor(loaded, name, box),
        multipliers(section),
    )


def of_folder(folder: Path) -> WeightSource:
    """Return the weights of a Hugging Face folder.

    Raises ConfigError for files that are missing, that hold no safetensors, or whose model our
    models do not compute.
    """
    config = read_object(folder / "config.json", "config.json: cannot be read")
    family, knobs = from_config(config, "config.json")
    opened = weight_files(folder, ConfigError)
    place = {name: file for file, held in opened.items() for name in held.keys()}  # noqa: SIM118
    prefix = "" if any(name.startswith("transformer.") for name in place) else "transformer."
    names = {prefix + name if family.model_type == "gpt2" else name: name for name in place}
    rules = list(family.tensors(knobs))
    wanted = {rule.theirs for rule in rules}
    tied = {"lm_head.weight"} if knobs.get("tied_head", True) else set()
    extra = [n for n in names.keys() - wanted - tied if not n.endswith(family.ignored)]
    if missing := sorted(wanted - names.keys()):
        raise ConfigError("wrong_weights", f"lacks tensors: {first_of(missing, 8)}")
    if extra:
        text = first_of(sorted(extra), 8)
        raise ConfigError("wrong_weights", f"holds tensors that no part of ours takes: {text}")

    slices = {n: opened[place[names[n]]].get_slice(names[n]) for n in wanted}
    if other := sorted({s.get_dtype() for s in slices.values()} - FLOATS):
        text = f"{', '.join(other)}; known: {', '.join(sorted(FLOATS))}"
        raise ConfigError("wrong_weights", f"holds weights of type {text}")
    shapes = {n: tuple(s.get_shape()) for n, s in slices.items()}

    def read(name: str, box: Box | None) -> Tensor:
        """Return a box of a tensor in a file, which would keep in memory what was read."""
        held = safe_open(place[names[name]], framework="pt")
        if box is None:
            return held.get_tensor(names[name])
        return held.get_slice(names[name])[tuple(slice(*ends) for ends in box)]

    label = f"{folder} ({family.architecture})"
    return WeightSource(label, folder, family.target, knobs, rules, shapes, read)


def check_weights(source: WeightSource, section: Mapping[str, Any], model: nn.Module) -> list[str]:
    """Check that a model of this section can begin with the weights; return what grows, in words.

    Raises ConfigError that lists the knobs that differ, or the tensors.
    """
    if source.target != section["_target_"]:
        raise ConfigError(
            "wrong_weights",
            f"holds a {source.target}, not a {section['_target_']}; choose "
            f"model={OPTIONS.get(source.target, '...')}, which takes its sizes from there, or for "
            "any folder of transformers model=hf model.path=FOLDER",
        )
    growing = _growing(source, section, hasattr(model, "position_embedding"))
    own = {name: tuple(tensor.shape) for name, tensor in named_tensors(model).items()}
    covered = {name for rule in source.rules for name in rule.ours}
    lacking = {name for name in own.keys() - covered if not name.endswith(STARTS_AT_0)}
    wrong = sorted(lacking | (covered - own.keys()))
    if any(name.endswith(STARTS_AT_0) for name in wrong):
        text = "needs model.balance=bias: a bias decides which of its experts tokens are sent to"
        raise ConfigError("wrong_weights", text)
    for rule in source.rules:
        if own.keys() >= {*rule.ours}:  # else it is named already
            given, wanted = source.shapes[rule.theirs], rule.shape(own.__getitem__)
            grows = given[1:] == wanted[1:] and (*given[:1], *wanted[:1]) in growing.values()
            wrong += [rule.theirs] * (given != wanted and not grows)
    if wrong:
        raise ConfigError("wrong_weights", f"has other tensors; differing: {first_of(wrong, 8)}")
    return [f"model.{key} grows from {a:,} to {b:,}" for key, (a, b) in growing.items()]


def _growing(
    source: WeightSource, section: Mapping[str, Any], has_table: bool
) -> dict[str, tuple[int, int]]:
    """Return (theirs, ours) of each knob that grows.

    `has_table`: positions have weights. Raises ValueError that lists the knobs that differ.
    """
    differing, found = [], {}
    for key, theirs in source.knobs.items():
        ours = section.get(key, USUAL.get(key))
        if key in FREE or ours == theirs:
            continue
        text = typed(f"model.{key}", theirs)
        if key in GROWING and ours and theirs:
            if ours > theirs and section.get("init_grow"):
                found[key] = (theirs, ours)
                continue
            if ours > theirs:
                text += " (or model.init_grow=true)"
            elif key == "max_position_embeddings" and not has_table:
                continue  # a limit only
        differing.append(text)
    if differing:
        raise ConfigError("wrong_weights", f"needs {' '.join(differing)}")
    return found


@torch.no_grad()
def begin_with(model: nn.Module, source: WeightSource, section: Mapping[str, Any]) -> None:
    """Copy the weights, which `check_weights` has found to fit, into the model of a section.

    A rank reads what it holds alone. Rows that they do not have stay as they are. Another
    parametrization computes the same with other weights: these are converted. Raises ConfigError
    for values that are not finite.
    """
    own, factor = named_tensors(model), multipliers(section)
    for rule in source.rules:
        shape = source.shapes[rule.theirs]
        turned = rule.transposed and len(shape) == 2
        start, rows = 0, shape[::-1][0] if turned else math.prod(shape[:1])
        for name in rule.ours:
            if len(rule.ours) > 1:
                rows = own[name].shape[0]
            held, offset = (piece := piece_of(own[name])).local, piece.offset
            if rule.expert is not None:
                at = rule.expert - offset[0]
                if not 0 <= at < len(held):  # another rank holds it
                    continue
                held, offset = held[at], offset[1:]
            count = max(0, min(held.shape[0], rows - offset[0])) if shape else 1
            box = [(a, a + n) for a, n in zip(offset, held.shape, strict=True)]
            box[:1] = [(start + a, start + a + count) for a, _ in box[:1]]
            if count and held.numel():
                part = source.read(rule.theirs, (box[::-1] if turned else box) or None)
                if not all_finite(part):
                    raise ConfigError("not_finite", f"{rule.theirs} has values that are not finite")
                part, ratio = part.T if turned else part, source.factor(name) / factor(name)
                target = held[:count] if shape else held
                target.copy_(part if ratio == 1 else part.double() * ratio)
            start += rows
