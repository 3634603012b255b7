"""Optimizers of torch.optim, schedulefree, torchao and pytorch_optimizer, by their names.

Each is tried on two tiny tensors before a run begins: what it cannot do is refused, and what it
does to its groups and to parts of a tensor is known.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import json
import logging
import re
from collections.abc import Mapping
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from llmexp.settings.commands import how_to_install
from llmexp.settings.convert import check_range
from llmexp.settings.parts import OptimizerKnobs, arguments
from llmexp.settings.values import ConfigError, as_yaml, hint, knob, nearest, refuse
from llmexp.update import faces
from llmexp.update.held import TriedTensors, Unfit, plain_groups, try_going_on
from llmexp.update.optim import decay_groups
from llmexp.update.states import Traits, is_packed, straighten

PACKAGES = ("torch.optim", "schedulefree", "torchao.optim", "pytorch_optimizer")  # in this order
# Code that may not be used for everything, by the licence in its file or its project.
RESEARCH_ONLY = (
    "its licence, CC BY-NC-SA 4.0, is for research only; llmexp does not offer it; a function of "
    "your own may return it: docs/own.md"
)
NOT_OFFERED = {
    "pytorch_optimizer.Fromage": RESEARCH_ONLY,
    "pytorch_optimizer.Nero": RESEARCH_ONLY,
    "torch.optim.Muon": "is for matrices alone, and a model has vectors; choose optimizer=muon, "
    "which gives them to AdamW",
}
INSTALL = f"not installed: {how_to_install('torchao')}"
# Those that update each entry of a tensor by itself at any step, by their formulas.
EACH_ENTRY = re.compile(
    r"torch\.optim\.(ASGD|Ada(delta|grad|m|max|mW)|NAdam|RAdam|RMSprop|SGD)"
    r"|schedulefree\.(AdamW|RAdam|SGD)ScheduleFree"
    r"|pytorch_optimizer\.(AdEMAMix|AdaBelief|LaProp|Lion|SignSGD|Tiger|Yogi)"
)
# Adam, with moments that are kept in few bits.
FEW_BITS = re.compile(r"torchao\.optim\.AdamW?(4bit|8bit|Fp8)")
TRIED_LR = 1e-3


def library(
    model: nn.Module,
    name: Annotated[
        str, knob("class of torch.optim, schedulefree, torchao.optim, pytorch_optimizer", "Lion")
    ],
    lr: OptimizerKnobs.lr,
    **knobs: Any,
) -> Optimizer:
    """Build any optimizer of `PACKAGES`; further knobs are the arguments of its class."""
    return built(model, dotted_name(name), lr, knobs)


def dotted_name(name: str) -> str:
    """Return the package and the name of an optimizer, given with its package or without.

    Raises ConfigError where it is not there, or not to be used for everything.
    """
    package, _, short = name.rpartition(".")
    if package and package not in PACKAGES:
        text = f"one of these packages is needed: {', '.join(PACKAGES)}"
        raise refuse("optimizer.name", name, text, "pytorch_optimizer.Lion")
    absent, known = [], set[str]()
    for one in [package] if package else PACKAGES:
        if (module := _imported(one)) is None:
            absent.append(one)
            continue
        if _is_optimizer(getattr(module, short, None), one):
            found = f"{one}.{short}"
            if found in NOT_OFFERED:
                raise refuse("optimizer.name", name, NOT_OFFERED[found])
            return found
        known |= {n for n, kind in vars(module).items() if _is_optimizer(kind, one)}
    near = nearest(short, known)
    text = f"there is no such optimizer{'.' if near else ''}{near}"
    if absent:
        packages = f"{', '.join(absent)} {'is' if len(absent) == 1 else 'are'} {INSTALL}"
        text = f"is not in what is installed;{near} {packages}"
    raise refuse("optimizer.name", name, text, None if near else "RAdam")


def _imported(package: str) -> Any:
    """Return a package, or None where it is not installed; its warnings of this machine are left.

    Raises ConfigError where it is broken.
    """
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        return importlib.import_module(package)
    except Exception as error:
        absent = error.name if isinstance(error, ModuleNotFoundError) else ""
        if str(absent).partition(".")[0] == package.partition(".")[0]:
            return None
        raise ConfigError(f"optimizer.name: importing {package} failed: {error}") from None
    finally:
        logging.disable(before)


def _kind(dotted: str) -> Any:
    """Return the class of this name. Raises ConfigError where its package is not installed."""
    package, _, name = dotted.rpartition(".")
    if (module := _imported(package)) is None:
        raise refuse("optimizer.name", dotted, f"{package} is {INSTALL}")
    return getattr(module, name)


def _is_optimizer(kind: Any, package: str) -> bool:
    """Return whether this is an optimizer that the package itself defines."""
    is_one = isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
    return is_one and kind.__module__.startswith(package) and not kind.__name__.startswith("_")


def _arguments(dotted: str) -> dict[str, inspect.Parameter]:
    """Return the arguments that a class takes after its parameters, by name."""
    signature = inspect.signature(_kind(dotted).__init__)
    found = {n: p for n, p in signature.parameters.items() if n not in ("self", "params")}
    return {n: p for n, p in found.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}


def arguments_of_optimizer(name: str) -> dict[str, dict[str, Any]]:
    """Return value, source and meaning of each argument of an optimizer, by its key.

    The meaning is that of its docstring. Raises ConfigError.
    """
    dotted = dotted_name(name)
    text = inspect.getdoc(_kind(dotted)) or ""
    found = {}
    for name, parameter in _arguments(dotted).items():
        # such as "betas (tuple): coefficients", and lines that stand farther in
        entry = rf"^( *){name} *(?:\([^\n]*\))?:\s*(\S[^\n]*(?:\n\1 +\S[^\n]*)*)"
        words = re.search(entry, text, re.MULTILINE)
        default = None if parameter.default is parameter.empty else parameter.default
        found[f"optimizer.{name}"] = {
            "key": f"optimizer.{name}",
            "value": list(default) if isinstance(default, tuple) else default,
            "from": f"the default of {dotted}",
            "meaning": " ".join(words[2].split()) if words else f"argument of {dotted}",
        }
    return found


def built(model: nn.Module, dotted: str, lr: float, knobs: Mapping[str, Any]) -> Optimizer:
    """Build the optimizer of this name with decay on matrices only. Raises ConfigError."""
    taken = _arguments(dotted)
    for name in knobs:
        if name not in taken:
            raise ConfigError(
                f"optimizer.{name}: {dotted} has no such argument.{hint(name, list(taken))}"
            )
        _check_list(dotted, name, knobs[name], taken[name].default)
        ours = arguments().get(key := f"optimizer.{name}")
        if ours is not None and isinstance(knobs[name], (int, float)):  # of the same meaning
            check_range(knobs[name], key, ours[1])
    given = _with_tuples(knobs)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer: Any = _constructed(dotted, parameters, lr, given)
    optimizer.llmexp_traits = tried(dotted, json.dumps(given, sort_keys=True, default=str))
    step = optimizer.step

    def stepped() -> None:
        try:
            step()
        except (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except Exception as error:  # such as for shapes that it has no rule for
            text = f"its step failed: {type(error).__name__}: {error}"
            raise refuse("optimizer.name", dotted, text) from error
        for state in optimizer.state.values():
            straighten(state)

    optimizer.step = stepped
    return optimizer


def _with_tuples(knobs: Mapping[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in knobs.items()}


def _check_list(dotted: str, name: str, value: Any, default: Any) -> None:
    """Refuse what is no list of as many numbers as the default of its class has."""
    if not isinstance(default, tuple):
        return
    whole = isinstance(value, (list, tuple)) and len(value) == len(default)
    if not whole or any(isinstance(one, (str, list, dict)) for one in value):
        text = f"a list of {len(default)} numbers is needed for {dotted}"
        raise refuse(f"optimizer.{name}", value, text, list(default))


def _constructed(
    dotted: str, parameters: list[nn.Parameter], lr: float, knobs: Mapping[str, Any]
) -> Optimizer:
    """Return an optimizer of parameters that is ready to train. Raises ConfigError."""
    decay = _arguments(dotted).get("weight_decay")
    default = 0.0 if decay is None or decay.default is decay.empty else decay.default
    groups = decay_groups(parameters, knobs.get("weight_decay", default) or 0.0)
    for group in groups:
        if decay is None:
            del group["weight_decay"]
    try:
        optimizer: Any = _kind(dotted)(groups, lr=lr, **knobs)
    except Exception as error:
        words = " ".join(f"{k}={as_yaml(v)}" for k, v in knobs.items())
        text = f"cannot be made{f' with {words}' if words else ''}: {error}"
        raise refuse("optimizer.name", dotted, text) from None
    for group in optimizer.param_groups:
        if "lr" not in group:
            raise refuse("optimizer.name", dotted, "has no learning rate in its groups", "AdamW")
        group["initial_lr"] = lr  # a number: torchao's rate is a tensor
    if dotted.startswith("torchao.") and not parameters[0].is_cuda:
        # compiling takes longer there than it saves
        optimizer.step = torch.compiler.set_stance("force_eager")(optimizer.step)
    faces.begin(optimizer)
    return optimizer


@functools.cache
def tried(dotted: str, knobs: str) -> Traits:
    """Return the traits of an optimizer, tried on two tiny tensors and on their halves.

    Raises ConfigError for one that needs more than gradients, or that does not go on from a
    checkpoint bit for bit.
    """
    try:
        # on the CPU, with gradients at hand; the random numbers stay as they were
        with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.enable_grad():
            return _traits(dotted, _with_tuples(json.loads(knobs)))
    except ConfigError:
        raise
    except Unfit as error:
        raise refuse("optimizer.name", dotted, str(error)) from None
    except Exception as error:
        text = f"its step fails with gradients alone ({error})"
        raise refuse("optimizer.name", dotted, text, "AdamW") from None


def _traits(dotted: str, given: dict[str, Any]) -> Traits:
    whole, (found,) = try_going_on(lambda: _trial(dotted, 1, given), dotted, "optimizer.name")
    own = _arguments(dotted)
    # the first steps need not change all, such as Prodigy's estimate d
    counters = {k for group in plain_groups(whole.optimizers[0]) for k in group if k not in own}
    halves = _trial(dotted, 2, given)
    halves.take_steps(range(4))
    a, b, c, d = halves.parameters
    same = all(map(torch.equal, whole.parameters, (torch.cat((a, b)), torch.cat((c, d)))))
    states = whole.optimizers[0].state.values()
    packed = any(is_packed(value) for state in states for value in state.values())
    undecayed = given | ({"weight_decay": 0.0} if "weight_decay" in own else {})
    moved = []
    for factor in (1, 64):
        trial = _trial(dotted, 1, undecayed)
        trial.take_steps(range(4), factor)
        moved.append(trial.parameters[0].detach() - _tiny(0, 1)[0])
    alike = bool((moved[1] - moved[0]).norm() <= 0.01 * moved[0].norm())
    each_entry = EACH_ENTRY.fullmatch(dotted) is not None
    return dataclasses.replace(
        found,
        counters=(*counters.union(found.counters),),
        parts=same and not packed and each_entry,
        like_adam=alike and (each_entry or FEW_BITS.fullmatch(dotted) is not None),
    )


def _tiny(seed: int, parts: int) -> list[Tensor]:
    """Return a matrix and a vector of known values, whole or in `parts`.

    The matrix is large enough that even its half is kept in few bits by torchao. As gradients, of
    seeds from 1 on, they begin with zeros, as those of a token that no text has.
    """
    numbers = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(shape, generator=numbers) for shape in ((128, 64), (8,))]
    for tensor in tensors[: 2 * seed]:
        tensor[0] = 0
    return [one.clone() for tensor in tensors for one in tensor.chunk(parts)]


def _trial(dotted: str, parts: int, knobs: Mapping[str, Any]) -> TriedTensors:
    parameters = [nn.Parameter(tensor) for tensor in _tiny(0, parts)]
    optimizer = _constructed(dotted, parameters, TRIED_LR, knobs)
    return TriedTensors(parameters, [optimizer], lambda step: _tiny(step + 1, parts))
