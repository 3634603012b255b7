"""Declare a rule of clipping: what is known of it without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ClipRule:
    """Hold what knobs and tables say of a rule."""

    limit: str = ""  # the knob of the section clip that is its limit
    units: str = ""  # what it clips one by one, where that is no step
    by_steps: bool = True  # by a norm of the gradient, so that a step is clipped or not
    max_norm: bool = False  # that knob bounds its limit
