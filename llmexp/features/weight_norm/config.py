from __future__ import annotations

from typing import Any

from llmexp.config.keys import Key

SECTION = "metrics"
KEYS = (Key("weight_norm", "L2 norm of all parameters, after the update"),)


def asked(config: Any) -> bool:
    return True
