"""Optimizers of torch.optim, schedulefree, torchao and pytorch_optimizer, by their names.

Each is tried on two tiny tensors before a run begins: what it cannot do is refused, and what it
does to its groups is known.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import logging
import re
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from llmexp.config.commands import how_to_install
from llmexp.config.convert import check_range
from llmexp.config.parts import arguments
from llmexp.config.values import ConfigError, as_yaml, hint, knob, nearest, refuse
from llmexp.optim import eval_weights
from llmexp.optim.optimizers.settings import Knobs
from llmexp.optim.states import Traits, straighten
from llmexp.optim.trying import TriedTensors, Unfit, plain_groups, try_going_on
from llmexp.optim.updating import decay_groups, trained

PACKAGES = ("torch.optim", "schedulefree", "torchao.optim", "pytorch_optimizer")  # in this order
# Code that may not be used for everything, by the licence in its file or its project.
RESEARCH_ONLY = (
    "its licence, CC BY-NC-SA 4.0, is for research only; llmexp does not offer it; a function of "
    "your own may return it: docs/custom-parts.md"
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
# Those of them whose update has a size that the gradient's size does not change, as torch's Adam
# has; and Adam with moments that are kept in few bits.
LIKE_ADAM = re.compile(
    r"schedulefree\.(AdamW|RAdam)ScheduleFree|torchao\.optim\.AdamW?(4bit|8bit|Fp8)"
    r"|pytorch_optimizer\.(AdEMAMix|AdaBelief|LaProp|Lion|SignSGD|Tiger)"
)
AS_SGD = {"rectify", "silent_sgd_phase"}  # knobs with which first steps of these are SGD's
TRIED_LR = 1e-3
_known: dict[str, Traits] = {}  # by name and knobs


def library(
    model: nn.Module,
    name: Annotated[
        str, knob("class of torch.optim, schedulefree, torchao.optim, pytorch_optimizer", "Lion")
    ],
    lr: Knobs.lr,
    **knobs: Any,
) -> Optimizer:
    """Build any optimizer of `PACKAGES`; further knobs are the arguments of its class."""
    return built(model, dotted_name(name), lr, **knobs)


def dotted_name(name: str) -> str:
    """Return the package and the name of an optimizer, given with its package or without.

    Raises ConfigError where it is not there, or not to be used for everything.
    """
    package, _, short = name.rpartition(".")
    if package and package not in PACKAGES:
        text = f"one of these packages is needed: {', '.join(PACKAGES)}"
        raise refuse("unknown_option", "optimizer.name", name, text, "pytorch_optimizer.Lion")
    absent, known = [], set[str]()
    for one in [package] if package else PACKAGES:
        if (module := _imported(one)) is None:
            absent.append(one)
            continue
        kinds = [k for k in vars(module).values() if isinstance(k, type) and k is not Optimizer]
        own = [k for k in kinds if issubclass(k, Optimizer) and k.__module__.startswith(one)]
        known |= {kind.__name__ for kind in own if not kind.__name__.startswith("_")}
        if short in known:
            found = f"{one}.{short}"
            if found in NOT_OFFERED:
                raise refuse("unsupported", "optimizer.name", name, NOT_OFFERED[found])
            return found
    near = nearest(short, known)
    text = f"there is no such optimizer{'.' if near else ''}{near}"
    if absent:
        packages = f"{', '.join(absent)} {'is' if len(absent) == 1 else 'are'} {INSTALL}"
        text = f"is not in what is installed;{near} {packages}"
    raise refuse("unknown_option", "optimizer.name", name, text, None if near else "RAdam")


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
        raise ConfigError(
            "missing_package", f"optimizer.name: importing {package} failed: {error}"
        ) from None
    finally:
        logging.disable(before)


def _kind(dotted: str) -> tuple[Any, dict[str, Any]]:
    """Return the class of this name, and the defaults of its arguments beside its parameters.

    Raises ConfigError where its package is not installed.
    """
    package, _, name = dotted.rpartition(".")
    if (module := _imported(package)) is None:
        raise refuse("missing_package", "optimizer.name", dotted, f"{package} is {INSTALL}")
    kind = getattr(module, name)
    given = [*inspect.signature(kind.__init__).parameters.values()][1:]
    named = [p for p in given if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    return kind, {p.name: p.default for p in named if p.name != "params"}


def arguments_of_optimizer(name: str) -> dict[str, dict[str, Any]]:
    """Return value, source and meaning of each argument of an optimizer, by its key.

    The meaning is that of its docstring. Raises ConfigError.
    """
    kind, taken = _kind(dotted := dotted_name(name))
    text, found = inspect.getdoc(kind) or "", {}
    for name, default in taken.items():
        # such as "betas (tuple): coefficients", and lines that stand farther in
        entry = rf"^( *){name} *(?:\([^\n]*\))?:\s*(\S[^\n]*(?:\n\1 +\S[^\n]*)*)"
        words = re.search(entry, text, re.MULTILINE)
        value = list(default) if isinstance(default, tuple) else default
        found[f"optimizer.{name}"] = {
            "key": f"optimizer.{name}",
            "value": None if value is inspect.Parameter.empty else value,
            "from": f"the default of {dotted}",
            "meaning": " ".join(words[2].split()) if words else f"argument of {dotted}",
        }
    return found


def built(model: nn.Module, dotted: str, lr: float, /, **knobs: Any) -> Optimizer:
    """Build the optimizer of this name with decay on matrices only. Raises ConfigError."""
    _, taken = _kind(dotted)
    for name, value in knobs.items():
        key = f"optimizer.{name}"
        if name not in taken:
            raise ConfigError(
                "unknown_key", f"{key}: {dotted} has no such argument.{hint(name, list(taken))}"
            )
        if isinstance(default := taken[name], tuple):
            listed = isinstance(value, (list, tuple)) and len(value) == len(default)
            if not listed or any(isinstance(one, (str, list, dict)) for one in value):
                text = f"a list of {len(default)} numbers is needed for {dotted}"
                raise refuse("wrong_type", key, value, text, list(default))
        if key in arguments() and isinstance(value, (int, float)):  # of the same meaning
            check_range(value, key, arguments()[key][1])
    knobs = {name: tuple(v) if isinstance(v, list) else v for name, v in knobs.items()}
    optimizer: Any = _constructed(dotted, trained(model), lr, knobs)
    call = json.dumps([dotted, knobs], sort_keys=True, default=str)
    if call not in _known:
        _known[call] = _tried(dotted, knobs)
    optimizer.llmexp_traits, step = _known[call], optimizer.step

    def stepped() -> None:
        try:
            step()
        except (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except Exception as error:  # such as for shapes that it has no rule for
            text = f"its step failed: {type(error).__name__}: {error}"
            raise refuse("bad_own_part", "optimizer.name", dotted, text) from error
        for state in optimizer.state.values():
            straighten(state)

    optimizer.step = stepped
    return optimizer


def _constructed(
    dotted: str, parameters: list[nn.Parameter], lr: float, knobs: dict[str, Any]
) -> Optimizer:
    """Return an optimizer of parameters that is ready to train. Raises ConfigError."""
    kind, taken = _kind(dotted)
    decay = knobs.get("weight_decay", taken.get("weight_decay"))
    groups = decay_groups(parameters, decay or 0.0)
    for group in groups:
        if "weight_decay" not in taken:
            del group["weight_decay"]
    try:
        optimizer: Any = kind(groups, lr=lr, **knobs)
    except Exception as error:
        words = " ".join(f"{k}={as_yaml(v)}" for k, v in knobs.items())
        text = f"cannot be made{f' with {words}' if words else ''}: {error}"
        raise refuse("bad_own_part", "optimizer.name", dotted, text) from None
    for group in optimizer.param_groups:
        if "lr" not in group:
            raise refuse(
                "bad_own_part",
                "optimizer.name",
                dotted,
                "has no learning rate in its groups",
                "AdamW",
            )
        group["initial_lr"] = lr  # a number: torchao's rate is a tensor
    if dotted.startswith("torchao.") and not parameters[0].is_cuda:
        # compiling takes longer there than it saves
        optimizer.step = torch.compiler.set_stance("force_eager")(optimizer.step)
    eval_weights.begin(optimizer)
    return optimizer


def _tried(dotted: str, knobs: dict[str, Any]) -> Traits:
    """Return the traits of an optimizer, tried on two tiny tensors.

    Raises ConfigError for one that needs more than gradients, or that does not go on from a
    checkpoint bit for bit.
    """

    def trial() -> TriedTensors:
        parameters = [nn.Parameter(tensor) for tensor in _tiny(0)]
        optimizer = _constructed(dotted, parameters, TRIED_LR, knobs)
        return TriedTensors(parameters, [optimizer], lambda step: _tiny(step + 1))

    try:
        # on the CPU, with gradients at hand; the random numbers stay as they were
        with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.enable_grad():
            whole, (found,) = try_going_on(trial, dotted, "optimizer.name")
    except ConfigError:
        raise
    except Unfit as error:
        raise refuse("bad_own_part", "optimizer.name", dotted, str(error)) from None
    except Exception as error:
        text = f"its step fails with gradients alone ({error})"
        raise refuse("bad_own_part", "optimizer.name", dotted, text, "AdamW") from None
    # the first steps need not change all, such as Prodigy's estimate d
    groups, taken = plain_groups(whole.optimizers[0]), _kind(dotted)[1]
    return dataclasses.replace(
        found,
        counters=(*{k for group in groups for k in group if k not in taken}.union(found.counters),),
        parts=EACH_ENTRY.fullmatch(dotted) is not None,
        like_adam=LIKE_ADAM.fullmatch(dotted) is not None and AS_SGD.isdisjoint(knobs),
    )


def _tiny(seed: int) -> list[Tensor]:
    """Return a matrix and a vector of known values.

    The matrix is large enough to be kept in few bits by torchao. As gradients, of seeds from 1 on,
    they begin with zeros, as those of a token that no text has.
    """
    numbers = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(shape, generator=numbers) for shape in ((128, 64), (8,))]
    for tensor in tensors[: 2 * seed]:
        tensor[0] = 0
    return tensors
