from __future__ import annotations

from typing import Any


def by_unit(at: Any, norm: float, error: float) -> None:
    for p in at.named.values():
        if p is at.head or p.grad is None:
            continue
        width = p.shape[-1] if id(p) in at.in_rows else p.numel() // (len(p) if p.ndim > 1 else 1)
        rows, weights = p.grad.view(-1, width), p.detach()
        limits = weights.reshape(rows.shape).norm(dim=1).clamp(min=1e-3) * at.knobs.ratio
        norms = rows.norm(dim=1) * (1 + error)
        rows.mul_((limits / norms.clamp(min=1e-6)).clamp(max=1.0)[:, None])


BY_RULE = {"adaptive": by_unit}
