"""Try a user's own model on one tiny batch, before anything is written."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor, nn

from llmexp.config.targets import described, locate
from llmexp.config.targets import place as line_of
from llmexp.config.values import ConfigError
from llmexp.config.variables import fill
from llmexp.models.common import all_finite
from llmexp.models.initial import numbers_of
from llmexp.optim import precision
from llmexp.optim.trying import Unfit
from llmexp.system import hardware
from llmexp.system.text import first_of
from llmexp.train.assembly.building import build_model

ROWS, TOKENS = 2, 16  # of the batch


def run(
    arguments: tuple[dict[str, Any], str, int | None],
    model: nn.Module,
    length: int,
    ids: int,
    known: int | None,
    device_name: str,
    deterministic: bool,
) -> list[str]:
    """Build a user's model and run it once on token ids below `ids`, in the run's arithmetic.

    `arguments` are those of `build_model`; `model` is the same one on the meta device: one that
    takes more than half of the device's memory is not tried. Raises ConfigError, with the line of
    the user's file, for a pass that fails, and for anything but floating-point logits (batch, time,
    vocabulary), of as many ids as the section says, or else `known`, or at least of `ids`; for
    first weights that are not finite. Return a warning of parameters that have no part in the
    logits.
    """
    device, dotted = torch.device(device_name), str(arguments[0]["_target_"])
    wanted = fill(arguments[0].get("vocab_size"), "model.vocab_size") or known
    room = hardware.memory_bytes(device)
    if room is not None and sum(p.nbytes for p in model.parameters()) > room / 2:
        return []
    tokens = torch.arange(ROWS * min(length, TOKENS), device=device).view(ROWS, -1) % ids
    try:
        with (
            numbers_of(0),
            precision.settings_kept(),
            precision.autocast(arguments[1], device),
        ):
            if deterministic:
                precision.make_deterministic()
            unused = _unused(build_model(*arguments).to(device), tokens, ids, wanted)
    except ConfigError:
        raise
    except Unfit as wrong:
        raise ConfigError(
            "bad_own_part", f"model: {dotted}: {wrong}{_line(model, dotted)}"
        ) from None
    except (MemoryError, torch.OutOfMemoryError):
        return []  # the run itself says what would fit
    except Exception as error:
        text = f"failed on tokens {_shape(tokens)}: {described(error)}"
        raise ConfigError("bad_own_part", f"model: {dotted} {text}") from error
    finally:
        # the process may live on beside the runs, as that which checks a sweep does
        if device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
    text = f"{len(unused)} of its parameters had no part in the logits of a trial"
    text = f"model: {dotted}: {text}: {first_of(unused)}; the loss does not train such"
    return [text] if unused else []


def _unused(model: Any, tokens: Tensor, ids: int, wanted: int | None) -> list[str]:
    """Return the names of the parameters that have no part in what a model makes of tokens.

    That is neither in training nor in evaluation: a pass in training may leave some out, as layers
    that are dropped. Raises Unfit for what is no model of these tokens.
    """
    named, head = dict(model.named_parameters()), getattr(model, "head_weight", None)
    if bad := [name for name, p in named.items() if not all_finite(p)]:
        raise Unfit(f"its first weights are not finite: {first_of(bad)}")
    compute, found = model, model(tokens)
    _check_logits(found, tokens, ids, wanted)
    if head is not None and hasattr(model, "hidden"):
        compute = model.hidden  # the loss takes these in the place of the logits
        found = compute(tokens)
        _check_hidden(found, head, tokens)
    if found.isnan().any():
        raise Unfit("its pass over the first tokens gives values that are not finite (NaN)")
    unused = {n for n, p in named.items() if p.requires_grad and p is not head}
    unused -= _reached(found, named)
    if unused:
        model.eval()
        unused -= _reached(compute(tokens), named)
    return [name for name in named if name in unused]


def _check_hidden(hidden: Any, head: Tensor, tokens: Tensor) -> None:
    """Raise Unfit for hidden states of a model that are none."""
    if not isinstance(hidden, Tensor) or hidden.shape != (*tokens.shape, head.shape[1]):
        what = _shape(hidden) if isinstance(hidden, Tensor) else f"a {type(hidden).__name__}"
        needed = f"({tokens.shape[0]}, {tokens.shape[1]}, {head.shape[1]})"
        needed += " = (batch, time, width of head_weight) is needed"
        raise Unfit(f"hidden(tokens) returned {what}, where {needed}")


def _reached(found: Tensor, named: dict[str, nn.Parameter]) -> set[str]:
    """Return the names of the parameters that a tensor was computed from, by autograd's graph.

    No gradient is computed. All count where torch's reentrant checkpoints hide a part of the graph.
    """
    reached, waiting, seen = set[int](), [found.grad_fn], set[Any]()
    while waiting:
        if (node := waiting.pop()) is None or node in seen:
            continue
        if node.name() == "CheckpointFunctionBackward":
            return set(named)
        seen.add(node)
        reached.add(id(getattr(node, "variable", None)))
        waiting += [following for following, _ in node.next_functions]
    return {name for name, p in named.items() if id(p) in reached}


def _check_logits(found: Any, tokens: Tensor, ids: int, wanted: int | None) -> None:
    """Raise Unfit for the output of a model that is no logits."""
    rows, length = tokens.shape
    size = f"({rows}, {length}, {wanted or ids})"
    needed = f"a tensor of logits {size} = (batch, time, vocabulary) is needed"
    if not isinstance(found, Tensor):
        hint = "; return its .logits" if isinstance(getattr(found, "logits", None), Tensor) else ""
        several = f" of {len(found)}" if isinstance(found, tuple | list) else ""
        raise Unfit(f"returned a {type(found).__name__}{several}, where {needed}{hint}")
    if found.ndim != 3 or found.shape[:2] != tokens.shape:
        raise Unfit(f"returned a tensor {_shape(found)}, where {needed}")
    if found.shape[2] < ids or (wanted is not None and found.shape[2] != wanted):
        text = f"where the vocabulary has {wanted or ids:,}: {needed}"
        raise Unfit(f"returned logits over {found.shape[2]:,} ids, {text}")
    if not found.dtype.is_floating_point:
        kind = str(found.dtype).removeprefix("torch.")
        raise Unfit(f"returned {kind} values, where floating-point logits are needed")
    if not found.requires_grad:
        raise Unfit("its logits depend on no parameter; is the pass inside no_grad, or detached?")


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
