from __future__ import annotations

from llmexp.features.layers.reading import read_layers

FIGURES = {"layers": read_layers}
