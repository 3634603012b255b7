"""Try a user's own optimizers on small tensors, before anything is written."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from llmexp.checkpoint.slices import TYPES
from llmexp.config.values import refuse
from llmexp.models.initial import numbers_of
from llmexp.optim.states import Traits, apart
from llmexp.optim.trying import TriedTensors, Unfit, try_going_on
from llmexp.train.assembly.building import build_on_meta, build_optimizers
from llmexp.train.assembly.inputs import place_of

SMALL_DIMENSION = 16  # the largest dimension of a parameter on which an optimizer is tried


def run(
    section: dict[str, Any], model: tuple[dict[str, Any], str, int | None]
) -> tuple[list[Traits], list[str]]:
    """Try a user's own optimizers on a model whose parameters are cut down to small ones.

    `section` is theirs, `model` the arguments of `build_on_meta`. Return what was found of each,
    and a warning where they could not be tried. Raises ConfigError for those that a run could not
    go on with: their state has to be in `state` or `param_groups`.
    """
    dotted, key = str(section["_target_"]), "optimizer._target_"
    try:
        with numbers_of(0), torch.enable_grad():
            whole, found = try_going_on(lambda: _small_trial(section, model), dotted, key)
            states = [state for o in whole.optimizers for state in o.state.values()]
            for name, tensor in (pair for state in states for pair in apart(state)[1].items()):
                if tensor.dtype not in TYPES:
                    text = f"keeps {name} as {tensor.dtype}, which no checkpoint can hold; take"
                    raise Unfit(f"{text} another type, such as torch.float32")
            return found, []
    except Unfit as error:
        raise refuse(
            "bad_own_part", key, dotted, f"{error}{place_of(section, 'optimizer')}"
        ) from None
    except Exception as error:
        what = f"could not be tried on small tensors ({type(error).__name__}: {error})"
        what = " ".join(f"optimizer: {dotted} {what}".split("\n")[0].split())
        return [], [f"{what}; whether a resumed run equals an unbroken one is not known"]


def _small_trial(
    section: dict[str, Any], model: tuple[dict[str, Any], str, int | None]
) -> TriedTensors:
    """Return the optimizers of a section on small parameters, with gradients that are known."""
    built, made = build_on_meta(*model), dict[int, nn.Parameter]()
    numbers = torch.Generator().manual_seed(0)
    for module in built.modules():
        for name, p in module.named_parameters(recurse=False, remove_duplicate=False):
            values = torch.randn([min(n, SMALL_DIMENSION) for n in p.shape], generator=numbers)
            small = made.setdefault(id(p), nn.Parameter(values.to(p.dtype), p.requires_grad))
            setattr(module, name, small)
    parameters = [p for p in built.parameters() if p.requires_grad]

    def gradients(step: int) -> list[Tensor]:
        numbers = torch.Generator().manual_seed(step + 1)
        return [torch.randn(p.shape, generator=numbers).to(p.dtype) for p in parameters]

    return TriedTensors(parameters, build_optimizers(section, built), gradients)
