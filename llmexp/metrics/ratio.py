"""The standard error of a ratio of sums."""

from __future__ import annotations

import math

import numpy as np


def with_error(name: str, y_n: np.ndarray, x_n: np.ndarray) -> dict[str, float]:
    """Return a ratio under `name`, and its standard error under NAME_stderr where there is one."""
    found, error = ratio(y_n, x_n)
    return {name: found} if error is None else {name: found, f"{name}_stderr": error}


def ratio(y_n: np.ndarray, x_n: np.ndarray) -> tuple[float, float | None]:
    """Return R = sum(y) / sum(x) and its standard error over n independent units, None for one.

    It is the ratio estimator of a cluster sample (Cochran, Sampling Techniques, 3rd ed. 1977,
    sections 2.11 and 6.4), without a correction for finite populations:

        se(R)^2 = n / (n - 1) * sum((y_i - R x_i)^2) / sum(x)^2

    Tokens of a unit need not be independent: only units have to. With x = 1 it is the usual
    standard error of a mean.
    """
    total, n = float(x_n.sum()), len(x_n)
    found = float(y_n.sum()) / total
    if n < 2:
        return found, None
    square = float(np.square(y_n - found * x_n).sum())
    return found, math.sqrt(n / (n - 1) * square) / total
