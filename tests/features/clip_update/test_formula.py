"""The limit of an update as StableAdamW writes it."""

import numpy as np
import pytest
import torch

from tests.clipping import counted, global_norm, gradients, rule


@pytest.mark.parametrize("threshold", [1.0, 0.3])
def test_updates_are_limited_as_stable_adamw_writes_it(threshold):
    """Algorithm 2 of arXiv 2304.13013, with its own form of the moments."""
    rng, beta1, beta2, eps, decay = np.random.default_rng(3), 0.9, 0.95, 1e-3, 0.2
    made = [torch.nn.Parameter(torch.tensor(rng.normal(size=s))) for s in ((3, 4), (5,))]
    optimizer = torch.optim.AdamW(made, lr=0.02, betas=(beta1, beta2), eps=eps, weight_decay=decay)
    limit = rule("update", made, [optimizer], threshold=threshold)
    theta = [p.detach().numpy().copy() for p in made]
    v, u = ([np.zeros_like(w) for w in theta] for _ in range(2))
    seen = []
    for t in range(1, 9):
        rate = optimizer.param_groups[0]["lr"] = 0.02 / t
        hat1, hat2 = (b * (1 - b ** (t - 1)) / (1 - b**t) for b in (beta1, beta2))
        for i, p in enumerate(made):
            g = rng.normal(size=p.shape) * (10 if t == 5 else 0.1) * (i + 1)
            p.grad = torch.tensor(g)
            v[i] = hat1 * v[i] + (1 - hat1) * g
            u[i] = hat2 * u[i] + (1 - hat2) * g**2
            rms = np.sqrt(np.mean(g**2 / np.maximum(u[i], eps**2)))
            eta = rate / max(1, rms / threshold)
            theta[i] = theta[i] - eta * decay * theta[i] - eta * v[i] / (np.sqrt(u[i]) + eps)
            seen.append(rms)
        limit.clip(gradients(made), global_norm(made))
        optimizer.step()
        limited = limit.after_update(False, False)
        assert bool(limited) == (max(seen[-2:]) > threshold)
        np.testing.assert_allclose(
            counted(limit, "tensors")[5], np.sum(np.array(seen[-2:]) > threshold)
        )
        for p, wanted in zip(made, theta, strict=True):
            np.testing.assert_allclose(p.detach(), wanted, rtol=1e-12)
    assert min(seen) < 1 < max(seen)
    before = [p.detach().clone() for p in made]
    limit.clip(gradients(made), global_norm(made))
    assert not limit.after_update(True, False)  # nothing was updated
    assert all(torch.equal(p, old) for p, old in zip(made, before, strict=True))
