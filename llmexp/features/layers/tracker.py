from __future__ import annotations

from typing import Any

from llmexp.features.layers.reading import FILE, by_layer


def figures(line: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a line of layers.jsonl as a tracker has them."""
    found = by_layer(line)
    return {f"layers/{key}": found[key] for key in found.keys() - {"step", "tokens_seen"}}


BESIDE = {FILE: figures}
