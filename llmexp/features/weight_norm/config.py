from __future__ import annotations

from llmexp.config.keys import Key

SECTION = "metrics"
KEYS = (Key("weight_norm", "L2 norm of all parameters, after the update"),)
