"""Describe runs that are not started: the banner, and what is known of memory, time and cost."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from llmexp.config.convert import with_knobs
from llmexp.config.knobs import deciding_work
from llmexp.config.sections import Config
from llmexp.config.values import AUTO, ConfigError, is_ours, refuse
from llmexp.folders import rundir
from llmexp.folders.remembered import MEMORY, remember
from llmexp.forecast import duration, memory
from llmexp.forecast.duration import Times
from llmexp.forecast.fitting import Died, known, measured
from llmexp.forecast.host import HostNeed, host_need, host_rows, host_ways
from llmexp.forecast.planned import NO_MEMORY, NO_TIME, Memory, Planned
from llmexp.forecast.section import PlanKnobs
from llmexp.models.loss import SummedLoss
from llmexp.models.planned import planned_for
from llmexp.models.recompute import recomputed_share
from llmexp.modes.calibration import MOST
from llmexp.modes.micro_batch import cut
from llmexp.run.banner import banner_sections
from llmexp.system import hardware
from llmexp.system.devices import device_named
from llmexp.system.text import one_line
from llmexp.train.assembly.assemble import Cache, Parts, assemble
from llmexp.train.assembly.placement import SAVES_NOTHING
from llmexp.train.assembly.solving import kernel_of

NO_ROOM = "not known, nor what this host has; add plan.memory_gib=16"


class Planner:
    """Plan runs for one device; what runs of one kind have in common is found out once."""

    def __init__(self, plan: PlanKnobs, measure: bool) -> None:
        self._plan, self._measure = plan, measure
        self._device = None if plan.device is None else device_named(plan.device)
        self._cached = Cache()

    def planned(self, config: Config, folder: str) -> Planned:
        """Return the plan of a run. Raises ConfigError."""
        plan, device, cached = self._plan, self._device, self._cached
        own = config
        if plan.device is not None and not self._measure:  # it need not find its device here
            kind = "fp32" if config.precision.kind == "tf32" else config.precision.kind
            on_cpu = {"device": "cpu", "compile": False}
            own = with_knobs(config, train=on_cpu, precision={"kind": kind})
        parts = assemble(own, cached)
        if config.batch.micro_batch_size == AUTO:
            parts = assemble(self._cut(own, parts), cached)
        if device is not None:  # what was measured here is not of it
            parts = dataclasses.replace(parts, run=dataclasses.replace(parts.run, memory=None))
        precision = memory.precision_on(parts, config.precision.kind, device)
        rows = banner_sections(parts.run, folder)
        whole = {"folder": folder, **parts.run.as_dict()}
        if device is not None:
            shown = {"device": f"{device.name}, planned for", "precision": precision}
            rows = [(k, shown.get(k, text)) for k, text in rows if text != SAVES_NOTHING]
            whole |= {"device": "cuda", "device_name": device.name, "precision": precision}
            with planned_for("cuda", device.gib * memory.GIB), torch.device("meta"):
                where = (parts.run.layout, torch.device("cpu"), self._compiled(config))
                loss = SummedLoss(parts.build_model())
                whole["loss_kernel"] = kernel_of(parts.config, loss, *where)
        name = parts.run.device_name
        steps = min(parts.run.max_steps - parts.run.first_step, MOST)
        work = (deciding_work(parts.config, name), precision, config.data, config.tokenizer, steps)
        of_memory = cached(lambda *_: self._memory(parts, config, precision), "memory", *work)
        moved = of_memory.figures.get("memory_bytes", {}).get("moved", 0)
        times, basis = cached(
            lambda *_: self._times(parts, precision, folder, moved), "times", *work
        )
        gpus = parts.run.world_size if device or parts.run.device == "cuda" else 0
        if plan.price_per_gpu_hour is not None and not gpus:
            text = "the run uses no GPU; name one with plan.device=h200, or leave the price out"
            raise refuse("idle_knob", "plan.price_per_gpu_hour", plan.price_per_gpu_hour, text)
        cost = None
        if times is not None:
            cost = duration.cost_of(parts.run, parts.config, times, gpus, plan.price_per_gpu_hour)
            whole["time"] = cost.figures()
        there = torch.cuda.device_count() if parts.run.device == "cuda" else 0
        rows += of_memory.rows
        rows += [("time", basis)] if cost is None else duration.cost_sections(cost, basis)
        solved = parts.config
        if own is not config:  # by which runs differ
            train = {"device": config.train.device, "compile": config.train.compile}
            solved = with_knobs(solved, train=train, precision={"kind": config.precision.kind})
        return Planned(parts.run, solved, rows, whole | of_memory.figures, of_memory, cost, there)

    def _cut(self, config: Config, parts: Parts) -> Config:
        """Return the config with a number in the place of `auto`.

        It is what was found by trying, else what should fit. `parts`: of the run in one piece.
        Raises ConfigError.
        """
        device, limit = self._device, config.batch.memory_gib
        if self._plan.device is None:
            return known(config, parts)
        room = memory.room_of(parts, device, self._plan.memory_gib or limit)
        precision = memory.precision_on(parts, config.precision.kind, device)
        if room is not None:
            forecast = memory.Forecast(parts, precision, room, self._compiled(config))
            if (largest := forecast.largest(forecast.cut, forecast.cut.micro)) is not None:
                return cut(config, largest.micro)
        return cut(config, 1)

    def _compiled(self, config: Config) -> bool:
        """Return whether the run is compiled on the device that it is planned for."""
        wanted = config.train.compile
        if config.parallelism.activation_checkpointing == "offload":
            return False
        return self._device is not None if wanted == AUTO else bool(wanted)

    def _memory(self, parts: Parts, config: Config, precision: str) -> Memory:
        """Return what is known of the memory of a run.

        That is why it is not known where this host hides how much it has, or the model needs memory
        to run.
        """
        plan = self._plan
        if plan.device is None:
            return Memory([] if parts.run.memory else [("memory", NO_MEMORY)], {})
        room = memory.room_of(parts, self._device, plan.memory_gib)
        if room is None:
            return Memory([("memory", NO_ROOM)], {})
        try:
            forecast = memory.Forecast(parts, precision, room, self._compiled(config))
            rows = memory.memory_sections(forecast)
        except Exception as error:  # of a model of the user's, which has to see its values
            if is_ours(parts.config.model["_target_"]):
                raise
            text = f"not known: the model does not run without memory ({one_line(error)})"
            return Memory([("memory", text)], {})
        need, fits_host, more = self._host(forecast, config)
        texts = {
            prefix + label.replace(" ", "_"): text
            for prefix, found in (("", rows), ("host_", more))
            for label, text in found
            if label in ("hint", "would fit")
        }
        rows += more
        needed, fits = forecast.needed(forecast.cut), forecast.fits(forecast.cut)
        figures: dict[str, Any] = {"memory_bytes": forecast.figures()}
        figures |= {"host_bytes": need.figures(), "fits": fits and fits_host, **texts}
        return Memory(rows, figures, needed, fits and fits_host)

    def _host(
        self, forecast: memory.Forecast, config: Config
    ) -> tuple[HostNeed, bool, list[tuple[str, str]]]:
        """Return what ranks take of their host, whether that fits as far as is known, and rows.

        Where nobody has given the host's memory, a run on the CPU is compared with this host, only
        as a warning; the host of another device is not this one.
        """
        plan, cut, on_cpu = self._plan, forecast.cut, self._device is None
        held, process = forecast.footprint(cut), memory.process_bytes(torch.get_num_threads())
        wanted = config.checkpoint.async_
        behind = not on_cpu if wanted == AUTO else wanted is True
        need, waiting = (
            host_need(forecast.parts, cut, held, process, on_cpu, copied)
            for copied in (behind, False)
        )
        there, name = plan.host_gib, "plan.host_gib"
        if there is None and on_cpu:
            found = hardware.memory_bytes(torch.device("cpu"))
            there, name = None if found is None else found / memory.GIB, "this host"
        if there is None:
            return need, True, host_rows(need, None, name, [])
        room = memory.USABLE * there * memory.GIB
        shared = cut.parallelism.kind not in ("single", "ddp", "hsdp")  # more hosts: more copies
        ways = host_ways(need, waiting, room, shared)
        fits = plan.host_gib is None or need.total <= room
        return need, fits, host_rows(need, room, name, ways)

    def _times(
        self, parts: Parts, precision: str, folder: str, moved: int
    ) -> tuple[Times | None, str]:
        """Return the times of a run's parts and where they come from.

        None, and why they are not known, where nothing tells them. `moved`: bytes of a micro-batch
        that go to the host and back. Raises ConfigError.
        """
        share, device, run = self._plan.peak_share, self._device, parts.run
        if self._measure:
            return self._measured(parts, folder)
        if device is None:
            return None, NO_TIME
        kind, again = parts.config.parallelism.activation_checkpointing, 0.0
        if kind not in ("none", "offload") and run.flops_per_token is not None:
            try:
                again = recomputed_share(parts.build_model, kind, run.sequence_length)
            except Exception as error:  # of a model of the user's, which has to see its values
                if is_ours(parts.config.model["_target_"]):
                    raise
                return None, f"not known: what is computed again cannot be counted ({error!r})"
        times = duration.estimated(run, device, precision, share, again, moved)
        if times is None:
            what = "the model" if run.flops_per_token is None else f"{device.name}"
            return None, f"not known: nobody knows the FLOPs of {what} in {precision}"
        peak = device.tflops[precision]
        return times, (
            f"an estimate: {share:.0%} (plan.peak_share) of the peak of {peak:,g} TFLOP/s of "
            f"{device.name} in {precision}; not measured; with a usual start, without saves"
        )

    def _measured(self, parts: Parts, folder: str) -> tuple[Times, str]:
        run = parts.run
        there = hardware.accelerator(parts.device) if run.device == "cuda" else None
        if self._plan.device is not None and there != self._device:
            text = f"--measure times the device of this machine, {run.device_name}"
            raise refuse(
                "conflict", "plan.device", self._plan.device, f"{text}; leave one of them out"
            )
        try:
            disk = rundir.check_writable(Path(folder).absolute().parent)
            found = measured(parts.config, True, disk)
        except Died as death:
            raise ConfigError(
                "failed", f"--measure: the steps of the run failed: {death}"
            ) from None
        kind = deciding_work(parts.config, run.device_name)
        remember(MEMORY, {"peak_bytes": found["peak_bytes"]}, kind)
        times = Times.of(found)
        return times, f"the median of {times.timed_steps} steps that were trained here"
