"""`llmexp verify geometry`: check that however a window is cut, a run computes the same.

The same sequences, with masked targets and a tail that leaves a rank without rows, as one batch, as
accumulation, in the config's own cut and over two ranks; each held against a run written out in
plain torch and float64, in float64 and in the config's own precision.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from llmexp import features
from llmexp.checkpoint import loading
from llmexp.checkpoint.folders import checkpoint_folder
from llmexp.run.batch import shared_sequences
from llmexp.runs import rundir
from llmexp.settings.config import Config
from llmexp.settings.convert import with_knobs
from llmexp.settings.values import ConfigError, refuse
from llmexp.settings.variables import fill
from llmexp.system.text import first_of
from llmexp.train.assembly.assemble import Parts, assemble
from llmexp.verify.checks import Check, print_wrapped
from llmexp.verify.reference import (
    Followed,
    Roundoff,
    draws_random_numbers,
    errors,
    targets_of,
    train_plainly,
    windows_in_order,
)
from llmexp.verify.runs import (
    of_features,
    ramp_over,
    read_run_rows,
    shrunk,
    train_folder,
    trial,
    window_sizes,
)
from llmexp.verify.tolerance import (
    FLOOR,
    MARGIN,
    NO_FLOOR,
    Off,
    checks_of_run,
    off_from,
    tolerance_of,
)

_STEPS = 4
# of the run that accumulates most: with one sequence each a large batch would take for ever
MOST_MICRO_BATCHES = 64


@dataclass(frozen=True)
class WindowCut:
    """One way to compute the same windows."""

    name: str
    micro_batch_size: int
    parallelism: dict[str, Any]


ONE_RANK = {
    "kind": "single", "nproc_per_node": 1, "nnodes": 1,
    "tensor_parallel_size": None, "sequence_parallel": False, "replicate_size": None,
}  # fmt: skip
TWO_RANKS = ONE_RANK | {"kind": "ddp", "nproc_per_node": 2}


def verify(config: Config, path: Path, steps: int | None, shrink: bool) -> list[Check]:
    """Make the runs in folders under `path` and compare them.

    Raises ConfigError where they cannot be made.
    """
    config, steps = without_dropout(shrunk(config) if shrink else config), steps or _STEPS
    if (labels := config.data.get("train_labels")) is not None:
        text = "the reference of verify reads no labels"
        raise refuse("unsupported", "data.train_labels", labels, text, "null")
    for prepared in features.offered("verify", "prepared"):
        config = prepared(config, steps)
    own = assemble(config)
    shared = shared_sequences(own.config.batch)
    real = real_batch(shared)  # of all stages, where there is a ramp
    sizes = window_sizes(own.config.batch, steps, real // shared)
    tail = sizes[-1] // 2 - 1  # so the second half of the ranks has no rows in it
    length = own.run.sequence_length
    planned = one_batch_plan(config, sizes, real, tail)
    parts = assemble(in_precision(planned, "fp64", own.precision))
    windows = windows_in_order(parts, [*sizes[:-1], tail])
    ignore_id, checks = masked_id(windows, own.config.data.get("ignore_id"))
    planned = with_knobs(planned, data={"ignore_id": ignore_id})
    print_wrapped(describe_windows(windows, ignore_id, parts.document_end))
    refuse_random(parts, windows[0][:1, :-1])

    cuts, left_out = cuts_of(own, real, sizes)
    kinds = ["fp64", *({own.precision} - {"fp64"})]
    for kind in kinds:
        for cut in cuts:
            print(f"{kind}, {cut.name}", flush=True)
            batch = {"micro_batch_size": cut.micro_batch_size, "gradient_accumulation_steps": None}
            run = in_precision(planned, kind, own.precision)
            run = with_knobs(run, batch=batch, parallelism=cut.parallelism)
            train_folder(_run_folder(path, kind, cut), run)

    start = read_parameters(parts, _run_folder(path, "fp64", cuts[0]), 0)

    def reference(off: Roundoff | None = None) -> Followed:
        return train_plainly(parts, model_at(parts, start), windows, ignore_id, off)

    print("the reference", flush=True)
    want = reference()
    trained = [name for name, p in start.named_parameters() if p.requires_grad]
    for kind in kinds:
        found = [run_beside(parts, _run_folder(path, kind, cut), start, want) for cut in cuts]
        limits = FLOOR
        if kind != "fp64" or any(off.beyond(FLOOR) for off in found):
            rounding = errors(kind, max(sizes) * length)
            print_wrapped(
                f"{kind}: allowed is {MARGIN:g} x what its rounding does to the reference"
            )
            limits = tolerance_of(
                reference, want, start, rounding, FLOOR if kind == "fp64" else NO_FLOOR
            )
        for cut, off in zip(cuts, found, strict=True):
            checks += checks_of_run(f"{kind}, {cut.name}", off, limits, 3 * steps + len(trained))
    return checks + left_out


def one_batch_plan(config: Config, sizes: Sequence[int], real: int, tail: int) -> Config:
    """Return the config as a run of one batch a step, of which the last has `tail` sequences.

    Steps of a ramp, which have `sizes`, are cut into batches of `real` sequences, as all can be.
    """
    length = config.batch.sequence_length
    tokens = (sum(sizes[:-1]) + tail) * length
    batch = {"gradient_accumulation_steps": 1, "real_batch_size": real, "tokens_per_step": None}
    tried = trial(
        config,
        len(sizes),
        batch={"micro_batch_size": real}
        | (batch if config.batch.ramp is None else ramp_over(sizes, length)),
        train={"max_steps": None, "max_tokens": tokens, "tail": "keep", "eval_tokens": length},
        # a skipped overflow would prove nothing
        precision={"init_scale": min(config.precision.init_scale, 1024.0)},
        parallelism=ONE_RANK,
    )
    return of_features(tried, "unskipped")


def in_precision(config: Config, kind: str, own: str) -> Config:
    """Return the config in a precision.

    It is compiled only in its own: compiling changes nothing in float64 but the time.
    """
    compiled = kind == own and config.train.compile
    return with_knobs(config, precision={"kind": kind}, train={"compile": compiled})


def _run_folder(path: Path, kind: str, cut: WindowCut) -> Path:
    return path / f"{kind}-{cut.name.partition(' (')[0].replace(' ', '_')}"


def real_batch(own: int) -> int:
    """Return the smallest multiple of the config's batch that two ranks share and leave a tail of.

    It is even, and at least 4.
    """
    return next(own * k for k in range(1, 5) if own * k >= 4 and own * k % 2 == 0)


def cuts_of(own: Parts, real: int, sizes: Sequence[int]) -> tuple[list[WindowCut], list[Check]]:
    """Return the cuts to compare, and checks that say which cannot be made here.

    `sizes`: of the steps, all multiples of `real`.
    """
    run, layout = own.run, own.run.layout

    def steps_of(micro: int, ranks: int = 1) -> str:
        counts = sorted({size // (micro * ranks) for size in sizes})
        return f"{micro} x {' to '.join(map(str, dict.fromkeys((counts[0], counts[-1]))))}"

    smallest = next(
        m for m in range(1, real + 1) if real % m == 0 and max(sizes) // m <= MOST_MICRO_BATCHES
    )
    cuts = [
        WindowCut(f"one batch ({steps_of(real)})", real, ONE_RANK),
        WindowCut(f"accumulation ({steps_of(smallest)})", smallest, ONE_RANK),
    ]
    left_out: list[Check] = []
    micro, kind, dp = run.micro_batch_size, own.config.parallelism.kind, run.dp_size
    if layout.nnodes > 1:
        text = f"the config's own {layout.nnodes} hosts cannot be started from here"
        left_out.append(Check(f"{kind} over {run.world_size} ranks", None, note=text))
    elif run.world_size > 1 or micro not in (smallest, real):
        ranks = f" x {run.world_size} ranks, {kind}" if run.world_size > 1 else ""
        shared = {key: getattr(own.config.parallelism, key) for key in ONE_RANK}
        cuts.append(WindowCut(f"own cut ({steps_of(micro, dp)}{ranks})", micro, shared))
    half = real // 4 if real % 4 == 0 else real // 2
    if own.device.type == "cuda" and torch.cuda.device_count() < 2:
        text = "there is one CUDA device; train.device=cpu shows it on a CPU"
        left_out.append(Check("two ranks", None, note=text))
    elif (kind, layout.nproc_per_node, layout.nnodes) != ("ddp", 2, 1):
        name = f"two ranks ({steps_of(half, 2)} x 2 ranks, ddp)"
        cuts.append(WindowCut(name, half, TWO_RANKS))
    return cuts, left_out


def without_dropout(config: Config) -> Config:
    """Dropout draws by rank and micro-batch; without it the cuts can be compared."""
    off = {
        key: 0.0
        for key, value in config.model.items()
        if "dropout" in key and isinstance(fill(value, f"model.{key}"), (int, float))
    }
    return with_knobs(config, model=off)


def refuse_random(parts: Parts, tokens: Tensor) -> None:
    """Raise ConfigError for a model that draws random numbers all the same."""
    model = parts.new_model()
    if not draws_random_numbers(model, tokens):
        return
    dropouts = [(n, m) for n, m in model.named_modules() if "Dropout" in type(m).__name__]
    named = [name for name, module in dropouts if getattr(module, "p", None)]
    where = f" in {first_of(named, 4)}" if named else ""
    raise ConfigError(
        "unsupported",
        f"model._target_={parts.config.model['_target_']}: draws random numbers{where}, so no two "
        "cuts compute the same; a knob with `dropout` in its name would be set to 0 here; for "
        "example model.dropout=0.1",
    )


def masked_id(windows: Sequence[Tensor], own: int | None) -> tuple[int | None, list[Check]]:
    """Return the id whose targets are masked: the config's where it occurs, else a frequent one.

    That is the most frequent one that at most half of the targets have. None, with a check that
    says so, where there is no such id.
    """
    targets = torch.cat([w[:, 1:].flatten() for w in windows])
    counts = torch.bincount(targets)
    if own is not None and own < len(counts) and counts[own]:
        return own, []
    counts[counts * 2 > len(targets)] = 0
    if not counts.any():
        text = "one id makes up more than half of the data, alone"
        return None, [Check("masked targets", None, note=text)]
    return int(counts.argmax()), []


def describe_windows(
    windows: Sequence[Tensor], ignore_id: int | None, document_end: int | None
) -> str:
    length = windows[0].shape[1] - 1
    counted = [(targets_of(w, ignore_id, document_end) != -100).sum(1) for w in windows]
    valid = torch.cat(counted)
    many = " to ".join(dict.fromkeys(str(len(windows[i])) for i in (0, -2)))
    return (
        f"{len(windows)} steps of {many} sequences of {length} tokens, "
        f"{len(windows[-1])} in the last; targets with id {ignore_id} masked: {int(valid.min())} "
        f"to {int(valid.max())} valid in a sequence"
    )


def read_parameters(parts: Parts, path: Path, step: int) -> nn.Module:
    """Return a plain float64 model on the CPU with the tensors of a run's checkpoint.

    Any layout may have saved it.
    """
    model = parts.new_model()
    try:
        loaded = loading.read_checkpoint(checkpoint_folder(path / rundir.CHECKPOINTS, step))
        loading.restore_model(loaded, model)
    except loading.CheckpointError as error:
        raise ConfigError(error.kind, f"{path}: {error}") from None
    return model


def model_at(parts: Parts, start: nn.Module) -> nn.Module:
    """Return another such model with the same tensors, to be trained on the run's device."""
    model = parts.new_model()
    model.load_state_dict(start.state_dict())
    return model.to(parts.device)


def run_beside(parts: Parts, path: Path, start: nn.Module, want: Followed) -> Off:
    """Return one run beside the reference."""
    steps, found = range(1, len(want.counts) + 1), {r["step"]: r for r in read_run_rows(path)}

    def column(key: str) -> list[Any]:
        return [found.get(step, {}).get(key) for step in steps]

    differing = [f"step {step} is not planned" for step in sorted(found.keys() - set(steps))]
    differing += [f"step {step} is missing" for step in steps if step not in found]
    for key, wanted in (("target_tokens", want.counts), ("lr", want.rates)):
        for step, has, should in zip(steps, column(key), wanted, strict=True):
            if has is None or not math.isclose(has, should, rel_tol=1e-14):
                differing.append(f"{key} of step {step}: {has} for {should}")
    first = dict(read_parameters(parts, path, 0).named_parameters())
    for name, p in start.named_parameters():
        if p.requires_grad and not torch.equal(p, first[name]):
            differing.append(f"first value of {name}")
    run = Followed(column("train/loss"), column("grad_norm"), column("grad_norm_post_clip"))
    if checkpoint_folder(path / rundir.CHECKPOINTS, len(want.counts)).is_dir():
        run.end = dict(read_parameters(parts, path, len(want.counts)).named_parameters())
    return dataclasses.replace(off_from(want, run, start), differing=tuple(differing))
