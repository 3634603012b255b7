"""Downsampling: what the eye would miss if it were gone is never gone."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from llmexp.compare.curves import downsample

CURVES = st.lists(
    st.one_of(st.floats(-1e6, 1e6), st.sampled_from([np.nan, np.inf, -np.inf])), min_size=0,
    max_size=400
)  # fmt: skip


@given(values=CURVES, limit=st.integers(4, 60))
@settings(max_examples=300)
def test_ends_extremes_and_order_are_kept_in_few_points(values, limit):
    y = np.array(values, dtype=float)
    kept = downsample(y, limit)
    known = np.flatnonzero(np.isfinite(y))
    assert len(kept) <= limit
    assert np.all(np.diff(kept) > 0)
    assert np.isin(kept, known).all()
    if len(known) <= limit:
        assert kept.tolist() == known.tolist()
    if len(known):
        assert (kept[0], kept[-1]) == (known[0], known[-1])
        assert (y[kept].min(), y[kept].max()) == (y[known].min(), y[known].max())


@given(seed=st.integers(0, 2**32 - 1), n=st.integers(50, 2000), limit=st.integers(10, 100))
@settings(max_examples=60)
def test_every_stretch_keeps_its_own_extremes(seed, n, limit):
    """Against the buckets cut by a plain loop: n - 2 inner values in (limit - 2) // 2 of them,
    rounded up."""
    y = np.random.default_rng(seed).standard_normal(n)
    kept = downsample(y, limit)
    width = -(-max(n - 2, 1) // ((limit - 2) // 2))
    for start in range(1, n - 1 - width, width):
        bucket = range(start, min(start + width, n - 1))
        inside = [i for i in kept if i in bucket]
        assert min(y[i] for i in inside) == min(y[i] for i in bucket)
        assert max(y[i] for i in inside) == max(y[i] for i in bucket)
