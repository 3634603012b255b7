"""Say how long a run takes and what that costs, from the times of its steps. Standard library."""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from llmexp import features
from llmexp.config.labels import plural
from llmexp.config.sections import Config
from llmexp.run import Run
from llmexp.system.devices import Device
from llmexp.system.text import duration

START_S = 10.0  # of a process until it trains, where that was not measured: imports, data, model


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds that the parts of a run take, each once.

    `import_s`: of a process of which the runs of a sweep are forks, once for all; `first_s`: what
    the first steps take beyond others; `timed_steps` 0: nothing was measured.
    """

    step_s: float
    timed_steps: int = 0
    import_s: float = 0.0
    start_s: float = 0.0
    first_s: float = 0.0
    row_s: float = 0.0
    evaluation_s: float = 0.0
    save_s: float = 0.0
    end_s: float = 0.0
    acts: dict[str, float] = field(default_factory=dict)  # of features, by their names in a run

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Times:
        """Return the times that a calibration has found."""
        names = {known.name for known in dataclasses.fields(cls)}
        acts = {name: found[f"{name}_s"] for name in words_of_acts() if f"{name}_s" in found}
        return cls(**{key: found[key] for key in names & found.keys()}, acts=acts)

    def each(self) -> dict[str, float]:
        """Return all times by their names."""
        known = dataclasses.asdict(self)
        acts = known.pop("acts")
        return known | {f"{name}_s": acts.get(name, 0.0) for name in words_of_acts()}


def words_of_acts() -> dict[str, str]:
    """Return what features do between the steps, by name: sample, and what that is called: text."""
    return features.merged("forecast", "WORDS")


def estimated(
    run: Run, device: Device, precision: str, share: float, again: float = 0.0, moved: int = 0
) -> Times | None:
    """Return the times of a run at a `share` of the device's peak rate.

    None where that or the model's operations are not known. `again`: what a step computes again, as
    a share of its operations; `moved`: bytes of a micro-batch over the bus, which it waits for.
    """
    flops, peak = run.flops_per_token, device.tflops.get(precision)
    if flops is None or peak is None:
        return None
    rate = share * peak * 1e12 * run.world_size
    # a forward pass is a third of a step that computes nothing again
    return Times(
        step_s=run.tokens_per_step * flops * (1 + again) / rate
        + run.gradient_accumulation_steps * moved / (device.bus * 1e9),
        evaluation_s=run.eval_sequences * run.sequence_length * flops / 3 / rate,
        start_s=START_S,
    )


def part_counts(run: Run, config: Config) -> dict[str, int]:
    """Return how often each part of a run comes. Checkpoints by time are not counted."""
    chosen, saving, first = config.train, config.checkpoint, run.first_step
    steps = min(run.max_steps, chosen.stop_step or run.max_steps)

    def times(every: int | None) -> int:
        return steps // every - first // every if every else 0

    def at_last(every: int | None) -> bool:
        return every is not None and steps % every == 0

    evaluations = run.evaluations(chosen, first, steps - 1) + 1  # the last one comes at the end
    kept = saving.every, saving.keep_every
    saves = sum(map(times, kept))
    if saving.every and saving.keep_every:
        saves -= times(math.lcm(saving.every, saving.keep_every))
    ends = (saving.last or steps < run.max_steps) and not any(map(at_last, kept))
    return {
        "step": steps - first,
        "row": times(chosen.log_every),
        "evaluation": evaluations,
        "save": saves + ends + (saving.save_initial and not first),
        **features.merged("forecast", "counts", config, times, at_last),
    }


@dataclass(frozen=True)
class Cost:
    """The duration of a run, and what it takes of GPUs.

    `gpu_hours` is None where it needs none, `money` where none has a price.
    """

    times: Times
    counts: dict[str, int]
    tokens_per_sec: float
    duration_s: float
    gpu_hours: float | None
    money: float | None
    mean_step_s: float

    def figures(self) -> dict[str, Any]:
        """Return plain values with their units in their names.

        Money is in the currency of the price.
        """
        found = {
            "duration_s": self.duration_s,
            "tokens_per_sec": self.tokens_per_sec,
            **self.times.each(),
            **{f"{kind}_count": n for kind, n in self.counts.items()},
            "gpu_hours": self.gpu_hours,
            "cost_in_currency_of_price": self.money,
        }
        return {key: value for key, value in found.items() if value is not None}


def cost_of(run: Run, config: Config, times: Times, gpus: int, price: float | None) -> Cost:
    """Return what a run takes. `price`: of an hour of one of its `gpus`."""
    often, each = part_counts(run, config), times.each()
    seconds = times.start_s + times.first_s + times.end_s
    seconds += sum(n * each[f"{kind}_s"] for kind, n in often.items())
    mean_step_s = times.step_s
    if run.ramp:  # a step takes as long as its sequences
        last = run.first_step + often["step"]
        sequences = run.sequences_at(last) - run.sequences_at(run.first_step)
        mean_step_s *= sequences / run.real_batch_size / often["step"]
        seconds += often["step"] * (mean_step_s - times.step_s)
    hours = gpus * seconds / 3600 if gpus else None
    money = None if price is None or hours is None else price * hours
    rate = run.tokens_per_step / times.step_s
    return Cost(times, often, rate, seconds, hours, money, mean_step_s)


def cost_sections(cost: Cost, basis: str) -> list[tuple[str, str]]:
    """Return (label, text) pairs of the banner. `basis`: where the times come from, in words."""
    times, often = cost.times, cost.counts
    mean = "" if cost.mean_step_s == times.step_s else " on average"
    parts = [f"{plural(often['step'], 'step')} of {seconds(cost.mean_step_s)}{mean}"]
    names, each = {"evaluation": "evaluation", **words_of_acts()}, times.each()
    for kind, name in (names | {"save": "checkpoint"}).items():
        if often.get(kind) and (taken := each[f"{kind}_s"]):
            parts.append(f"{plural(often[kind], name)} of {seconds(taken)}")
    if times.start_s:
        parts.append(f"start {seconds(times.start_s + times.first_s)}")
    if times.timed_steps:
        parts.append(f"end {seconds(times.end_s)}")
    # which would be 0.0s
    length = "less than 0.1s" if cost.duration_s < 0.05 else duration(cost.duration_s)
    rows = [
        ("speed", f"{cost.tokens_per_sec:,.0f} tokens/s, {basis}"),
        ("time", f"{length}: {', '.join(parts)}"),
        ("cost", spent(cost.gpu_hours, cost.money)),
    ]
    return [row for row in rows if row[1]]


def spent(gpu_hours: float | None, money: float | None) -> str:
    """Return hours of GPUs and their price in words; "" where there are none."""
    if gpu_hours is None:
        return ""
    paid = "" if money is None else f", {money:,.2f} at plan.price_per_gpu_hour"
    return f"{gpu_hours:,.3g} GPU-hours{paid}"


def seconds(value: float) -> str:
    return f"{value:.3g} s" if value < 100 else duration(value)


def over_slots(durations: Iterable[float], slots: int) -> float:
    """Return the seconds until the last point is through.

    Points start in their order as slots become free.
    """
    free = [0.0] * slots
    for length in durations:
        heapq.heapreplace(free, free[0] + length)
    return max(free)
