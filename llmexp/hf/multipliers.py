"""Factors that turn weights under model.parametrization=mup into those of the standard one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from llmexp.models.common import MUP_HEAD


def multipliers(section: Mapping[str, Any]) -> Callable[[str], float]:
    """Return a function of a parameter's name: its factor for the standard parametrization.

    With these factors a standard model computes what one of this section does. Logits over m are a
    final norm over m; attention with 8 / head width in the place of 1 / sqrt(head width) has other
    queries, which a projection or a norm of them makes.
    """
    if section.get("parametrization", "standard") == "standard":
        return lambda name: 1.0
    width = section.get("head_dim") or section["d_model"] // section["n_heads"]
    of_queries = math.sqrt(MUP_HEAD / width)
    last = "q_proj" if section.get("qk_norm", "none") == "none" else "q_norm"
    of_norm = section["base_width"] / section["d_model"]

    def factor(name: str) -> float:
        if name.startswith("final_norm."):
            return of_norm
        return of_queries if f".{last}." in name else 1.0

    return factor
