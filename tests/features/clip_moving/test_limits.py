"""Limits that follow the norms before."""

from types import SimpleNamespace

import torch

from tests.clipping import rule

QUANTILE = {"max_norm": 50.0, "quantile": 0.5, "window": 3, "warmup_steps": 5}


def test_a_window_shorter_than_the_warm_up_still_gives_a_limit():
    found = rule("quantile", [], **QUANTILE)
    norm = torch.tensor(7.0)
    for number in range(5):
        assert found.limit(norm) == 50.0
        after = float(number)
        outcome = {"skipped": False, "grad_norm": after, "grad_norm_post_clip": after}
        found.finished(SimpleNamespace(**outcome))
    assert found.limit(norm) == 3.0  # the median of 2, 3, 4
    again = rule("quantile", [], **QUANTILE)
    again.load_state_dict(found.state_dict(), False)
    assert again.limit(norm) == 3.0
