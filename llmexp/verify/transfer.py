"""`llmexp verify transfer`: check that models of all widths begin to learn alike.

The coordinate check of muP (Yang et al. 2022, arXiv 2203.03466, appendix D.1): models of the same
kind and of several widths make a few steps at a constant rate. How large activations are, and how
far they have moved, must not depend on the width; with the standard parametrization it does.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from llmexp.models.common import LanguageModel
from llmexp.settings.config import Config
from llmexp.settings.convert import with_knobs
from llmexp.settings.values import refuse
from llmexp.system.fileio import write_json
from llmexp.system.text import aligned, rounded
from llmexp.train.assembly.assemble import assemble
from llmexp.verify.checks import Check, at_most, print_wrapped, width
from llmexp.verify.geometry import ONE_RANK, without_dropout
from llmexp.verify.reference import train_plainly, windows_in_order
from llmexp.verify.runs import shrunk, trial

WIDTHS = (64, 128, 256, 512)
STEPS, SEQUENCES = 10, 8
TOKENS = 32  # of a sequence, at most
# Of a slope: octaves of a figure for each octave of width. Wide models have 0; single layers of
# narrow ones scatter (docs/verify.md).
LIMIT = 0.25
CONTROL = 0.5  # which the largest slope of the standard parametrization must be beyond
STANDARD = {"parametrization": "standard", "base_width": None}
Figures = dict[str, list[list[float]]]  # by layer: for each width what |x| is, and has moved by


def verify(config: Config, path: Path, steps: int | None, shrink: bool) -> list[Check]:
    """Train the models of several widths in this process, and hold the slopes against limits.

    With `shrink` the widest one is left out. Raises ConfigError for a model without a width.
    """
    widths, steps = WIDTHS[: 3 if shrink else 4], steps or STEPS
    short = prepared(config)
    kind = short.model["parametrization"]
    each = f"{steps} steps of {SEQUENCES} sequences of {short.batch.sequence_length} tokens"
    print_wrapped(
        f"{kind}, widths {', '.join(map(str, widths))}: {short.model['n_layers']} layers, {each}, "
        f"{widths[-1]} / width seeds, constant rate {short.optimizer['lr']:g}"
    )
    found = figures(short, widths, steps)
    control = None
    if kind != "standard":
        control = figures(with_knobs(short, model=STANDARD), widths, steps)
    print(table(found, control, widths), flush=True)
    both = {kind: found, "standard": control or found}
    write_json(path / "transfer.json", {"widths": widths, **both})
    checks = [
        check_slopes("mean |activation| against width: largest slope", found, widths, 0),
        check_slopes("mean |change of activation|: largest slope", found, widths, 1),
    ]
    if control is None:
        way = "give model.parametrization=mup model.base_width=256 to check that against it"
        what = "no control: the standard parametrization is the control itself"
        checks.append(Check(what, None, note=way))
        return checks
    worst, layer = largest(control, widths, 1)
    what = "control: the standard parametrization fails, largest slope of the change"
    checks.append(Check(what, worst > CONTROL, worst, f"above {CONTROL}", layer))
    return checks


def prepared(config: Config) -> Config:
    """Return the solved config of a small, short run on one rank, at a constant rate.

    It has at most 2 layers and 32 tokens a sequence, and neither dropout nor clipping. Raises
    ConfigError for a model that is not one of ours.
    """
    solved = assemble(with_knobs(config, parallelism=ONE_RANK)).config
    length = min(TOKENS, solved.batch.sequence_length)
    solved = with_knobs(solved, optimizer={"rule": "none", "reference": {}, "exponents": {}})
    parts = assemble(config := without_dropout(shrunk(solved)))
    with torch.device("meta"):
        model = parts.build_model()
    if not (isinstance(model, LanguageModel) and model.is_ours()):
        target = config.model["_target_"]
        text = "verify transfer widens GPT-2, Llama and their relatives only"
        raise refuse("model._target_", target, text, "llmexp.models.gpt2.GPT2")
    heads = math.gcd(int(config.model["n_heads"]), WIDTHS[0] // 2)  # of an even width
    sizes: dict[str, Any] = {"n_heads": heads, "init_from": None, "size": None, "depth": None}
    sizes |= {"shape_rule": None, "parametrization": "standard"} | {
        k: v for k, v in config.model.items() if k in STANDARD
    }
    if "n_kv_heads" in config.model:
        sizes |= {"n_kv_heads": math.gcd(heads, int(config.model["n_kv_heads"])), "head_dim": None}
    others = ("gradient_accumulation_steps", "real_batch_size", "tokens_per_step", "ramp")
    open_batch: dict[str, Any] = dict.fromkeys(others)
    kind = "fp64" if parts.precision == "fp64" else "fp32"
    constant = {"_target_": "llmexp.update.schedule.constant", "warmup_steps": 0}
    return dataclasses.replace(
        with_knobs(
            config,
            model=sizes,
            batch=open_batch | {"micro_batch_size": SEQUENCES, "sequence_length": length},
            precision={"kind": kind},
            train={"compile": False},
            clip={"kind": "none", "qk_limit": None},
        ),
        schedule=constant,
    )


def figures(config: Config, widths: Sequence[int], steps: int) -> Figures:
    """Return each layer's mean |activation| after the steps and mean |change|, for each width.

    All see the same batches. Narrow models begin with more seeds: as many features are seen of
    each width.
    """
    found: Figures = {}
    windows = windows_in_order(assemble(trial(config, steps)), [SEQUENCES] * steps)
    inner = config.model["d_ff"] / config.model["d_model"]
    for w in widths:
        sizes = {"d_model": w, "d_ff": max(1, round(inner * w))}
        seen: dict[str, list[list[float]]] = {}
        for seed in range(widths[-1] // w):
            knobs = {"train": {"seed": config.train.seed + seed}, "model": sizes}
            for layer, pair in moved(with_knobs(trial(config, steps), **knobs), windows).items():
                seen.setdefault(layer, []).append(pair)
        for layer, pairs in seen.items():
            means = np.mean(pairs, axis=0).tolist()
            for values, mean in zip(found.setdefault(layer, [[], []]), means, strict=True):
                values.append(mean)
    return found


def moved(config: Config, windows: Sequence[Tensor]) -> dict[str, list[float]]:
    """Train one model; return [mean |activation|, mean |change|] of its layers, on one batch."""
    parts = assemble(config)
    model: Any = parts.new_model().to(parts.device)
    tokens = windows[0][:, :-1].to(parts.device)
    before = activations(model, tokens)
    train_plainly(parts, model.train(), windows, config.data.get("ignore_id"))
    after = activations(model.eval(), tokens)
    return {
        layer: [float(x.abs().mean()), float((x - before[layer]).abs().mean())]
        for layer, x in after.items()
    }


@torch.no_grad()
def activations(model: Any, tokens: Tensor) -> dict[str, Tensor]:
    """Return the output of the embedding, of each part of each block, of each block, and logits."""
    found: dict[str, Tensor] = {}
    layers: dict[str, nn.Module] = {"token_embedding": model.token_embedding}
    for number, block in enumerate(model.blocks):
        name = f"blocks.{number}"
        layers |= {f"{name}.attention": block.attention, f"{name}.mlp": block.mlp, name: block}

    def keep(layer: str) -> Any:
        return lambda module, inputs, output: found.update({layer: output.double()})

    handles = [module.register_forward_hook(keep(layer)) for layer, module in layers.items()]
    try:
        found["logits"] = model(tokens).double()
    finally:
        for handle in handles:
            handle.remove()
    return {layer: found[layer] for layer in [*layers, "logits"]}


def slope(widths: Sequence[int], values: Sequence[float]) -> float:
    """Return the slope of a line through log2 value over log2 width; nan for a value of 0."""
    if not all(value > 0 and math.isfinite(value) for value in values):
        return math.nan
    return float(np.polyfit(np.log2(widths), np.log2(values), 1)[0])


def largest(found: Figures, widths: Sequence[int], which: int) -> tuple[float, str]:
    """Return the slope that is furthest from 0, and its layer; one that is none is further.

    Logits have none by their size: those of first weights, which no step has made, fall with the
    root of the width by design.
    """
    slopes = {layer: abs(slope(widths, pair[which])) for layer, pair in found.items()}
    if which == 0:
        del slopes["logits"]
    layer = max(slopes, key=lambda name: math.inf if math.isnan(slopes[name]) else slopes[name])
    return slopes[layer], layer


def check_slopes(what: str, found: Figures, widths: Sequence[int], which: int) -> Check:
    worst, layer = largest(found, widths, which)
    return at_most(what, worst, LIMIT, layer)


def table(found: Figures, control: Figures | None, widths: Sequence[int]) -> str:
    """Return the figures at the first and the last width, and the slopes over all of them."""
    ends = [f"at {widths[0]}", f"at {widths[-1]}", "slope"]
    head = [["", "|x|", "", "", "|change|", "", ""], ["layer", *ends, *ends]]
    rows = []
    for layer, pair in found.items():
        cells = [layer]
        for values in pair:
            cells += [rounded(values[0]), rounded(values[-1]), f"{slope(widths, values):+.3f}"]
        rows.append(cells)
    if control is not None:
        head[0] += ["standard", ""]
        head[1] += ["|x|", "|change|"]
        for cells in rows:
            cells += [f"{slope(widths, values):+.3f}" for values in control[cells[0]]]
    return aligned([*head, *rows], 1, width())
