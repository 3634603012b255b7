"""Describe a run that is not started: its banner, and what is known of its memory."""

from __future__ import annotations

import dataclasses
from typing import Any

from llmexp.assembly.assemble import Parts, assemble
from llmexp.config import Config
from llmexp.forecast import memory
from llmexp.forecast.settings import Plan
from llmexp.metrics.devices import Device, device_named
from llmexp.run.banner import banner_sections


def planned(
    config: Config, plan: Plan, name: str, folder: str
) -> tuple[list[tuple[str, str]], dict[str, Any]]:
    """Return the rows of the run's banner on the device of that name, and the same as plain values.
    Raises ConfigError."""
    device = device_named(name)
    parts = assemble(placeable(config), write=False)
    precision = memory.precision_on(parts, config.precision.kind, device)
    rows = banner_sections(parts.run, folder)
    whole = {"folder": folder, **parts.run.as_dict()}
    if device is not None:
        rows = [_on(device, precision, label, text) for label, text in rows]
        whole |= {"device": "cuda", "device_name": device.name, "precision": precision}
    compiled = config.train.compile is True or (
        config.train.compile == "auto" and device is not None
    )
    more, figures = forecast_sections(parts, device, plan.memory_gib, precision, compiled)
    return [*rows, *more], whole | figures


def placeable(config: Config) -> Config:
    """Return the config of a run that need not find its device here."""
    train = dataclasses.replace(config.train, device="cpu", compile=False)
    kind = "fp32" if config.precision.kind == "tf32" else config.precision.kind
    return dataclasses.replace(
        config, train=train, precision=dataclasses.replace(config.precision, kind=kind)
    )


def _on(device: Device, precision: str, label: str, text: str) -> tuple[str, str]:
    changed = {"device": f"{device.name}, planned for", "precision": precision}
    return label, changed.get(label, text)


def forecast_sections(
    parts: Parts, device: Device | None, limit: float | None, precision: str, compiled: bool
) -> tuple[list[tuple[str, str]], dict[str, Any]]:
    """Return what is known of the memory of a run, in rows and as plain values: why it is not known
    where this host hides how much it has, or where the model needs memory to run."""
    room = memory.room_of(parts, device, limit)
    if room is None:
        return [("memory", "not known, nor what this host has; add plan.memory_gib=16")], {}
    try:
        forecast = memory.Forecast(parts, precision, room)
        rows = memory.sections(forecast, compiled)
    except Exception as error:  # of a model of the user's, which has to see its values
        if parts.config.model["_target_"].startswith("llmexp."):
            raise
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        return [("memory", f"not known: the model does not run without memory ({why})")], {}
    texts = {
        label.replace(" ", "_"): text for label, text in rows if label in ("hint", "would fit")
    }
    return rows, {"memory": forecast.figures(), **texts}
