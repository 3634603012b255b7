"""Try a user's own model on one tiny batch, before anything is written."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor, nn

from llmexp.settings.targets import described, locate
from llmexp.settings.targets import place as line_of
from llmexp.settings.values import ConfigError
from llmexp.system import hardware
from llmexp.train.assembly.parts import build_model
from llmexp.update import precision

ROWS, TOKENS = 2, 16  # of the batch


def try_model(
    arguments: tuple[dict[str, Any], str, int | None],
    model: nn.Module,
    length: int,
    ids: int,
    wanted: int | None,
    device_name: str,
    deterministic: bool,
) -> None:
    """Build a user's model and run it once on token ids below `ids`, in the run's arithmetic.

    `arguments` are those of `build_model`; `model` is the same one on the meta device: one that
    takes more than half of the device's memory is not tried. Raises ConfigError, with the line of
    the user's file, for a pass that fails, and for anything but floating-point logits (batch, time,
    vocabulary), of `wanted` ids or, where it is None, of at least `ids`.
    """
    device, dotted = torch.device(device_name), str(arguments[0]["_target_"])
    room = hardware.memory_bytes(device)
    if room is not None and sum(p.nbytes for p in model.parameters()) > room / 2:
        return
    tokens = torch.arange(ROWS * min(length, TOKENS), device=device).view(ROWS, -1) % ids
    try:
        with (
            torch.random.fork_rng(devices=[]),
            precision.settings_kept(),
            precision.autocast(arguments[1], device),
        ):
            if deterministic:
                precision.make_deterministic()
            wrong = _run(build_model(*arguments).to(device), tokens, ids, wanted)
    except ConfigError:
        raise
    except (MemoryError, torch.OutOfMemoryError):
        return  # the run itself says what would fit
    except Exception as error:
        text = f"failed on tokens {_shape(tokens)}: {described(error)}"
        raise ConfigError(f"model: {dotted} {text}") from error
    finally:
        # the process may live on beside the runs, as that which checks a sweep does
        if device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
    if wrong is not None:
        raise ConfigError(f"model: {dotted}: {wrong}{_line(model, dotted)}")


def _run(model: Any, tokens: Tensor, ids: int, wanted: int | None) -> str | None:
    """Return what is wrong with what the model makes of tokens, in words; None where nothing is."""
    wrong = _wrong(model(tokens), tokens, ids, wanted)
    head = getattr(model, "head_weight", None)
    if wrong is not None or head is None or not hasattr(model, "features"):
        return wrong
    hidden = model.features(tokens)  # the loss takes these in the place of the logits
    if not isinstance(hidden, Tensor) or hidden.shape != (*tokens.shape, head.shape[1]):
        what = _shape(hidden) if isinstance(hidden, Tensor) else f"a {type(hidden).__name__}"
        needed = f"({tokens.shape[0]}, {tokens.shape[1]}, {head.shape[1]})"
        needed += " = (batch, time, width of head_weight) is needed"
        return f"features(tokens) returned {what}, where {needed}"
    return None


def _wrong(found: Any, tokens: Tensor, ids: int, wanted: int | None) -> str | None:
    """Return what is wrong with the output of a model, which should be logits; None: nothing."""
    rows, length = tokens.shape
    size = f"({rows}, {length}, {wanted or ids})"
    needed = f"a tensor of logits {size} = (batch, time, vocabulary) is needed"
    if not isinstance(found, Tensor):
        hint = "; return its .logits" if isinstance(getattr(found, "logits", None), Tensor) else ""
        several = f" of {len(found)}" if isinstance(found, tuple | list) else ""
        return f"returned a {type(found).__name__}{several}, where {needed}{hint}"
    if found.ndim != 3 or found.shape[:2] != tokens.shape:
        return f"returned a tensor {_shape(found)}, where {needed}"
    if found.shape[2] < ids or (wanted is not None and found.shape[2] != wanted):
        text = f"where the vocabulary has {wanted or ids:,}: {needed}"
        return f"returned logits over {found.shape[2]:,} ids, {text}"
    if not found.dtype.is_floating_point:
        kind = str(found.dtype).removeprefix("torch.")
        return f"returned {kind} values, where floating-point logits are needed"
    if not found.requires_grad:
        return "its logits depend on no parameter; is the pass inside no_grad, or detached?"
    return None


def _shape(tensor: Tensor) -> str:
    return f"({', '.join(map(str, tensor.shape))})"


def _line(model: nn.Module, dotted: str) -> str:
    """Return " (FILE:LINE)" of the forward pass, or of what made the model.

    The second where the pass is not the user's.
    """
    forward = type(model).forward
    package = dotted.partition(".")[0]
    if str(getattr(forward, "__module__", "")).partition(".")[0] == package:
        return line_of(forward)
    return line_of(locate("model._target_", dotted))
