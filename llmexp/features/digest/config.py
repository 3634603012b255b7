from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

from llmexp.config.keys import Key
from llmexp.config.values import knob

SECTION = "train"


@dataclass(frozen=True, kw_only=True)
class Knobs:
    data_digest: bool = knob("put a digest of each step's tokens into its row", affects="nothing")


KEYS = (
    Key("data_digest", "digest of the step's tokens, however they are split", text="[0-9a-f]{16}"),
)

asked = attrgetter("train.data_digest")
