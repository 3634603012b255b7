from __future__ import annotations

from llmexp.compare.records import column_of

COLUMNS = (column_of("outlier_steps"),)
