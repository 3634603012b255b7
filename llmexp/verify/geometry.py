"""`llmexp verify geometry`: check that however a window is cut, a run computes the same.

The same sequences, with masked targets and a tail that leaves a rank without rows, as one batch, as
accumulation, in the config's own cut and over two ranks; each held against a run written out in
plain torch and float64, in float64 and in the config's own precision.

The tolerance is what rounding alone does to that reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from llmexp import features
from llmexp.checkpoint import loading
from llmexp.checkpoint.folders import checkpoint_folder
from llmexp.config.convert import with_knobs
from llmexp.config.sections import Config
from llmexp.config.values import ConfigError, refuse
from llmexp.config.variables import fill
from llmexp.folders import rundir
from llmexp.run.batch import shared_sequences
from llmexp.system.text import first_of
from llmexp.train.assembly.assemble import Parts, assemble
from llmexp.verify.checks import Check, at_most, none_differ, print_wrapped
from llmexp.verify.reference import (
    Errors,
    Followed,
    Roundoff,
    errors,
    passes_differ,
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

_STEPS = 4
# of the run that accumulates most: with one sequence each a large batch would take for ever
MOST_MICRO_BATCHES = 64
Cuts = dict[str, tuple[int, dict[str, Any]]]  # by name: the size of a micro-batch, the parallelism

ONE_RANK = {
    "kind": "single", "nproc_per_node": 1, "nnodes": 1,
    "tensor_parallel_size": None, "sequence_parallel": False, "replicate_size": None,
}  # fmt: skip
TWO_RANKS = ONE_RANK | {"kind": "ddp", "nproc_per_node": 2}
# Roundings that are drawn for a tolerance. Of 2 x 4 deviations (one of each step) the largest is
# rarely below one standard deviation; a run's own, at most as large in the mean, stays within four
# of them but once in 16,000 times.
SAMPLES, MARGIN = 2, 4.0
MEANINGLESS = 0.5  # a relative error that a wrong run may have too
EXACT = ("target_tokens", "lr")  # of the rows, but for 1e-14 of a rate
Off = dict[str, float]  # how far a run is from the reference, by what is compared
# In float64 nothing below these is a difference: about 1e4 unit roundoffs, room for long sums in
# another order.
FLOOR: Off = {
    "loss, relative error": 1e-12,
    "gradient norm, before and after clipping": 1e-12,
    "parameters, of the distance moved": 1e-11,
}


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
    planned = one_batch_plan(config, sizes, real, tail)
    parts = assemble(in_precision(planned, "fp64", own.precision))
    windows = windows_in_order(parts, [*sizes[:-1], tail])
    ignore_id, checks = masked_id(windows, own.config.data.get("ignore_id"))
    planned = with_knobs(planned, data={"ignore_id": ignore_id})
    print_wrapped(describe_windows(windows, ignore_id, parts.document_end))
    refuse_random(parts, windows[0][:1, :-1])

    cuts, left_out = cuts_of(own, real, sizes)
    kinds = dict.fromkeys(("fp64", own.precision))
    folders = {
        (kind, name): path / f"{kind}-{name.partition(' (')[0].replace(' ', '_')}"
        for kind in kinds
        for name in cuts
    }
    for (kind, name), folder in folders.items():
        print(f"{kind}, {name}", flush=True)
        batch = {"micro_batch_size": cuts[name][0], "gradient_accumulation_steps": None}
        run = in_precision(planned, kind, own.precision)
        train_folder(folder, with_knobs(run, batch=batch, parallelism=cuts[name][1]))
    start = read_parameters(parts, next(iter(folders.values())), 0)

    def reference(off: Roundoff | None = None) -> Followed:
        model = parts.new_model()
        model.load_state_dict(start.state_dict())
        return train_plainly(parts, model.to(parts.device), windows, ignore_id, off)

    print("the reference", flush=True)
    want = reference()
    for kind in kinds:
        runs = {
            f"{kind}, {name}": run_beside(parts, folders[kind, name], start, want) for name in cuts
        }
        rounding = errors(kind, max(sizes) * parts.run.sequence_length)
        checks += checks_of_runs(kind, runs, want, start, reference, rounding)
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


def real_batch(own: int) -> int:
    """Return the smallest multiple of the config's batch that two ranks share and leave a tail of.

    It is even, and at least 4.
    """
    return next(own * k for k in range(1, 5) if own * k >= 4 and own * k % 2 == 0)


def cuts_of(own: Parts, real: int, sizes: Sequence[int]) -> tuple[Cuts, list[Check]]:
    """Return the cuts to compare, and checks that say which cannot be made here.

    `sizes`: of the steps, all multiples of `real`.
    """
    run, layout = own.run, own.run.layout

    def named(name: str, micro: int, ranks: int = 1, over: str = "") -> str:
        counts = dict.fromkeys(size // (micro * ranks) for size in (min(sizes), max(sizes)))
        return f"{name} ({micro} x {' to '.join(map(str, counts))}{over})"

    smallest = next(
        m for m in range(1, real + 1) if real % m == 0 and max(sizes) // m <= MOST_MICRO_BATCHES
    )
    cuts: Cuts = {
        named("one batch", real): (real, ONE_RANK),
        named("accumulation", smallest): (smallest, ONE_RANK),
    }
    left_out: list[Check] = []
    micro, kind = run.micro_batch_size, own.config.parallelism.kind
    if layout.nnodes > 1:
        text = f"the config's own {layout.nnodes} hosts cannot be started from here"
        left_out.append(Check(f"{kind} over {run.world_size} ranks", None, note=text))
    elif run.world_size > 1 or micro not in (smallest, real):
        shared = {key: getattr(own.config.parallelism, key) for key in ONE_RANK}
        several = f" x {run.world_size} ranks, {kind}" * (run.world_size > 1)
        cuts[named("own cut", micro, run.dp_size, several)] = micro, shared
    half = real // 4 if real % 4 == 0 else real // 2
    if own.device.type == "cuda" and torch.cuda.device_count() < 2:
        text = "there is one CUDA device; train.device=cpu shows it on a CPU"
        left_out.append(Check("two ranks", None, note=text))
    elif (kind, layout.nproc_per_node, layout.nnodes) != ("ddp", 2, 1):
        cuts[named("two ranks", half, 2, " x 2 ranks, ddp")] = half, TWO_RANKS
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
    """Raise ConfigError for a model of which no two passes are the same."""
    model = parts.new_model()
    if not passes_differ(model, tokens):
        return
    dropouts = [(n, m) for n, m in model.named_modules() if "Dropout" in type(m).__name__]
    named = [name for name, module in dropouts if getattr(module, "p", None)]
    text = "two passes over the same tokens differ, and so would any two cuts"
    if named:
        text += f"; it drops out in {first_of(named, 4)}, where a knob with `dropout` in its name "
        text += "would be set to 0 here"
    raise refuse("unsupported", "model._target_", parts.config.model["_target_"], text)


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
        text = "a single id makes up more than half of the data"
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


def run_beside(parts: Parts, path: Path, start: nn.Module, want: Followed) -> Followed:
    """Return what a run has left of that, and what has to be the same and is not."""
    last, rows = len(want.rows["lr"]), {row["step"]: row for row in read_run_rows(path)}
    steps = range(1, last + 1)
    run = Followed({k: [rows.get(step, {}).get(k) for step in steps] for k in want.rows})
    run.differing += [f"step {step} is not planned" for step in sorted({*rows} - {*steps})]
    run.differing += [f"step {step} is missing" for step in steps if step not in rows]
    for key in EXACT:
        for step, has, should in zip(steps, run.rows[key], want.rows[key], strict=True):
            if has is None or not math.isclose(has, should, rel_tol=1e-14):
                run.differing.append(f"{key} of step {step}: {has} for {should}")
    first = dict(read_parameters(parts, path, 0).named_parameters())
    run.differing += [
        f"first value of {name}"
        for name, p in trained_of(start).items()
        if not torch.equal(p, first[name])
    ]
    if checkpoint_folder(path / rundir.CHECKPOINTS, last).is_dir():
        run.end = dict(read_parameters(parts, path, last).named_parameters())
    return run


def checks_of_runs(
    kind: str,
    runs: Mapping[str, Followed],
    want: Followed,
    start: nn.Module,
    reference: Callable[[Roundoff], Followed],
    rounding: Errors,
) -> list[Check]:
    """Return the checks of runs in a precision beside what `reference` has computed.

    Tolerances are what rounding may do: MARGIN times how far it takes the reference itself, the
    most of SAMPLES tries. In float64 they are at least FLOOR.
    """
    offs = {name: off_from(want, run, start) for name, run in runs.items()}
    limits, note = FLOOR, ""
    if kind != "fp64" or any(not off[key] <= FLOOR[key] for off in offs.values() for key in off):
        print_wrapped(f"{kind}: allowed is {MARGIN:g} x what its rounding does to the reference")
        again = [reference(Roundoff(rounding, 10 * n)) for n in range(SAMPLES)]
        tries = [off_from(want, found, start) for found in again]
        limits, note = {key: MARGIN * max(off[key] for off in tries) for key in FLOOR}, "derived"
        if kind == "fp64":
            limits = {key: max(limits[key], FLOOR[key]) for key in FLOOR}
            note = "the larger one of derived and a floor"
    checks, compared = [], (1 + len(EXACT)) * len(want.rows["lr"]) + len(trained_of(start))
    for name, off in offs.items():
        same = f"{name}: steps, target counts, rates, first parameters"
        checks.append(none_differ(same, runs[name].differing, compared))
        checks += [within_limit(f"{name}: {key}", off[key], limits[key], note) for key in FLOOR]
    return checks


def off_from(want: Followed, found: Followed, start: nn.Module) -> Off:
    """Return how far a run is from the reference; infinitely without parameters at its end."""
    loss, *norms = (
        off_by(found.rows[key], want.rows[key])
        for key in ("train/loss", "grad_norm", "grad_norm_post_clip")
    )
    parameters = moved_off(start, found.end, want.end) if found.end else math.inf
    return dict(zip(FLOOR, (loss, max(norms), parameters), strict=True))


def within_limit(what: str, found: float, limit: float, note: str = "") -> Check:
    """Check a limit; one as large as the thing itself proves nothing, since anything keeps it."""
    if math.isfinite(limit) and limit < MEANINGLESS:
        return at_most(what, found, limit, note)
    why = "rounding alone moves the reference this far"
    notes = filter(None, (note, f"{why}, so it shows nothing"))
    return Check(what, None, found, limit, "; ".join(notes))


def trained_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def off_by(found: Sequence[float | None], want: Sequence[float | None]) -> float:
    """Return the largest relative error.

    It is infinite where only one of the two has a figure, or a figure is not finite.
    """
    worst = 0.0
    for a, b in zip(found, want, strict=True):
        if a is None or b is None or not math.isfinite(a - b):
            worst = worst if a is b is None else math.inf
        elif a != b:
            worst = max(worst, abs(a - b) / abs(b) if b else math.inf)
    return worst


def moved_off(start: nn.Module, found: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """||found - want|| / ||start - want|| over all trained parameters."""
    with torch.no_grad():
        own = trained_of(start)
        error = math.fsum(float((found[name] - want[name]).square().sum()) for name in own)
        moved = math.fsum(float((p - want[name]).square().sum()) for name, p in own.items())
    if not moved:
        return math.inf if error else 0.0
    off = math.sqrt(error / moved)
    # nan is less than nothing, so the largest of several would miss it
    return off if math.isfinite(off) else math.inf
