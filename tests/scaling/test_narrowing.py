"""What `llmexp next` proposes for a ladder, and how much it narrows the prediction in truth."""

import math
import re

import pytest

import llmexp
from llmexp.__main__ import run as command
from tests.scaling.folders import BLOCKS, BUDGETS, SMALL, as_sweep, isoflop, run
from tests.tools import printed

EARLY = (1e11, 5e11, 2.5e12)  # whose best sizes are below BLOCKS[2]
SWEPT = ("train.max_flops", "model.d_model")
pytestmark = pytest.mark.usefixtures("few_draws")
WIDTH = r"(\S+)=(\S+) to about ±(\S+) for (\S+) FLOPs"


def test_the_next_rung_of_a_ladder(tmp_path, capsys):
    folder = as_sweep(isoflop(tmp_path / "a"), *SWEPT)
    assert command(["next", str(folder), "--predict", "1e15", "--json"]) == 0
    step = printed("next", capsys.readouterr().out)
    assert step["rule"] == "rung"
    assert step["words"] == ["resume", str(folder), "train.max_flops=1.25e14"]
    assert step["cost"]["runs"] == len(BLOCKS)
    told = {key: (float(value), float(width), float(flops))
            for key, value, width, flops in re.findall(WIDTH, step["why"])}  # fmt: skip
    assert told["train.max_flops"][2] == pytest.approx(1.25e14 * len(BLOCKS), rel=0.01)
    assert told["train.seed"][2] == pytest.approx(sum(BUDGETS) * len(BLOCKS), rel=0.01)

    def half(*paths):
        """Half of the interval, of runs with a noise of 1: that of each ladder is measured anew."""
        one = llmexp.fit(*paths, predict=1e15).data["ladders"][0]
        loss = one["prediction"]["loss"]
        return (loss["high"] - loss["low"]) / 2 / one["noise"]

    # Trained in truth: to a third, as the law is not straight.
    noise = llmexp.fit(folder).data["ladders"][0]["noise"]
    rung = isoflop(tmp_path / "b", seed=7, budgets=[1.25e14])
    seed = isoflop(tmp_path / "c", seed=8, train__seed=2)
    for key, added in (("train.max_flops", rung), ("train.seed", seed)):
        truth = half(*sorted(folder.glob("*-*")), *added.iterdir())
        assert abs(math.log(told[key][1] / noise / truth)) < math.log(1.4), key
    assert told["train.max_flops"][1] < told["train.seed"][1]


def test_it_narrows_the_loss_at_ten_times_the_largest_budget(tmp_path):
    """Where no --predict is given."""
    why = llmexp.next_step(as_sweep(isoflop(tmp_path / "a"), *SWEPT)).why
    there = re.search(r"narrows the val loss at (\S+) FLOPs most", why)
    assert float(there[1]) == pytest.approx(10 * max(BUDGETS), rel=0.01)


def test_at_the_edge_it_is_the_next_size(tmp_path):
    folder = as_sweep(isoflop(tmp_path / "a", blocks=BLOCKS[2:], budgets=EARLY), *SWEPT)
    step = llmexp.next_step(folder)
    assert (step.rule, step.words[-1]) == ("rung", "model.d_model=61")  # of 106, 183 and 316
    assert "widen to smaller" in step.why


@pytest.mark.parametrize(
    ("depths", "below"), [((2, 4, 6), 1), ((4, 6, 8), 2), ((2, 4, 8), 1), ((1, 2, 3), None)]
)
def test_the_next_smaller_size_is_one_that_there_is_else_it_is_the_next_budget(
    tmp_path, depths, below
):
    folder = isoflop(tmp_path / "a", blocks=BLOCKS[2:], budgets=EARLY)
    for path in folder.iterdir():
        config = (path / "config.yaml").read_text()
        depth = depths[int(path.name[-1])]
        (path / "config.yaml").write_text(re.sub(r"d_model: .*", f"depth: {depth}", config))
    step = llmexp.next_step(as_sweep(folder, "train.max_flops", "model.depth"))
    if below:
        assert step.words[-1] == f"model.depth={below}"
    else:
        assert step.words[-1].startswith("train.max_flops=")
        assert "model.depth can go no smaller than 1" in step.why


def test_what_is_no_ladder_keeps_the_rules_of_settings(tmp_path):
    folder = as_sweep(isoflop(tmp_path / "a"), "train.max_flops", "optimizer.lr")
    assert llmexp.next_step(folder).rule != "rung"


@pytest.mark.parametrize("seeds", [1, 2])
def test_the_cost_is_that_of_all_settings_on_as_many_steps(tmp_path, seeds):
    """Of a ladder over steps, whose tokens follow from no formula, with a rate that is none."""
    size = {n: n + round(64 * math.sqrt(n)) for n in BLOCKS}
    for i, steps in enumerate((500, 1000, 2000)):
        for j, n in enumerate(BLOCKS):
            for seed in range(1, seeds + 1):
                for lr in (1e-3, 2e-3):
                    loss = SMALL.loss(size[n], 4096 * steps) * (1 + 0.002 * ((i + j + seed) % 3))
                    keys = {"train__max_steps": steps, "train__seed": seed, "optimizer__lr": lr}
                    path = tmp_path / "s" / f"{i}-{j}-{seed}-{lr}"
                    run(path, loss + 99 * (lr - 1e-3), n, 4096 * steps, **keys)
    swept = ["train.max_steps", "model.d_model", "optimizer.lr", "train.seed"]
    step = llmexp.next_step(as_sweep(tmp_path / "s", *swept))
    assert step.words[-1] == "train.max_steps=4000"
    assert (step.runs, step.tokens) == (10 * seeds, 10 * seeds * 4000 * 4096)
    told = {key: float(flops) for key, _, _, flops in re.findall(WIDTH, step.why)}
    rung = 6 * sum(size.values()) * 4096 * 2 * seeds
    assert told["train.max_steps"] == pytest.approx(4000 * rung, rel=0.01)
    assert told["train.seed"] == pytest.approx(3500 * rung / seeds, rel=0.01)
