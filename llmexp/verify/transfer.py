"""`llmexp verify transfer`: check that models of all widths begin to learn alike.

The coordinate check of muP (Yang et al. 2022, arXiv 2203.03466, appendix D.1): models of the same
kind and of several widths make a few steps at a constant rate. How large activations are, and how
far they have moved, must not depend on the width; with the standard parametrization it does.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmexp.config.convert import with_knobs
from llmexp.config.sections import Clip, Config
from llmexp.config.values import refuse
from llmexp.models.common import LanguageModel
from llmexp.system.fileio import write_json
from llmexp.system.text import aligned, columns, rounded
from llmexp.train.assembly.assemble import assemble
from llmexp.verify.checks import Check, at_most, print_wrapped
from llmexp.verify.geometry import ONE_RANK, without_dropout
from llmexp.verify.reference import train_plainly, windows_in_order
from llmexp.verify.runs import shrunk, trial

WIDTHS = (64, 128, 256, 512)
STEPS, SEQUENCES = 10, 8
_TOKENS = 32  # of a sequence, at most
_SEEDS = 8  # of each width: figures of one seed scatter by a third of an octave, at all alike
# Of a slope: octaves of a figure for each octave of width. What mup leaves out is the width or its
# root, 1 or 0.5; layers of narrow models have up to 0.12, and 8 seeds scatter by 0.08.
LIMIT, CONTROL = 0.4, 0.5
LAYERS = re.compile(r"|token_embedding|blocks\.\d+(\.attention|\.mlp)?")
STANDARD = {"parametrization": "standard", "base_width": None}
_Figures = dict[str, Any]  # by layer: what |x| is for each width, and what it has moved by


def verify(config: Config, path: Path, steps: int | None, shrink: bool) -> list[Check]:
    """Hold models of several widths against limits; with `shrink` without the widest one."""
    widths, steps = WIDTHS[: 3 if shrink else 4], steps or STEPS
    short = prepared(config)
    kind = short.model["parametrization"]
    print_wrapped(
        f"{kind}, widths {', '.join(map(str, widths))}: {short.model['n_layers']} layers, {steps} "
        f"steps of {SEQUENCES} sequences of {short.batch.sequence_length} tokens, {_SEEDS} seeds "
        f"of each, constant rate {short.optimizer['lr']:g}"
    )
    found = {kind: _figures(short, widths, steps)}
    if kind != "standard":
        found["standard"] = _figures(with_knobs(short, model=STANDARD), widths, steps)
    slope = {k: slopes_over_width(of, widths) for k, of in found.items()}
    print(_table(found, slope, widths), flush=True)
    write_json(path / "transfer.json", {"widths": widths, **found})
    worst, _, layer = largest(slope["standard"], 1)
    what = "control: the standard parametrization fails, largest slope of the change"
    control = Check(what, worst > CONTROL, worst, f"above {CONTROL}", layer)
    if kind == "standard":
        way = "give model.parametrization=mup model.base_width=256 to check that against it"
        control = Check("no control: the standard parametrization is it", None, note=way)
    return [
        at_most("mean |activation| against width: largest slope", *largest(slope[kind], 0)),
        at_most("mean |change of activation|: largest slope", *largest(slope[kind], 1)),
        control,
    ]


def prepared(config: Config) -> Config:
    """Return the solved config of a small run at a constant rate, without dropout and clipping.

    Raises ConfigError for a model that is not one of ours.
    """
    solved = assemble(with_knobs(config, parallelism=ONE_RANK)).config
    solved = with_knobs(solved, optimizer={"rule": "none", "reference": {}, "exponents": {}})
    parts = assemble(config := without_dropout(shrunk(solved)))
    with torch.device("meta"):
        model = parts.build_model()
    if not (isinstance(model, LanguageModel) and model.is_ours()):
        text = "verify transfer widens GPT-2, Llama and their relatives only"
        raise refuse(
            "unsupported",
            "model._target_",
            config.model["_target_"],
            text,
            "llmexp.models.gpt2.GPT2",
        )
    heads = math.gcd(int(config.model["n_heads"]), WIDTHS[0] // 2)  # of an even width
    one_number = dict.fromkeys(("init_from", "size", "depth", "shape_rule"))
    sizes: dict[str, Any] = {**STANDARD, **config.model, **one_number, "n_heads": heads}
    if "n_kv_heads" in sizes:
        sizes |= {"n_kv_heads": math.gcd(heads, int(sizes["n_kv_heads"])), "head_dim": None}
    others = ("gradient_accumulation_steps", "real_batch_size", "tokens_per_step", "ramp")
    batch: dict[str, Any] = {"micro_batch_size": SEQUENCES, **dict.fromkeys(others)}
    batch["sequence_length"] = min(_TOKENS, solved.batch.sequence_length)
    kind = "fp64" if parts.precision == "fp64" else "fp32"
    small = with_knobs(config, model=sizes, batch=batch, precision={"kind": kind})
    small = with_knobs(small, train={"compile": False})
    constant = {"_target_": "llmexp.optim.schedule.constant", "warmup_steps": 0}
    return dataclasses.replace(small, schedule=constant, clip=Clip(kind="none"))


def _figures(config: Config, widths: Sequence[int], steps: int) -> _Figures:
    """Return each layer's mean |activation| after the steps and mean |change|, for each width.

    These are means over equally many seeds, of weights and of batches.
    """
    inner, found = config.model["d_ff"] / config.model["d_model"], []
    for w in widths:
        sizes = {"d_model": w, "d_ff": max(1, round(inner * w))}
        seeds = [{"seed": config.train.seed + i} for i in range(_SEEDS)]
        runs = [moved(trial(config, steps, model=sizes, train=seed), steps) for seed in seeds]
        found.append({layer: np.mean([r[layer] for r in runs], axis=0) for layer in runs[0]})
    return {layer: np.stack([of[layer] for of in found], axis=1).tolist() for layer in found[0]}


def moved(config: Config, steps: int) -> dict[str, tuple[float, float]]:
    """Train one model; return mean |activation| and mean |change| of its layers, on one batch."""
    parts = assemble(config)
    model: Any = parts.new_model().to(parts.device)
    windows = windows_in_order(parts, [SEQUENCES] * steps)
    tokens = windows[0][:, :-1].to(parts.device)
    before = activations(model, tokens)
    train_plainly(parts, model, windows, config.data.get("ignore_id"))
    after = activations(model.eval(), tokens).items()
    return {k: (float(x.abs().mean()), float((x - before[k]).abs().mean())) for k, x in after}


@torch.no_grad()
def activations(model: Any, tokens: Tensor) -> dict[str, Tensor]:
    """Return the output of the embedding, of each part of each block, of each block, and logits."""
    found: dict[str, Tensor] = {}

    def keep(layer: str) -> Any:
        return lambda module, inputs, output: found.update({layer: output.double()})

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if LAYERS.fullmatch(name):
                hooks.enter_context(module.register_forward_hook(keep(name or "logits")))
        model(tokens)
    return found


def slopes_over_width(found: _Figures, widths: Sequence[int]) -> _Figures:
    """Return the slopes of lines through log2 figures over log2 width; not finite for a 0."""
    x = np.log2(widths) - np.log2(widths).mean()
    with np.errstate(divide="ignore", invalid="ignore"):
        return {k: (x * np.log2(pair)).sum(axis=1) / (x**2).sum() for k, pair in found.items()}


def largest(slope: _Figures, which: int) -> tuple[float, float, str]:
    """Return the slope of sizes (0) or changes (1) furthest from 0, the limit, and the layer.

    Not by the size of logits: that of first weights falls with the root of the width by design.
    """
    found = {k: abs(float(pair[which])) for k, pair in slope.items() if which or k != "logits"}
    worst = max(found, key=lambda layer: np.nan_to_num(found[layer], nan=np.inf))
    return found[worst], LIMIT, worst


def _table(found: dict[str, _Figures], slope: dict[str, _Figures], widths: Sequence[int]) -> str:
    """Return the figures at the first and the last width, and the slopes over all of them."""
    low, *ends = str(widths[0]), str(widths[-1]), "slope"
    (kind, of_kind), *control = found.items()
    more = ["standard |x|", "|change|"] if control else []
    rows = [["layer", f"|x| {low}", *ends, f"|change| {low}", *ends, *more]]
    for layer, pair in of_kind.items():
        row = [layer]
        for values, own in zip(pair, slope[kind][layer], strict=True):
            row += [rounded(values[0]), rounded(values[-1]), f"{own:+.3f}"]
        rows.append(row + [f"{of:+.3f}" for of in slope["standard"][layer] if control])
    return aligned(rows, 1, columns())
