"""Count what a forward pass keeps for its backward pass, without computing anything."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def saved_bytes(model: nn.Module, length: int, *, whole_logits: bool) -> int | None:
    """Return bytes that autograd keeps of one sequence besides the parameters; `model` is on the
    meta device.

    An upper bound of what fused kernels and autocast keep: attention matrices count, and everything
    counts in the model's own dtype. `whole_logits`: the loss is taken of all logits at once. None
    for a model that cannot run there.
    """
    own = {p.untyped_storage()._cdata for p in model.parameters()}
    held: dict[int, Any] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            held[storage._cdata] = storage
        return tensor

    tokens_bt = torch.zeros(1, length, dtype=torch.int64, device="meta")
    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            if not whole_logits:
                model.features(tokens_bt)  # type: ignore[operator]
                return sum(storage.nbytes() for storage in held.values())
            logits_btv = model(tokens_bt)
        # The logits, what the softmax makes of them, and their gradient.
        return sum(storage.nbytes() for storage in held.values()) + 3 * logits_btv.nbytes
    except Exception:  # the user's own model, which has to run on its own device only
        return None
