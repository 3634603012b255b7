"""Clip by the run's rule: the gradient, or what the optimizer makes of it; count what it saw."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from llmexp import mesh
from llmexp.checkpoint.pieces import piece_of
from llmexp.metrics.rules import Measures
from llmexp.settings.clipping import MOVING
from llmexp.settings.config import Clip
from llmexp.settings.values import refuse
from llmexp.update import clip as rules
from llmexp.update import held, optim
from llmexp.update.heads import HeadLimit, check_heads
from llmexp.update.limits import Limit
from llmexp.update.patterns import first_matches


def _groups_of(clip: Clip, model: nn.Module) -> list[int | None]:
    """Return to which of the limits by name each trained parameter belongs. Raises ConfigError."""
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    return first_matches(names, [limit.match for limit in clip.limits], "clip.limits")


def check_clip(clip: Clip, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Raise ConfigError for a rule that the model or its optimizers do not allow."""
    if clip.kind == "per_group":
        if not clip.limits:
            example = [{"match": "*.attention.*", "max_norm": 0.5}, {"match": "*", "max_norm": 1.0}]
            raise refuse("clip.limits", "[]", "clip=per_group needs them", example)
        _groups_of(clip, model)
    if clip.kind == "update":
        held.check_limited(optimizers)
    if clip.qk_limit is not None:
        check_heads(model, clip.qk_limit)


def measures_of(clip: Clip) -> Measures:
    """Return what counts the figures that a rule measures, in their order."""
    values, units = dict[str, float | None](), dict[str, float]()
    if clip.kind in MOVING:
        values["clip_limit"] = None
    elif clip.kind == "value" and clip.max_value is not None:
        values["grad_entry_max"] = clip.max_value
    elif clip.kind == "per_group":
        values |= {f"grad_norm/{limit.match}": limit.max_norm for limit in clip.limits}
    elif clip.kind == "adaptive":
        units["units"] = clip.ratio
    elif clip.kind == "update":
        units["tensors"] = clip.threshold
    if clip.qk_limit is not None:
        values["attention_logit_max"] = units["heads"] = clip.qk_limit
    return Measures(values, units, rules.RUNGS)


class Rule:
    """Clip once per window, in two parts: before the update, and after it."""

    def __init__(
        self,
        joined: mesh.Mesh,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        optimizers: list[Optimizer],
        clip: Clip,
        rows: int,
    ) -> None:
        self._mesh, self._clip, self._optimizers = joined, clip, optimizers
        self.limit, self.measures = Limit(clip), measures_of(clip)
        self._parameters, self._groups = list(parameters), list[int | None]()
        self._update: rules.UpdateLimit | None = None
        self._heads: HeadLimit | None = None
        if clip.kind == "per_group":
            self._groups = _groups_of(clip, model)
        elif clip.kind == "adaptive":  # all but the output head, as its authors do
            head = getattr(model, "head_weight", None)
            self._parameters = [p for p in parameters if p is not head]
        elif clip.kind == "update":
            self._update = rules.UpdateLimit(joined, optimizers, clip.threshold)
        if clip.qk_limit is not None:
            self._heads = HeadLimit(joined, model, clip.qk_limit, rows, piece_of)
        self._values, self._units = list[Any](), list[Any]()  # of a step, as `measures` takes them

    def by_norm(self, max_norm: float) -> Rule:
        """Return the same with a limit of the norm as its rule."""
        found = copy.copy(self)
        found._clip = dataclasses.replace(self._clip, kind="norm", max_norm=max_norm)
        found.limit, found.measures = Limit(found._clip), measures_of(found._clip)
        found._update = None
        return found

    def begin(self) -> None:
        if self._heads is not None:
            self._heads.begin()

    def before_forward(self, targets_bt: Tensor) -> None:
        if self._heads is not None:
            self._heads.count(targets_bt)

    def before_update(self, gradients: list[Tensor], norm: Tensor) -> tuple[Any, Any, Any]:
        joined, clip = self._mesh, self._clip
        self._values, self._units = [], []
        if clip.kind == "per_group":
            pairs = zip(self._parameters, self._groups, strict=True)
            groups = [group for p, group in pairs if p.grad is not None]
            limits = [limit.max_norm for limit in clip.limits]
            after, clipped, self._values = rules.clip_groups(joined, gradients, groups, limits)
            return after, clipped, None
        if clip.kind == "adaptive":
            weights = [p for p in self._parameters if p.grad is not None]
            clipped, counted = rules.clip_units(joined, weights, clip.ratio)
            self._units = list(counted)
            return mesh.global_norm(joined, gradients), clipped, None
        if clip.kind == "value" and clip.max_value is not None:
            after, clipped, largest = rules.clip_values(joined, gradients, clip.max_value)
            self._values = [largest]
            return after, clipped, None
        if self._update is not None:
            self._update.before()
        limit = self.limit.of(norm)
        if self.limit.moving:
            found = math.inf if limit is None else limit
            self._values.append(found if isinstance(found, Tensor) else norm.new_full((), found))
        by_update = optim.clips_in_update(self._optimizers, norm)
        return rules.clip_norm(gradients, norm, limit, by_update)

    def after_update(self, skip: Any, clipped: Any) -> tuple[Any, list[Any]]:
        if self._update is not None:
            clipped, counted = self._update.after(skip)
            self._units = list(counted)
        if self._heads is not None:
            largest, counted = self._heads.after(skip)
            self._values.append(largest)
            self._units += counted
        return clipped, [*self._values, *self._units]
