"""The gradient noise scale, from the norms of gradients of two batch sizes that a step has anyway.

McCandlish et al. 2018, "An Empirical Model of Large-Batch Training": B_simple = tr(Sigma) / |G|^2,
with G the true gradient and Sigma the covariance of the gradient of one sequence, both estimated as
in appendix A.1.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from llmexp import mesh
from llmexp.config.labels import plural
from llmexp.models.operands import IGNORE_INDEX

DECAY = 0.99  # of the smoothing, a measurement
FACTOR = 4  # within this factor of each other, a batch size and the noise scale are near
NORMAL = 1.959964  # the normal distribution's 97.5 % quantile


class SmallGradient:
    """Measure the norm of the gradient of a step's first micro-batch.

    Each rank measures its own, or all of them together do. With several micro-batches it is what
    lies in `.grad` after the first backward. With one, under DDP, it is read as it comes out of the
    backward, before the ranks are averaged. Reading changes nothing, and nothing waits for it. It
    cannot be had with one micro-batch in all, and where FSDP has no gradient of the first alone.
    """

    def __init__(self, joined: mesh.Mesh, every: int | None) -> None:
        self._mesh, self._every = joined, every
        self._norm: Tensor | None = None
        self._targets = 0

    def due(self, step: int) -> bool:
        """Return whether a step, counted from 1, is measured."""
        return self._every is not None and step > 0 and step % self._every == 0

    @contextlib.contextmanager
    def watching(
        self, micro_batches: Sequence[tuple[Tensor, Tensor]], parameters: list[nn.Parameter]
    ) -> Iterator[None]:
        """Around the backward of the first micro-batch."""
        own = self._mesh.sharding is None
        several = len(micro_batches) > 1
        norms: list[Tensor] = []
        handles = []
        if own and not several and self._mesh.dp_size > 1:
            # Around the backward alone: a compiler that met the hooks in the forward would compile
            # it anew.
            handles = [
                p.register_hook(lambda g: norms.append(torch.linalg.vector_norm(g)))
                for p in parameters
            ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        if norms:
            self._norm = torch.linalg.vector_norm(torch.stack(norms))
        elif several and (own or not self._mesh.reduces_once):
            gradients = [p.grad for p in parameters if p.grad is not None]
            self._norm = mesh.global_norm(self._mesh, gradients)
        self._targets = int((micro_batches[0][1] != IGNORE_INDEX).sum())  # they are on the host

    def take(self, count: Tensor | float, scale: Tensor) -> dict[str, Tensor]:
        """Return the mean square norm of the gradient of a small batch, and its size in targets.

        Both are 0-dim; empty where the step was not measured. `count`: targets of the
        window; `scale`: the loss scale. All ranks call together.

        Ranks are weighted by their targets n: sum n |g|^2 / sum n has the noise of a batch of sum n
        / sum 1 targets.
        """
        norm, self._norm = self._norm, None
        if norm is None:
            return {}
        count = torch.as_tensor(count, dtype=torch.float64)
        together = self._mesh.sharding is not None  # FSDP has already averaged over the ranks
        targets = torch.tensor(float(self._targets), dtype=torch.float64)
        targets = targets.to(count.device, non_blocking=True)
        if together:
            targets = mesh.total_(self._mesh, targets)
        # The sum is the gradient of nll x loss scale x weight (see `loss_factor` in train/step).
        weight = 1 if together else self._mesh.dp_size
        square = (norm.double() * count / (weight * scale.double())).square()
        there = targets > 0
        figures = torch.stack((square / targets.clamp(min=1), targets, there.double()))
        if not together:
            figures = mesh.total_(self._mesh, figures)
        weighted, targets, ranks = figures.unbind()
        square, size = weighted / targets.clamp(min=1), targets / ranks.clamp(min=1)
        return {"small_square": square, "small_targets": size}


class NoiseScale:
    """Estimate the gradient noise scale, on the host.

    tr(Sigma) and |G|^2 of each measurement are smoothed apart, then divided. The unit is sequences:
    `sequence_length` valid targets, wherever they lie.
    """

    def __init__(self, sequence_length: int) -> None:
        self._length = sequence_length
        self.measurements = 0
        # Sums with weights DECAY^age: of 1, of squared weights, of S = tr(Sigma), G = |G|^2, SS,
        # GG, SG, batch size.
        self._sums = [0.0] * 8

    def add(
        self, small_square: float, small_targets: float, big_square: float, big_targets: float
    ) -> None:
        """Add the mean square norms and batch sizes (in targets) of a step (A.1: S and |G|^2).

        One that was not measured, or is not finite, is left out."""
        small, big = small_targets / self._length, big_targets / self._length
        if not (math.isfinite(small_square) and math.isfinite(big_square) and 0 < small < big):
            return
        s = (small_square - big_square) / (1 / small - 1 / big)
        g = (big * big_square - small * small_square) / (big - small)
        self.measurements += 1
        decays = [DECAY, DECAY * DECAY] + [DECAY] * 6
        new = (1.0, 1.0, s, g, s * s, g * g, s * g, big)
        self._sums = [d * old + x for d, old, x in zip(decays, self._sums, new, strict=True)]

    def figures(self) -> dict[str, float]:
        """Return noise_scale and the ends of its 95 % interval.

        The interval is Fieller's (1954): the ratios that the two means allow. All is absent where a
        mean is not positive; the ends are absent where the measurements are few, or allow any
        ratio, however large.
        """
        if not self.measurements:
            return {}
        weight, squares, *sums, _ = self._sums
        s, g, ss, gg, sg = (x / weight for x in sums)
        if s <= 0 or g <= 0:
            return {}
        found = {"noise_scale": s / g}
        effective = weight * weight / squares
        if effective < 4:
            return found
        t2 = _student(effective - 1) ** 2 / (effective - 1)  # of means: biased variance / (n - 1)
        a, b, c = g * g - t2 * (gg - g * g), s * g - t2 * (sg - s * g), s * s - t2 * (ss - s * s)
        if a <= 0 or b * b < a * c:
            return found
        root = math.sqrt(b * b - a * c)
        low, high = max(0.0, (b - root) / a), (b + root) / a
        return found | {"noise_scale_low": low, "noise_scale_high": high}

    def verdict(self, real_batch_size: int, batch: float | None = None) -> str:
        """Return where `real_batch_size` stands to the noise scale, as a sentence.

        `batch`: whole sequences that its valid targets fill; None: those of the measured steps.
        """
        found = self.figures()
        many = plural(self.measurements, "measurement")
        name = f"real_batch_size {real_batch_size:,}"
        if not found:
            return f"whether {name} is large is not known: {many} found no noise scale"
        batch = self._sums[7] / self._sums[0] if batch is None else batch
        if abs(batch / real_batch_size - 1) > 0.01:  # masked targets
            name += f" (the targets of {batch:.3g} whole sequences)"
        scale = f"the gradient noise scale, {found['noise_scale']:.3g} sequences"
        if "noise_scale_high" not in found:
            return f"whether {name} is large is not known: {scale}, has no bounds after {many}"
        low, high = found["noise_scale_low"], found["noise_scale_high"]
        between = f"{scale} (95 % interval {low:.3g} to {high:.3g}, {many})"
        if low > FACTOR * batch:
            return f"{name} is far below {between}: twice the batch would need about half the steps"
        if high < batch / FACTOR:
            return f"{name} is far above {between}: a smaller batch would need hardly more steps"
        ends = (low >= batch / FACTOR, high <= FACTOR * batch)  # that are near
        if any(ends):
            more = "" if all(ends) else " or far below" if ends[0] else " or far above"
            return f"{name} is near{more} {between}"
        return f"whether {name} is large is not known: {between}"

    def state_dict(self) -> dict[str, list[float]]:
        return {"sums": [self.measurements, *self._sums]}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        count, *self._sums = state["sums"]
        self.measurements = int(count)


def _student(freedom: float) -> float:
    """Return Student's 97.5 % quantile, expanded about the normal one.

    The expansion is 26.7.5 of Abramowitz & Stegun.
    """
    z = NORMAL
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom**k for k, term in enumerate(terms, 1))
