"""Settings between which nothing differs, trained for real: seldom called different, though
rounding parts them."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from llmexp.compare.comparing import findings, with_words
from llmexp.compare.reading import read
from llmexp.runs.find import find
from tests.conftest import llmexp

SEEDS = 24
# Two layers of width 48 and batches of 4 x 32, at a rate at which rounding grows to a part of the
# loss.
SMALL = [
    "model=gpt_tiny", "model.n_layers=2", "model.n_heads=2", "model.d_model=48", "model.d_ff=192",
    "model.max_position_embeddings=32", "batch.sequence_length=32", "batch.micro_batch_size=4",
    "optimizer.lr=3e-3",
    "train.max_steps=600", "train.eval_every=null", "train.log_every=50", "precision=fp32",
    "tracker=none",
    "train.sample_tokens=0", "metrics.picture=false", "metrics.noise_scale_every=null",
    "train.device=cpu",
]  # fmt: skip


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> Path:
    """Runs of optimizer.eps=1e-8 and 1.001e-8, which no loss can tell apart, each with the same
    seeds."""
    where = tmp_path_factory.mktemp("null") / "sweep"
    done = llmexp(
        "train", "-m", *SMALL, "optimizer.eps=1e-8,1.001e-8", f"train.seed=range(1,{SEEDS + 1})",
        f"hydra.sweep.dir={where}", "sweep.max_parallel=2", cwd=where.parent, timeout=3600,
    )  # fmt: skip
    assert done.code == 0, done.err
    return where


@pytest.mark.slow
def test_pairs_of_one_seed_are_never_called_different_though_they_are(pairs):
    records = read(find([pairs])[0])
    apart = []
    for seed in range(1, SEEDS + 1):
        pair = [r for r in records if r.config["train.seed"] == seed]
        c = with_words(findings(pair))
        assert c.headline.startswith("Undecided, one seed each"), c.headline
        apart.append(abs(c.settings[1].size))
    # The premise: a floor of 0.0001 that is assumed would call most of these different.
    assert np.median(apart) > 3e-4


@pytest.mark.slow
def test_few_null_pairs_of_several_seeds_are_called_different(pairs):
    """At most 5 % over 2,500 draws of seeds, of the same ones for both settings and of others for
    each.

    The draws share 48 runs, so the rate scatters by some 2 % from one set of runs to the next; 2.7
    % were seen.
    """
    records = read(find([pairs])[0])
    by = {(r.config["optimizer.eps"], r.config["train.seed"]): r for r in records}
    first, second = sorted({eps for eps, _ in by})
    rng = np.random.default_rng(1)
    kinds = (
        (2, True),
        (3, True),
        (6, True),
        (3, False),
        (6, False),
    )  # seeds of each setting; the same ones?
    called = 0
    for (seeds, same), _ in itertools.product(kinds, range(500)):
        drawn = rng.permutation(np.arange(1, SEEDS + 1))
        ours, theirs = drawn[:seeds], drawn[:seeds] if same else drawn[seeds : 2 * seeds]
        pair = [by[first, int(s)] for s in ours] + [by[second, int(s)] for s in theirs]
        c = with_words(findings(pair))
        called += any(e.mark == "worse" for e in c.settings)
    assert called <= 0.05 * 2500
