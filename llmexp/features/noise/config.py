from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import TypedDict

from llmexp.config.keys import Key
from llmexp.config.values import count

SECTION = "metrics"


@dataclass(frozen=True, kw_only=True)
class Knobs:
    noise_scale_every: int | None = count(
        "optimizer steps between gradient noise scales; null: never", 10, affects="nothing"
    )


class Status(TypedDict, total=False):
    noise: dict[str, float | str | None]


KEYS = (
    Key("noise_scale", "gradient noise scale in sequences, smoothed over its measurements",
        "noise scale", digits=3),
    Key("noise_scale_low", "lower end of the 95 % interval of noise_scale"),
    Key("noise_scale_high", "upper end of the 95 % interval of noise_scale"),
)  # fmt: skip

asked = attrgetter("metrics.noise_scale_every")
