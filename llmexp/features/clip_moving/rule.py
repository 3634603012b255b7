from __future__ import annotations

from llmexp.features.clip_moving.quantile import Quantile
from llmexp.features.clip_moving.zscore import ZScore

RULES = {"zscore": ZScore, "quantile": Quantile}
