"""The knobs of the section tokenizer that settings knows before a tokenizer is imported."""

from __future__ import annotations

from typing import Annotated

from llmexp.config.values import knob


class Knobs:
    download_timeout_s = Annotated[
        float,
        knob(
            "seconds to wait for the network where nothing is cached, before giving up",
            8.0,
            above=0,
            affects="nothing",
        ),
    ]
