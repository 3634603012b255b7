from __future__ import annotations

from llmexp.compare.columns import column_of

COLUMNS = (column_of("noise_scale"),)
