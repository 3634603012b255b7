"""Muon: its polynomials against the papers, its directions against float64, its ranks against
one."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from llmexp.config.values import ConfigError
from llmexp.optim.optimizers.muon import POLYNOMIALS, Muon, orthogonalize, polynomials
from tests.conftest import TINY
from tests.tools import run_here

RANKS = 3
# tall, wide and square ones; no number of rows is a multiple of the ranks, no shape has as many
SHAPES = [(20, 8), (8, 20), (8, 8), (20, 8), (8, 20), (5, 5)]


def remez(low: float, high: float) -> np.ndarray:
    """The odd polynomial of degree 5 that is nearest to 1 on [low, high]: (a, b, c).

    Its error is as large at the ends as at its two extrema inside, with turns of the sign."""
    points = np.linspace(low, high, 4)
    for _ in range(60):
        signs = np.array([1, -1, 1, -1])
        system = np.stack([points, points**3, points**5, signs], axis=1)
        *found, _ = np.linalg.solve(system, np.ones(4))
        a, b, c = found
        inside = np.sqrt(np.sort(np.roots([5 * c, 3 * b, a]).real))
        points = np.array([low, *inside, high])
    return np.array(found)


def test_polar_express_is_the_nearest_chain_of_polynomials():
    """As appendix G of arXiv 2505.16932 makes it: from [1e-3, 1], each polynomial the nearest to 1
    on what the one before leaves, but from no lower than 0.0241 of the upper end, and then scaled
    so that both ends are equally far from 1."""
    low, high = 1e-3, 1.0
    for want in POLYNOMIALS["polar_express"][:7]:
        a, b, c = remez(max(low, 0.02407327424182761 * high), high)
        ends = [a * s + b * s**3 + c * s**5 for s in (low, high)]
        scale = 2 / sum(ends)
        # 1e-6: where the interval is narrow the equations are ill-conditioned
        np.testing.assert_allclose(scale * np.array([a, b, c]), want, rtol=1e-6)
        low = scale * ends[0]
        high = 2 - low
    assert POLYNOMIALS["polar_express"][7] == (15 / 8, -10 / 8, 3 / 8)
    assert POLYNOMIALS["newton_schulz"] == ((15 / 8, -10 / 8, 3 / 8),)
    assert POLYNOMIALS["jordan"] == ((3.4445, -4.775, 2.0315),)


@pytest.mark.parametrize("name", [*POLYNOMIALS, [[2.0, -1.5, 0.5], [1.5, -0.6, 0.1]]])
@pytest.mark.parametrize("steps", [1, 5, 9])
def test_directions_are_those_of_the_singular_values_in_float64(name, steps):
    """bf16 rounds each of the products of an iteration, of entries below 1, by 2^-9 of them: in the
    mean over a matrix the errors of few iterations stay well below a tenth of the whole."""
    torch.manual_seed(0)
    u, _ = torch.linalg.qr(torch.randn(24, 24, dtype=torch.float64))
    v, _ = torch.linalg.qr(torch.randn(40, 24, dtype=torch.float64))
    s = torch.logspace(0, -2, 24, dtype=torch.float64)
    rows, safety = polynomials(name, steps)
    got = orthogonalize(((u * s) @ v.T).bfloat16(), rows, safety, 1e-7).double()
    factor = 1.01 if name == "polar_express" else 1.0
    p = s / (s.norm() * factor)
    given = POLYNOMIALS[name] if isinstance(name, str) else name
    for number in range(steps):
        last = number >= len(given) - 1
        a, b, c = given[-1] if last else given[number]
        f = 1.0 if last else factor
        p = a / f * p + b / f**3 * p**3 + c / f**5 * p**5
    want = (u * p) @ v.T
    assert float((got - want).norm() / want.norm()) < 0.06
    if name == "polar_express" and steps == 9:
        assert float((p - 1).abs().max()) < 1e-3  # which the others are far from
    if name == "jordan" and steps >= 5:
        assert float((p - 1).abs().max()) > 0.1


def updated(split: bool) -> list[torch.Tensor]:
    """Matrices after four updates, the second one skipped; split over the ranks by rows, or not."""

    def placed(value: torch.Tensor) -> torch.Tensor:
        return distribute_tensor(value, init_device_mesh("cpu", (RANKS,)), [Shard(0)])

    place = placed if split else torch.clone
    drawn = torch.Generator().manual_seed(0)
    held = [torch.nn.Parameter(place(torch.randn(shape, generator=drawn))) for shape in SHAPES]
    optimizer = Muon(held, "polar_express", lr=0.1, adjust_lr_fn="match_rms_adamw")
    for step in range(4):
        for p, shape in zip(held, SHAPES, strict=True):
            p.grad = place(torch.randn(shape, generator=drawn))
        optimizer.found_inf = torch.tensor(float(step == 1))
        optimizer.step()
    return [(p.full_tensor() if split else p).detach().clone() for p in held]


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS
    )
    torch.save([updated(split) for split in (False, True)], f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_ranks_that_share_the_work_find_what_one_rank_finds(tmp_path):
    """To the bit: whole on each rank, and split over them."""
    torch.multiprocessing.start_processes(
        _rank, args=(str(tmp_path),), nprocs=RANKS, start_method="fork"
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        want = updated(split=False)
    finally:
        torch.set_num_threads(threads)
    for rank in range(RANKS):
        for found in torch.load(tmp_path / f"{rank}.pt"):
            assert all(map(torch.equal, found, want))


@pytest.mark.parametrize("given", ["fast", [1.0, 2.0], [[1, 2, 3], [1, 2]], [], 3, ["a", "b", "c"]])
def test_what_are_no_polynomials_is_refused(given):
    with pytest.raises(ConfigError, match=r"three numbers.*for example .?optimizer.ns_coefficient"):
        polynomials(given, 5)


def test_a_command_line_takes_other_polynomials(capfd):
    numbers = "optimizer.ns_coefficients=[[3.4445,-4.775,2.0315],[1.875,-1.25,0.375]]"
    assert run_here(capfd, "plan", *TINY, "data=synthetic", "optimizer=muon", numbers).code == 0
