"""Gradients to clip, and rules without a run."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from llmexp import features, mesh
from llmexp.train.clipping import ByNorm, Rule

ALONE = mesh.join("cpu", "single", 1, 1, 1)


class Held(nn.Module):
    """A model that has these parameters."""

    def __init__(self, made: list[nn.Parameter]) -> None:
        super().__init__()
        self.held = nn.ParameterList(made)


def rule(kind: str, made: list[nn.Parameter], optimizers: Any = (), **knobs: Any) -> Any:
    """A rule of clipping of these parameters."""
    clip = SimpleNamespace(kind=kind, **knobs)
    chosen = {"none": Rule, "norm": ByNorm} | features.merged("rule", "RULES")
    return chosen[kind](clip, ALONE, Held(made), list(optimizers))


def counted(found: Any, unit: str) -> list[float]:
    """The sums that a rule has taken of its units in the step."""
    return [float(v) for key, v in found.found.items() if key.startswith(f"{unit}/")]


def gradients(made: list[nn.Parameter]) -> list[Any]:
    return [p.grad for p in made if p.grad is not None]


def global_norm(made: list[nn.Parameter]) -> torch.Tensor:
    return mesh.global_norm(ALONE, gradients(made))


def parameters(seed: int, dtype=torch.float64) -> list[nn.Parameter]:
    rng = np.random.default_rng(seed)
    made = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in ((3, 4), (5,), (2, 2, 2))]
    for p in made:
        p.grad = torch.tensor(rng.normal(size=p.shape) * 3, dtype=dtype)
    return made


def flat(made: list[nn.Parameter]) -> np.ndarray:
    return np.concatenate([g.double().numpy().ravel() for g in gradients(made)])
