from __future__ import annotations

from llmexp.compare.figures import column_of

COLUMNS = (column_of("noise_scale"),)
