"""`llmexp next PATH...`: the one command that would tell most about runs."""

from __future__ import annotations

from typing import Annotated

from llmexp.cli.compare import Better, By, Curves, Figure, Filter, MinEffect, Seed, runs_compared
from llmexp.cli.running import Paths, words_in
from llmexp.compare.next_step import Step, propose
from llmexp.compare.strangers import Asked
from llmexp.config.values import knob
from llmexp.scaling.answer import TOP
from llmexp.scaling.narrowing import rung
from llmexp.system.redact import warn


def next_step(
    *paths: Paths,
    min_effect: MinEffect = None,
    predict: Annotated[
        float | None, knob("FLOPs of a ladder's prediction to narrow", 1e16, above=0, below=TOP)
    ] = None,
    figure: Figure = None,
    better: Better = None,
    by: By = (),
    seed: Seed = None,
    curves: Curves = None,
    filter: Filter = None,
) -> Step:
    """Propose the one command that would tell most about runs, with its cost.

    Nothing is started. See docs/compare.md.
    """
    asked = Asked(figure, better, words_in(by), seed, curves, filter)
    found = runs_compared(paths, "next", min_effect=min_effect, asked=asked)
    for problem in found.problems:
        warn(problem)
    step = propose(found)
    if step.rule in ("rest", "wait") or found.foreign:
        return step
    return rung(found, predict) or step
