"""Build model and optimizers of a config, each checked when it is built."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from llmexp import mesh
from llmexp.checkpoint.slices import TYPES, piece_of
from llmexp.config.convert import checked_knob
from llmexp.config.kinds import kind_of_error
from llmexp.config.rules import LIBRARY_TARGET, TRANSFORMERS
from llmexp.config.targets import bind, locate
from llmexp.config.values import ConfigError, Plain, is_ours, refuse, typed
from llmexp.config.variables import fill
from llmexp.data.tokenizers.base import Tokenizer
from llmexp.folders import rundir
from llmexp.models.common import LanguageModel, give_memory, parameter_counts
from llmexp.models.initial import numbers_of
from llmexp.optim import held, precision
from llmexp.optim.optimizers.settings import Group
from llmexp.optim.states import Traits
from llmexp.run.layout import Layout
from llmexp.run.shares import GroupShare
from llmexp.system.text import first_of, gib
from llmexp.train.assembly.inputs import build_tokenizer, place_of

if TYPE_CHECKING:
    from llmexp.hf.reading import WeightSource


def initial_weights(
    section: Plain, model: nn.Module, read: bool
) -> tuple[WeightSource, list[str]] | None:
    """Return the weights that the model section names, and what grows beyond them; None for none.

    `read`: give them to the model, and check values and hashes on the way; else names and sizes
    alone are checked. Raises ConfigError where they do not fit the model."""
    section = fill(section, "model")
    if (given := section.get("init_from")) is None:
        return None
    from llmexp.hf.reading import begin_with, check_weights, open_source

    try:
        source = open_source(given, mesh.share_here() if read else None)
        grown = check_weights(source, section, model)
        if read:
            begin_with(model, source, section)
        return source, grown
    except ValueError as error:
        raise ConfigError(
            kind_of_error(error, "wrong_weights"), f"model.init_from={given}: {error}"
        ) from None


def initial_warnings(
    section: Plain,
    parent: str | None,
    uses_tokenizer: bool,
    model: nn.Module,
    tokenizer: Tokenizer,
) -> list[str]:
    """Return what a user should know of the weights that a run begins with.

    They are those of the folder `parent` of a fork, or those that the model section names. Their
    tokenizer counts where the data are ids of the run's. Raises ConfigError for a misfit."""
    used = tokenizer if uses_tokenizer else None
    if parent is not None:
        return _check_ids("fork.run", Path(parent), used)
    if (found := initial_weights(section, model, False)) is None:
        return []
    return [*found[1], *_check_ids("model.init_from", found[0].folder, used)]


def _check_ids(key: str, folder: Path, tokenizer: Tokenizer | None) -> list[str]:
    """Compare the tokenizer of the folder that `key` names, and whose weights are taken, with ours.

    Return a warning where it cannot be read. Raises ConfigError where it gives other ids.
    """
    if tokenizer is None:
        return []
    from llmexp.hf.tokenizer import same_ids, tokenizer_beside

    other: Tokenizer | None
    try:
        if rundir.is_run(folder):
            text = "take the section tokenizer of its config.yaml"
            other = build_tokenizer(rundir.built_config(folder).tokenizer)
        else:
            text = f"use tokenizer=file {typed('tokenizer.path', folder)}"
            other = tokenizer_beside(folder)
    except ValueError as error:
        return [f"the tokenizer of {folder} cannot be compared with the run's: {error}"]
    if other is not None and not same_ids(other, tokenizer):
        ids = f"other ids than that of this run ({tokenizer.name})"
        why = f"its tokenizer ({other.name}) gives {ids}, for which the weights are not made"
        raise refuse("wrong_tokenizer", key, folder, f"{why}; {text}")
    return []


def build_model(section: Plain, kind: str, end: int | None, seed: int = 0) -> nn.Module:
    """Build the model of a section, in the parameters' type for the precision `kind`.

    `end`: the id that ends a document, where attention stays inside. A model of ours has no memory
    yet, and no model its first weights: `begin_model` follows. Others draw values by `seed`. It
    is in training, but for modules that its code has put into evaluation. Raises ConfigError for a
    model that cannot be trained."""
    place = torch.device("meta") if draws_by_blocks(section) else contextlib.nullcontext()
    with numbers_of(seed), place:
        model = bind("model", section, {})()
    dotted, wrong = section["_target_"], ""
    if not isinstance(model, nn.Module):
        wrong = f"returned {type(model).__name__}, not a torch.nn.Module"
    elif not any(p.requires_grad for p in model.parameters()):
        wrong = "has no parameters to train"
    elif unknown := [n for n, p in model.named_parameters() if p.dtype not in TYPES]:
        wrong = f"no checkpoint can hold its parameter {unknown[0]}, of type "
        wrong += f"{model.get_parameter(unknown[0]).dtype}; use another type, such as "
        wrong += "torch.float32 or torch.complex64, or make it a buffer"
    if wrong:
        raise refuse(
            "bad_own_part", "model._target_", dotted, f"{wrong}{place_of(section, 'model')}"
        )
    if end is not None:
        if not hasattr(model, "document_end"):
            way = "the last id of each, which it has to keep attention inside of"
            text = f"{dotted} knows nothing of documents; give it an attribute `document_end`"
            raise refuse("unsupported", "batch.document_mask", True, f"{text}, {way}", False)
        setattr(model, "document_end", end)  # noqa: B010
    evaluated = [module for module in model.modules() if not module.training]
    model.train()  # it may do more than set the modes
    for module in evaluated:
        module.training = False
    dtype = precision.parameter_dtype(kind)
    # not `to`, which makes complex numbers real
    return model._apply(lambda t: t.to(dtype) if t.is_floating_point() else t)


def begin_model(
    section: Plain,
    seed: int,
    twin: int,
    model: nn.Module,
    device: torch.device,
    fresh: bool = True,
) -> None:
    """Give a model its memory, and its first weights where it is `fresh`.

    They are drawn, or those that the section names, and moved for a twin. A rank fills the parts
    that it holds, the same numbers on any layout."""
    without_values = any(p.is_meta for p in model.parameters())
    give_memory(model, device)
    model.to(device)
    if not fresh:
        return
    if without_values:
        with numbers_of(seed):
            cast(LanguageModel, model).init_weights(piece_of)
    if section.get("init_from") is not None:
        initial_weights(section, model, True)
    if twin:
        from llmexp.optim.twin import perturb

        perturb(model, seed, twin, piece_of)


def built_whole(section: Plain, model: nn.Module, layout: Layout) -> list[str]:
    """Return what ranks that share a model pay where each has to build all of it, in words."""
    if layout.shard_size * layout.tensor_parallel_size == 1:
        return []
    held = gib(sum(t.nbytes for t in model.state_dict().values()))
    return [
        f"model: each rank builds all of {section['_target_']} before it keeps its part: {held} "
        "GiB of its host's memory, which the models of llmexp do not need"
    ]


def draws_by_blocks(section: Plain) -> bool:
    """Return whether each rank draws its own parts of the section's model: it is one of ours."""
    target = section["_target_"]
    return is_ours(target) and target != TRANSFORMERS


class _Undrawn(TorchFunctionMode):
    """Skip `normal_` where there are no values: it would import torch._dynamo, for a second."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        tensor = next(iter([*args, *(kwargs or {}).values()]), None)
        if isinstance(tensor, torch.Tensor) and tensor.is_meta:
            # torch refuses to change a parameter in sight of autograd
            seen = tensor.requires_grad and torch.is_grad_enabled()
            if func is nn.init.normal_ or (func is torch.Tensor.normal_ and not seen):
                return tensor
        return func(*args, **(kwargs or {}))


def build_on_meta(section: Plain, kind: str, end: int | None) -> nn.Module:
    """Build the model of a section without memory. Raises ConfigError."""
    drawn = contextlib.nullcontext() if draws_by_blocks(section) else _Undrawn()
    with torch.device("meta"), drawn:
        return build_model(section, kind, end)


def shaped(
    section: Plain, kind: str, end: int | None, cached: Callable[..., Any]
) -> tuple[Plain, str | None]:
    """Return the model section with the sizes that follow from one number, and how, in words.

    `cached`: an `assemble.Cache`; the models that are counted are built without memory. Raises
    ConfigError."""
    asked = {key: section.get(key) for key in ("size", "depth", "shape_rule")}
    target: Any = locate("model._target_", section.get("_target_"))
    if not any(value is not None for value in asked.values()):
        width = fill(section, "model").get("d_model")
        if section.get("d_ff", 0) is None and isinstance(width, int) and draws_by_blocks(section):
            section = section | {"d_ff": target.mlp_width(width)}
        return section, None
    return _sized(section | fill(asked, "model"), kind, end, cached, target)


def _sized(
    section: Plain, kind: str, end: int | None, cached: Callable[..., Any], target: Any
) -> tuple[Plain, str | None]:
    from llmexp.run.shape import solve_shape

    def count(sizes: Plain) -> int:
        model = cached(build_on_meta, sizes, kind, end)
        return parameter_counts(model)[0] or sum(p.numel() for p in model.parameters())

    return solve_shape(section, count, getattr(target, "mlp_factor", 4.0))


def named_optimizer(section: Plain) -> Plain:
    """Return the section of optimizer=library, with the package of its name. Raises ConfigError."""
    from llmexp.optim.optimizers import library

    name = fill(section, "optimizer").get("name")
    if not isinstance(name, str) or not name:
        text = f"the name of an optimizer is needed, of {', '.join(library.PACKAGES)}"
        raise refuse("missing_value", "optimizer.name", name, text, "Lion")
    return section | {"name": library.dotted_name(name)}


def build_optimizers(
    section: Plain, model: nn.Module, traits: Sequence[Traits] = ()
) -> list[Optimizer]:
    """Return the optimizers of the section, whose rates are solved. Raise ConfigError.

    `traits`: what a trial of those of one's own has shown."""
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    built = bind("optimizer", section, {})(model)
    try:
        optimizers = held.as_list(built)
        if section["_target_"] == LIBRARY_TARGET or not is_ours(section["_target_"]):
            held.check_held(model, optimizers, trained)
    except ValueError as error:
        raise ConfigError(
            kind_of_error(error, "bad_own_part"), f"{error}{place_of(section, 'optimizer')}"
        ) from None
    for optimizer, known in zip(optimizers, traits, strict=False):
        optimizer.llmexp_traits = known  # type: ignore[attr-defined]
    if section.get("groups", []) != [] or getattr(model, "width_ratio", 1.0) != 1:
        from llmexp.optim import groups

        groups.by_name(model, optimizers, _groups_of(section))
        groups.by_width(model, optimizers)
    return optimizers


def _groups_of(section: Plain) -> list[Group]:
    """Return the groups of parameters of an optimizer section. Raises ConfigError."""
    found: list[Group] = checked_knob(
        "optimizer.groups", fill(section, "optimizer").get("groups", [])
    )
    return found


def width_words(model: Any, optimizers: Sequence[Optimizer]) -> str:
    """Return what model.parametrization=mup changes, and by how much."""
    from llmexp.optim.groups import mup_words

    return mup_words(model, optimizers)


def group_shares(
    section: Plain, model: nn.Module, optimizers: Sequence[Optimizer]
) -> tuple[GroupShare, ...]:
    """Return what each of the groups takes, and what is left for none of them."""
    if not (wanted := _groups_of(section)):
        return ()
    from llmexp.optim.groups import groups_by_name

    places = groups_by_name(model, optimizers, wanted)
    sizes = {id(p): p.numel() for p in model.parameters()}
    taken = []
    for number, group in [*enumerate(wanted), (None, Group("", 1.0, 1.0))]:
        own = [sizes[key] for key, place in places.items() if place == number]
        if own:
            taken.append(GroupShare(**vars(group), tensors=len(own), parameters=sum(own)))
    return tuple(taken)


def left_in_evaluation(model: nn.Module) -> list[str]:
    """Return a warning of the modules that the model's code has put into evaluation."""
    names = [name for name, module in model.named_modules() if not module.training]
    if not all(names):  # its root
        names = ["all of it"]
    verb = "stays" if len(names) == 1 else "stay"
    text = f"{verb} in evaluation, as its code demands: no dropout, and frozen running statistics"
    return [f"model: {first_of(names, 4)} {text}"] if names else []


def dropout_words(model: nn.Module) -> str:
    """Return the dropout of a model's modules in words, "" for none: a folder's is in no knob."""
    found = {
        str(value)
        for module in model.modules()
        for key, value in vars(module).items()
        if isinstance(value, float)
        and 0 < value < 1
        and ("dropout" in key or (key == "p" and isinstance(module, _DropoutNd)))
        and module.training
    }
    return f", dropout {' and '.join(sorted(found))} in training" if found else ""


SHOWN_SIZES = (
    "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_model", "d_ff", "vocab_size",
    "max_position_embeddings",
)  # fmt: skip


def sizes_in(model: Plain) -> str:
    """Return the sizes in a model section, as they are given on a command line."""
    return " ".join(f"{key}={model[key]}" for key in SHOWN_SIZES if model.get(key) is not None)


def label_of(model: Plain) -> str:
    """Return the model section in a few words."""
    name = str(model["_target_"]).rpartition(".")[2]
    layers = "layer" if model.get("n_layers") == 1 else "layers"
    width, inner = model.get("d_model"), model.get("d_ff")
    sizes = [f"{v} {k}" for k, v in ((layers, model.get("n_layers")), ("wide", width)) if v]
    if isinstance(width, int) and isinstance(inner, int) and width:
        sizes.append(f"d_ff {inner:,} = {inner / width:.3g} x d_model")
    if is_ours(model["_target_"]) and (count := model.get("n_experts")):
        of = model.get("d_expert") or inner
        sizes.append(f"{count} experts of {of:,}, {model['experts_per_token']} a token")
    return ", ".join([name, *sizes])
