"""`optimizer.rule`: rate, batch, weight decay and beta2 from the size of a run, against the papers'
formulas; what is set is written back, so that nothing sets it twice."""

import dataclasses
import itertools
import math
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from llmexp.compare.folding import factors
from llmexp.compare.records import Record, Setting
from llmexp.config.convert import build, with_knobs
from llmexp.config.knobs import deciding_result
from llmexp.config.rules import SCALING_RULES, Reference
from llmexp.config.sections import Config, plain
from llmexp.config.values import flatten
from llmexp.run.batch import solve_batch
from llmexp.run.budget import TokenCost
from llmexp.run.rules import solve_rule
from llmexp.train.assembly.assemble import assemble
from tests.conftest import TINY, train
from tests.tools import composed
from tests.train.resumed import ends

SHORT = [
    "data=synthetic", "data.n_tokens=4000", "schedule=constant", "schedule.warmup_ratio=0",
    "train.log_every=1", "train.eval_every=null", "checkpoint.every=null",
]  # fmt: skip
LENGTH = 8
AT = Reference(lr=2e-3, weight_decay=0.1, N=3e6, D=7e7, C=1e15, B=6000)
OF_ONES_OWN = [name for name, rule in SCALING_RULES.items() if rule.at is None]


@pytest.fixture(scope="module")
def usual() -> Config:
    return composed("data=synthetic", f"batch.sequence_length={LENGTH}", "tracker=none")


def ruled(usual: Config, rule: str, batch=(), train=(), **optimizer) -> Config:
    """A config whose rule sets all that is not given here."""
    opened = {"lr": None, "weight_decay": None, "beta2": None} | optimizer
    own = {"reference": vars(AT)} if rule in OF_ONES_OWN else {}
    usual = with_knobs(usual, batch=dict(batch), train=dict(train))
    return with_knobs(usual, optimizer={"rule": rule} | own | opened)


def papers(
    rule: str, wanted: str, n: float = 1, d: float = 1, c: float = 1, b: float = 1, lr: float = 1
) -> float | None:
    """What a paper's formula gives, B in tokens; None: it does not speak of it."""
    tau = AT.B / (AT.lr * AT.weight_decay * AT.D)
    match rule, wanted:
        case "porian", "lr":
            return 0.0047 * (n / 108e6) ** (-1 / 3)
        case "porian", "B":
            return 2048 * 160 * (n / 108e6) ** (2 / 3)
        case "porian", "beta2":
            return 0.95 if b >= 524288 else 0.99
        case "step_law", "lr":
            return 1.79 * n**-0.713 * d**0.307
        case "step_law", "B":
            return 0.58 * d**0.571
        case "deepseek", "lr":
            return 0.3118 / c**0.125
        case "deepseek", "B":
            return 0.2920 * c**0.3271
        case "linear", "lr":
            return AT.lr * b / AT.B
        case (("sqrt" | "t_epoch"), "lr"):
            return AT.lr * math.sqrt(b / AT.B)
        case "t_epoch", "weight_decay":
            return AT.weight_decay * (b / AT.B) * (AT.D / d) * (AT.lr / lr)
        case "power_lines", "B":
            return AT.B * (d / AT.D) ** 0.383
        case "power_lines", "weight_decay":
            timescale = tau * ((d / n) / (AT.D / AT.N)) ** -0.527
            return b / (lr * timescale * d)
    return None


sizes = st.tuples(
    st.integers(10**4, 10**11), st.integers(10**5, 10**13), st.integers(1, 8), st.integers(1, 8),
)  # fmt: skip


NAMES = ("lr", "weight_decay", "beta2", "B")


@given(
    st.sampled_from([rule for rule in SCALING_RULES if rule != "reference"]),
    sizes,
    st.sets(st.sampled_from(NAMES)),
)
def test_rules_are_the_formulas_of_their_papers_and_what_is_given_stays(usual, rule, size, names):
    """The batch is the nearest multiple of what the ranks and their micro-batches can hold."""
    n, d, micro, dp = size
    flops = 6 * n + 1000
    by_rule = [name for name in NAMES if papers(rule, name) is not None]
    values = {"lr": 0.0123, "weight_decay": 0.456, "beta2": 0.9}
    asked = {*names} if "lr" in by_rule else {*names, "lr"}  # someone has to set the rate
    kept = {key: value for key, value in values.items() if key in asked}
    batch, given_batch = {"micro_batch_size": micro}, "B" in names or "B" not in by_rule
    if given_batch:
        batch["real_batch_size"] = 3 * micro * dp
    config = ruled(usual, rule, batch, {"max_tokens": d}, **kept)
    solved, words = solve_rule(config, dp, TokenCost(flops, n))
    real, text = solved.batch.real_batch_size, words.replace(",", "")
    b = real * LENGTH
    if given_batch:
        assert real == 3 * micro * dp
    else:
        wanted = papers(rule, "B", n, d, flops * d)
        assert real % (micro * dp) == 0
        assert abs(b - wanted) <= LENGTH * micro * dp / 2 or real == micro * dp
    rounded = f"rounded to {real} x {LENGTH} = {b}"
    assert "B" not in by_rule or rounded in text or f"B {b} is given (by the rule B = " in text
    for name, found in ((name, solved.optimizer[name]) for name in values):
        expected = papers(rule, name, n, d, flops * d, b, solved.optimizer["lr"])
        if name in kept:
            assert found == kept[name]
            assert expected is None or f"{name} {found} is given (by the rule " in words
        elif expected is None:
            assert found is None
        else:
            assert found == pytest.approx(expected, rel=1e-12)
            assert re.search(rf"\b{name} = [^;]*\b{re.escape(f'{found:.6g}')}", words), words
    if rule == "step_law":
        assert f"), N {n:,.10g}, D {d:,.10g}: B" in words
    assert words.startswith(f"{rule} ({SCALING_RULES[rule].source}), ")
    assert solve_rule(solved, dp, TokenCost(flops, n)) == (solved, words)  # solved into itself
    cut = dataclasses.replace(solved, batch=solve_batch(solved.batch, dp))
    assert solve_rule(cut, dp, TokenCost(flops, n)) == (cut, words)


powers = st.dictionaries(st.sampled_from("NDC"), st.floats(-2, 2).map(lambda x: round(x, 3)))


@given(powers, powers, powers, st.floats(-1, 1).map(lambda x: round(x, 3)))
def test_a_reference_gives_itself_at_its_own_size(usual, of_batch, of_rate, of_decay, by_batch):
    """Whatever the exponents are; twice as large, each value follows its own."""
    exponents = {"B": of_batch, "lr": of_rate | {"B": by_batch}}
    exponents["weight_decay"] = of_decay | {"lr": 1.0}
    n, d, flops = 1000, 64_000, 7000
    at = {"lr": 1e-3, "weight_decay": 0.2, "N": n, "D": d, "C": flops * d, "B": 32 * LENGTH}
    config = ruled(usual, "reference", train={"max_tokens": d}, reference=at, exponents=exponents)
    solved, _ = solve_rule(config, 1, TokenCost(flops, n))
    assert solved.batch.real_batch_size == 32
    assert (solved.optimizer["lr"], solved.optimizer["weight_decay"]) == (1e-3, 0.2)
    given_batch = with_knobs(config, batch={"real_batch_size": 64}, train={"max_tokens": 2 * d})
    larger, _ = solve_rule(given_batch, 1, TokenCost(2 * flops, 2 * n))

    def grown(law: dict[str, float]) -> float:  # N and D twice as large, C four times
        return 2 ** (law.get("N", 0) + law.get("D", 0) + 2 * law.get("C", 0))

    rate = grown(of_rate) * 2**by_batch
    assert larger.optimizer["lr"] == pytest.approx(1e-3 * rate, rel=1e-9)
    assert larger.optimizer["weight_decay"] == pytest.approx(0.2 * grown(of_decay) * rate, rel=1e-9)


def test_the_order_knows_no_circle(usual):
    """Tokens come before the batch, but where a budget in steps counts them by it."""
    token_cost = TokenCost(10**7, 10**6)
    steps = ruled(usual, "step_law", {"real_batch_size": 40}, {"max_steps": 100})
    solved, words = solve_rule(steps, 1, token_cost)
    assert solved.optimizer["lr"] == pytest.approx(1.79 * 1e6**-0.713 * 32_000**0.307)
    assert "N 1,000,000, D 32,000: B 320 is given" in words
    by_size = ruled(usual, "porian", train={"max_steps": 100})  # of the parameters alone
    batch = solve_rule(by_size, 1, token_cost)[0].batch
    assert batch.real_batch_size == round(327680 * (1 / 108) ** (2 / 3) / 8)
    flops = ruled(usual, "deepseek", train={"max_flops": 1e12})
    rate = solve_rule(flops, 1, token_cost)[0].optimizer["lr"]
    assert rate == pytest.approx(0.3118 / 1e12**0.125)
    ratio = ruled(usual, "step_law", train={"tokens_per_parameter": 20})
    assert "D 20,000,000: " in str(solve_rule(ratio, 1, token_cost)[1])


def test_the_last_word_on_what_a_rule_sets_counts():
    """Values of an option or of an experiment give way to a rule; those beside it stay."""
    porian = composed("data=synthetic", "optimizer.rule=porian", "optimizer.weight_decay=0.3")
    kept = porian.optimizer
    assert (kept["lr"], kept["beta2"], kept["weight_decay"]) == (None, None, 0.3)
    plays = ["experiment=shakespeare_nanogpt_cpu", "data=synthetic", "data.val_ratio=0.1"]
    by_rule = composed(*plays[:2], "optimizer.rule=porian", "batch.micro_batch_size=4")
    assert (by_rule.batch.micro_batch_size, by_rule.batch.gradient_accumulation_steps) == (4, None)
    assert by_rule.optimizer["lr"] is None
    sized = composed(*plays[:2], "optimizer.rule=porian", "optimizer.lr=0.1",
                     "batch.real_batch_size=24")  # fmt: skip
    assert (sized.batch.real_batch_size, sized.batch.micro_batch_size) == (24, 12)
    assert sized.optimizer["lr"] == 0.1
    ramp = composed("data=synthetic", "optimizer.rule=porian", "batch.ramp={0: 8, 1000: 16}")
    assert ramp.batch.ramp == "{0: 8, 1000: 16}"
    sqrt = composed("data=synthetic", "optimizer.rule=sqrt", "optimizer.reference.lr=0.1",
                    "optimizer.reference.B=512", "batch.micro_batch_size=4")  # fmt: skip
    assert sqrt.batch.micro_batch_size == 4  # it does not speak of the batch
    assert sqrt.optimizer["reference"] == {"lr": 0.1, "B": 512}


def test_the_rate_of_a_run_is_that_of_its_batch(runs):
    """Of all of its optimizers."""
    steps = ["optimizer=muon", "batch.real_batch_size=8", "train.max_steps=4"]
    by_rule = ["optimizer.rule=linear", "optimizer.reference={lr: 0.01, B: 24}"]
    whole = runs(*SHORT, *steps, *by_rule)
    assert [row["lr"] for row in whole.rows()] == [0.04] * 4
    words = whole.json("run.json")["rule"]
    assert words.endswith("= 0.04")
    assert words in " ".join(whole.out.split())
    written = yaml.safe_load((whole.folder / "config.yaml").read_text())["optimizer"]
    assert (written["lr"], written["rule"]) == (0.04, "linear")
    same = runs(*SHORT, *steps, "optimizer.lr=0.04")
    assert [r["train/loss"] for r in same.rows()] == [r["train/loss"] for r in whole.rows()]


def test_a_run_with_all_that_a_rule_sets_is_gone_on_with_and_forked(tmp_path, monkeypatch):
    """It has the weights of a run that was given the numbers; a fork keeps them, by a longer budget
    too, and takes others where its rule is given anew, or its batch, by sqrt."""
    rule = ["optimizer.rule=porian", "train.max_tokens=2000", "train.stop_step=2",
            "batch.micro_batch_size=2"]  # fmt: skip
    first = ends(tmp_path, "train", *TINY, *SHORT, *rule, "hydra.run.dir=run", code=75)
    before = yaml.safe_load((first.folder / "config.yaml").read_text())
    words = first.json("run.json")["rule"]
    ends(tmp_path, "resume", "run")
    assert first.json("run.json")["rule"] == words
    after = yaml.safe_load((first.folder / "config.yaml").read_text())
    assert after["optimizer"] == before["optimizer"]
    assert after["batch"] == before["batch"]
    found = {key: after["optimizer"][key] for key in ("lr", "beta2")}
    real = after["batch"]["real_batch_size"]
    numbers = [f"optimizer.{key}={value!r}" for key, value in found.items()]
    numbers += [f"batch.real_batch_size={real}", "batch.micro_batch_size=2"]
    same = train(tmp_path, "same", *SHORT, *numbers, "train.max_tokens=2000")
    assert [r["train/loss"] for r in same.rows()] == [r["train/loss"] for r in first.rows()]
    runs = [flatten(plain(build(yaml.safe_load((r.folder / "config.yaml").read_text()))))
            for r in (first, same)]  # fmt: skip
    assert deciding_result(runs[0]) == deciding_result(runs[1])  # one setting, for compare

    monkeypatch.chdir(tmp_path)
    fork = composed("fork.run=run", "train.max_tokens=9000")
    assert {key: fork.optimizer[key] for key in found} == found
    assert fork.batch.real_batch_size == real
    anew = composed("fork.run=run", "optimizer.rule=step_law", "train.max_tokens=9000")
    assert (anew.optimizer["lr"], anew.batch.real_batch_size) == (None, None)
    assert anew.optimizer["beta2"] == found["beta2"]
    assert assemble(anew).config.batch.real_batch_size == max(1, round(0.58 * 9000**0.571 / 12))
    sqrt = ["optimizer.rule=sqrt", "optimizer.reference={lr: 0.01, B: 96}", "train.max_steps=2"]
    train(tmp_path, "trunk", *SHORT, *sqrt, "batch.real_batch_size=8")
    wider = assemble(composed("fork.run=trunk", "batch.real_batch_size=32", "train.max_steps=3"))
    assert wider.config.optimizer["lr"] == 0.02


@pytest.mark.parametrize(
    ("rule", "section", "at"),
    [
        ("power_lines", "reference", {"D": 1e8}),
        ("reference", "exponents", {"B": {"D": 0.3}}),
        ("reference", "exponents", {"weight_decay": {"D": 0.3}}),
    ],
)
def test_a_rule_decides_where_anything_that_it_sets_is_open(usual, rule, section, at):
    """Points of a sweep over its numbers are none of equal results, though the rate is given."""
    own = {"lr": 1e-3, "weight_decay": None if rule == "power_lines" or "B" not in at else 0.1}
    usual = ruled(usual, rule, train={"max_tokens": 10**6}, **own)
    one = with_knobs(usual, optimizer={section: at})
    found = [deciding_result(flatten(plain(config))) for config in (one, usual)]
    assert found[0] != found[1]
    settled = {"lr": 1e-3, "weight_decay": 0.1, "beta2": 0.95}
    known = {"optimizer": settled, "batch": {"real_batch_size": 8}}
    found = [deciding_result(flatten(plain(with_knobs(c, **known)))) for c in (one, usual)]
    assert found[0] == found[1]


@pytest.mark.parametrize("swept", [["batch.real_batch_size"], ["optimizer.rule", "model.depth"]])
def test_what_a_rule_sets_is_no_setting_of_its_own(usual, swept):
    """The rule is, where it was swept."""
    entries = []
    for first, depth in itertools.product((0, 1), (2, 3)):
        rule = ("porian", "step_law")[first] if "optimizer.rule" in swept else "t_epoch"
        batch = {} if "optimizer.rule" in swept else {"real_batch_size": 8 * depth}
        config = ruled(usual, rule, batch, {"max_tokens": 10**6}, beta2=0.95)
        config = with_knobs(config, model={"depth": depth, "n_layers": depth})
        solved, _ = solve_rule(config, 1, TokenCost(1000, 1000 * depth))
        flat = flatten(plain(solved))
        record = Record(Path("run"), "run", None, "finished", flat, {}, {}, {}, swept=tuple(swept))
        entries.append(Setting("run", (record,), flat, {}, {}, "finished"))
    keys = sorted({k for e in entries for k in e.values})
    differing = [k for k in keys if len({repr(e.values.get(k)) for e in entries}) > 1]
    assert "optimizer.lr" in differing
    kept = [key for key in factors(entries, differing) if not key.startswith("model.n_")]
    assert sorted(kept) == sorted(swept) or kept == ["batch.real_batch_size", "model.depth"]
