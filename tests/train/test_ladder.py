"""Inputs of a ladder: budgets that follow from the model, and batches in tokens."""

import itertools
import json
import re
from fractions import Fraction

import pytest
import yaml

from llmexp.__main__ import run
from llmexp.run.batch import solve_batch
from tests.conftest import ROOT, TINY, train
from tests.tools import composed, printed
from tests.train.resumed import ends

SHORT = [
    "data=synthetic", "data.n_tokens=20000", "schedule=constant", "schedule.warmup_steps=0",
    "train.log_every=1", "train.eval_every=null", "checkpoint.every=null", "train.device=cpu",
]  # fmt: skip

CONF = ROOT / "conf/experiment"
WORDS = (CONF / "horizon.yaml").read_text()
HORIZON = re.findall(r"(?:keep_every: |fork\.step=)([\d,]+)", WORDS)[::-1]


def losses(rows: list[dict]) -> list[tuple[float, float]]:
    return [(row["train/loss"], row["grad_norm"]) for row in rows]


def test_a_budget_in_flops_is_the_run_over_its_tokens_also_cut_and_lengthened(tmp_path):
    """Killed after two steps, gone on with, then given twice the FLOPs in the same folder."""
    facts = json.loads(ends(tmp_path, "plan", *TINY, *SHORT, "--json").out)
    price = facts["flops_per_token"]
    flops = price * 12 * 35  # 35 sequences, in windows of 8
    batch = "batch.tokens_per_step=96"
    given = [batch, f"train.max_flops={flops + price}", "train.stop_step=2", "hydra.run.dir=run"]
    first = ends(tmp_path, "train", *TINY, *SHORT, *given, code=75)
    ends(tmp_path, "resume", "run")
    run = first.json("run.json")
    assert (run["max_tokens"], run["max_steps"], run["tail_sequences"]) == (420, 5, 3)
    assert f"the run ends {price:,.4g} FLOPs" in run["budget_given"]
    assert run["total_flops"] == flops
    plain = [*SHORT, "batch.real_batch_size=8"]
    same = train(tmp_path, "same", *plain, "train.max_tokens=420")
    assert losses(first.rows()) == losses(same.rows())
    config = yaml.safe_load((first.folder / "config.yaml").read_text())
    assert config["batch"]["tokens_per_step"] == 96
    assert config["batch"]["real_batch_size"] == 8
    # a short last window cannot be lengthened, a whole one can
    refused = ends(tmp_path, "resume", "run", f"train.max_flops={2 * flops}", code=2)
    assert "the last step of run was a short one" in refused.err
    whole = [*SHORT, batch, f"train.max_flops={price * 12 * 16}"]
    longer = train(tmp_path, "longer", *whole)
    ends(tmp_path, "resume", "longer", f"train.max_flops={price * 12 * 32}")
    beside = train(tmp_path, "beside", *plain, "train.max_tokens=384")
    assert losses(longer.rows()) == losses(beside.rows())


def test_tokens_per_parameter_count_the_head_and_no_tables(tmp_path):
    settings = [*TINY, *SHORT, "train.tokens_per_parameter=0.1"]
    found = printed("plan", ends(tmp_path, "plan", *settings, "--json").out)
    n = found["parameters_with_head"]
    assert n == found["parameters"] - 32 * 16  # but for the positions: the head is tied
    assert found["max_tokens"] == int(Fraction(n, 10)) // 12 * 12
    text = ends(tmp_path, "plan", *settings).out
    assert f"train.tokens_per_parameter=0.1 x {n:,} parameters" in " ".join(text.split())


def test_a_fork_takes_another_batch_in_tokens_or_in_sequences(tmp_path, monkeypatch):
    train(tmp_path, "trunk", *SHORT, "batch.tokens_per_step=96", "train.max_steps=2")
    monkeypatch.chdir(tmp_path)
    for given, real, tokens in (
        ([], 8, 96),
        (["batch.tokens_per_step=48"], 4, 48),
        (["batch.real_batch_size=4"], 4, None),
        (["batch.sequence_length=24"], 8, None),
        (["batch.micro_batch_size=2"], 8, 96),
    ):
        config = composed("fork.run=trunk", "train.max_steps=3", *given)
        solved = solve_batch(config.batch, 1)
        assert (solved.real_batch_size, solved.tokens_per_step) == (real, tokens), given


def test_a_sweep_over_flops_says_where_its_tokens_come_from(tmp_path):
    sweep = ["-m", *TINY, *SHORT, "train.max_flops=1e8,2e8", "model.n_layers=1,2"]
    found = ends(tmp_path, "plan", *sweep)
    assert "note: tokens follow from train.max_flops and the model" in found.err
    assert "unequal" not in found.err


@pytest.fixture
def planned(tmp_path, monkeypatch, capsys):
    """The points of a ready-made ladder, over other data."""
    monkeypatch.chdir(tmp_path)

    def plan(name: str) -> list[dict]:
        data = ["data=synthetic", "data.n_tokens=20000", "tracker=none", "train.device=cpu"]
        assert run(["plan", f"experiment={name}", *data, "--json"]) == 0
        found = printed("plan", capsys.readouterr().out)
        return found.get("points", [found])

    return plan


def test_isoflop_spends_each_budget_on_five_sizes(planned):
    """All but one sequence of it, at the rate of the size."""
    points = planned("isoflop")
    by_budget = itertools.groupby(points, key=lambda point: point["values"]["train.max_flops"])
    budgets = {budget: list(group) for budget, group in by_budget}
    assert len(budgets) == 4
    for budget, group in budgets.items():
        sizes = [point["parameters_with_head"] for point in group]
        assert len(sizes) == 5
        assert all(1.5 < b / a < 3 for a, b in itertools.pairwise(sizes))
        for point in group:
            rest = budget - point["total_flops"]
            assert 0 <= rest < point["flops_per_token"] * point["sequence_length"]
            n, words = point["parameters_with_head"], point["rule"]
            reference = yaml.safe_load((CONF / "isoflop.yaml").read_text())["optimizer"]
            at, law = reference["reference"], reference["exponents"]["lr"]
            by_batch = (point["tokens_per_step"] / at["B"]) ** law["B"]
            assert words.endswith(f" = {at['lr'] * (n / at['N']) ** law['N'] * by_batch:.6g}")
            assert point["max_steps"] > 100
    for group in zip(*budgets.values(), strict=True):  # D grows with C at a held size
        grown = [point["max_tokens"] / point["values"]["train.max_flops"] for point in group]
        assert grown == pytest.approx([grown[0]] * 4, rel=2e-3)


def test_the_other_ladders_are_as_they_say(planned):
    rates = planned("lr_ladder")
    assert len({point["parameters_with_head"] for point in rates}) == 3
    assert len(rates) == 3 * len({point["values"]["optimizer.lr"] for point in rates})
    for point in rates:
        rest = 5 * point["parameters_with_head"] - point["max_tokens"]
        assert 0 <= rest < point["sequence_length"]
    batches = planned("batch_ladder")
    assert len({point["max_tokens"] for point in batches}) == 1
    assert {point["tail_sequences"] for point in batches} == {0}
    # the noise scale needs a second micro-batch
    assert min(point["gradient_accumulation_steps"] for point in batches) > 1
    (trunk,) = planned("horizon")
    steps = [int(step) for step in HORIZON[1].split(",")]
    n, tokens = trunk["parameters_with_head"], trunk["tokens_per_step"]
    assert trunk["max_steps"] == steps[-1]
    assert all(step % int(HORIZON[0]) == 0 for step in steps)
    for step, wanted in zip(steps, (0.5, 1, 2, 3, 4), strict=True):
        end = step + int(step * 0.25 + 0.5)  # schedule.decay_ratio: 0.2 of the whole way
        assert end * tokens / n == pytest.approx(20 * wanted, rel=1e-3)
