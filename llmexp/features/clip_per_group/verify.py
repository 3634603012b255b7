from __future__ import annotations

from typing import Any

from llmexp.optim.patterns import first_matches


def per_group(at: Any, norm: float, error: float) -> None:
    limits = at.knobs.limits
    groups = first_matches(list(at.named), [limit.match for limit in limits], "clip.limits")
    for number, limit in enumerate(limits):
        pairs = zip(at.named.values(), groups, strict=True)
        own = [p.grad for p, group in pairs if group == number and p.grad is not None]
        at.scale(own, limit.max_norm, at.norm(own, error))


BY_RULE = {"per_group": per_group}
