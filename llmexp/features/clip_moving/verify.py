from __future__ import annotations

import math
from typing import Any

import numpy as np

from llmexp.config.convert import with_knobs
from llmexp.config.sections import Config
from llmexp.features.clip_moving.config import CLIP_RULES


def prepared(config: Config, steps: int) -> Config:
    """Return the config with a limit that begins within few steps."""
    clip: Any = config.clip
    if clip.kind not in CLIP_RULES:
        return config
    return with_knobs(config, clip={"warmup_steps": min(clip.warmup_steps, steps // 2)})


def quantile(at: Any, norm: float, error: float) -> None:
    clip, limit = at.knobs, at.knobs.max_norm
    if len(at.before) >= clip.warmup_steps:
        bound = math.inf if limit is None else limit
        limit = min(bound, float(np.quantile(at.before[-clip.window :], clip.quantile)))
    at.scale(at.gradients, limit, norm)


def zscore(at: Any, norm: float, error: float) -> None:
    clip, limit = at.knobs, at.knobs.max_norm
    if len(at.before) >= clip.warmup_steps:
        first, later = at.after[: clip.warmup_steps], at.after[clip.warmup_steps :]
        mean, variance = float(np.mean(first)), float(np.var(first))
        for after in later:
            mean = clip.decay * mean + (1 - clip.decay) * after
            variance = clip.decay * variance + (1 - clip.decay) * (after - mean) ** 2
        far = clip.z * (math.sqrt(variance) + 1e-6)
        if norm - mean > far:
            bound = math.inf if limit is None else limit
            limit = min(bound, mean + far**2 / (norm - mean))
    at.scale(at.gradients, limit, norm)


BY_RULE = {"quantile": quantile, "zscore": zscore}
