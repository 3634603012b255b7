"""Find the first module of a window whose loss or gradient is not finite.

The window is computed once more, with a hook on every module. Nothing of this is there while
training goes well.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from llmexp import mesh
from llmexp.data.window import Window
from llmexp.folders.ending import COMES_AGAIN
from llmexp.models.common import all_finite
from llmexp.train.finishing import NotFinite
from llmexp.train.state import Loop
from llmexp.train.step import Setup, accumulate, loss_factor

NOTHING = (
    "a second pass over the step was finite: it does not come from the config and the data alone"
)


def run(loop: Loop, bad: NotFinite) -> str:
    """Return why the last step ended the run, and where in it that began; all ranks call together.

    A resumed run would meet it again, unless a second pass finds nothing."""
    try:
        step = loop.progress.step - 1
        window = next(loop.windows(step))
        loop.seed(step)
        where = first_bad(loop.setup, window)
    except Exception as error:  # it only explains
        where = f"where is not known: {error!r}"
    hint = "" if loop.setup.scaler.enabled else growth_hint(loop)
    again = "" if where == NOTHING else f"; {COMES_AGAIN}"
    return f"{bad}; {where}{hint}{again}"


def growth_hint(loop: Loop) -> str:
    """Return a hint, where the losses had been on their way up, or it is too soon to tell."""
    least, last = loop.progress.least_loss, (loop.progress.loss or (0, 0.0))[1]
    if last >= least + 1:
        return (
            f"; the loss had grown from {least:.4g} to {last:.4g} before: a smaller "
            "optimizer.lr, or a longer schedule.warmup_steps, may keep it from that"
        )
    if loop.progress.step > 10:
        return ""
    return (
        "; if the steps are too large, a smaller optimizer.lr or a longer "
        "schedule.warmup_steps helps"
    )


def first_bad(setup: Setup, window: Window) -> str:
    """Name in words what of the window's step is the first not to be finite; the same on all ranks.

    The parameters must still be those of the step, as a bad update is not applied. Gradients are
    lost.
    """
    # the number of the first look that found something, and what it was
    looks, first = (0, list[tuple[int, str]]())

    def look(value: Tensor | bool, text: str) -> None:
        """Look at a value on all ranks together.

        Ranks make the same looks in the same order: what one of them meets first, it met before all
        others.
        """
        nonlocal looks
        looks += 1
        if not (first or (value if isinstance(value, bool) else _finite(value))):
            first.append((looks, text))

    for name, p in setup.model.named_parameters():
        look(p, f"parameter {name} is not finite")
    remove = _watch(setup.model, look)
    try:
        with torch.compiler.set_stance("force_eager"):  # hooks see what a compiled block would hide
            _repeat(setup, window, look)
    finally:
        for undo in remove:
            undo()
    when, text = first[0] if first else (looks + 1, "")
    earliest = -int(mesh.maximum(setup.mesh, torch.tensor(-when, device=setup.mesh.device)))
    bad = mesh.ranks_where(setup.mesh, bool(first) and when == earliest)
    if not bad:
        return NOTHING
    text = _text_of(setup.mesh, bad[0], text)
    return f"the first thing to go wrong: {text}" + (
        f" (rank {bad[0]})" if setup.mesh.distributed else ""
    )


def _repeat(setup: Setup, window: Window, look: Callable[[Tensor, str], None]) -> None:
    """Compute forward and backward of the step as train_step does: ranks meet in like places."""
    _, weight = loss_factor(setup, window)
    setup.zero_gradients()
    text = "the loss of micro-batch {}, where every layer was finite"
    accumulate(setup, window, weight, lambda nll, number: look(nll, text.format(number)))
    for name, p in setup.model.named_parameters():
        if p.grad is not None:
            look(p.grad, f"the gradient of {name}, summed over the step")
    norm = mesh.global_norm(setup.mesh, setup.gradients)
    look(norm, "the norm of all gradients: every entry is finite, the sum of squares overflows")


def _watch(model: nn.Module, look: Callable[..., None]) -> list[Callable[[], None]]:
    """Hooks that look at what modules return and at gradients; functions that end them.

    Inner modules report before those that hold them, so the first report is the innermost module.
    """
    names = {
        module: f"{name or 'the model'} ({type(module).__name__})"
        for name, module in model.named_modules()
    }
    handles: list[Any] = []
    met: dict[
        int, tuple[Tensor, list[str], list[str]]
    ] = {}  # by id: a tensor, what made it, what takes it

    def meet(tensor: Tensor) -> tuple[list[str], list[str]]:
        if id(tensor) not in met:
            made, taken = list[str](), list[str]()
            met[id(tensor)] = tensor, made, taken  # held, so that no other gets its id

            def on_the_way_back(gradient: Tensor) -> None:
                where = f"{taken[0]} returns" if taken else f"reaches {made[0]}"
                look(gradient, f"the gradient that {where}")

            tensor.register_hook(on_the_way_back)
        return met[id(tensor)][1:]

    def after_forward(module: nn.Module, inputs: Any, output: Any) -> None:
        tensors = list(tensors_in(output))
        good = all(map(_finite, tensors)) or not all(map(_finite, tensors_in(inputs)))
        look(good, f"the output of {names[module]}, whose input is finite")
        for tensor in tensors_in(inputs):
            if tensor.requires_grad:
                meet(tensor)[1].append(names[module])
        for tensor in tensors:
            if tensor.requires_grad:
                meet(tensor)[0].append(names[module])

    for module in names:
        handles.append(module.register_forward_hook(after_forward))
    for name, p in model.named_parameters():
        if p.requires_grad:
            text = f"the gradient of {name}"
            handles.append(p.register_hook(functools.partial(look, text=text)))
    return [handle.remove for handle in handles]


def _text_of(joined: mesh.Mesh, rank: int, text: str) -> str:
    """Return the text of one rank, on every rank."""
    room = torch.zeros(400, dtype=torch.int64)
    if joined.rank == rank:
        encoded = text.encode()[: len(room)]
        room[: len(encoded)] = torch.tensor(list(encoded))
    return bytes(mesh.maximum(joined, room).tolist()).rstrip(b"\0").decode(errors="replace")


def _finite(tensor: Tensor) -> bool:
    return all_finite(mesh.local_part(tensor))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in what a module takes or returns."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(part)
