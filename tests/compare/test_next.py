"""What `llmexp next` proposes for run folders whose losses are planted."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path

import numpy as np
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from llmexp.__main__ import run as llmexp
from llmexp.compare.comparing import compare
from llmexp.compare.known import Step
from llmexp.compare.next_step import NEXT_RULES, compared, propose
from llmexp.compare.screening import design
from llmexp.runs.ending import COMES_AGAIN
from llmexp.runs.ledger import read_ledger
from tests.compare.synthetic import make_run, make_sweep
from tests.conftest import ROOT, TINY
from tests.conftest import llmexp as run_llmexp
from tests.tools import amend, printed

NOISE = {1: 0.0, 2: 0.02, 3: -0.01, 4: 0.013, 5: -0.02}
PARSER = OverridesParser.create()


def planted(path: Path, losses: dict[object, float], seeds=(1, 2, 3), *, wobble=0.001,
            key="optimizer.lr", sweep=True, fixed=(), **more) -> Path:  # fmt: skip
    """Runs of settings that differ in one number, over seeds that they share."""
    points = {}
    for i, (value, loss) in enumerate(losses.items()):
        for seed in seeds:
            text = "null" if value is None else value
            overrides = ["train.max_steps=400", *fixed, f"{key}={text}", f"train.seed={seed}"]
            own = wobble * np.random.default_rng([i, seed]).normal()
            points[f"v{value}+seed_{seed}"] = dict(
                offset=loss + NOISE[seed] + own, seed=seed, facts={"overrides": overrides},
                point={"overrides": overrides}, **{key.replace(".", "__"): value}, **more,
            )  # fmt: skip
    if sweep:
        return make_sweep(path, points, [key, "train.seed"])
    for label, settings in points.items():
        settings.pop("point")
        make_run(path / label, **settings)
    return path


def step_of(*paths: Path) -> Step:
    step = propose(compare(paths))
    for word in shlex.split(step.command)[2:]:  # what is pasted is what Hydra reads
        if ("=" in word and step.words[0] == "train") or word.startswith("optimizer."):
            assert PARSER.parse_override(word)
    assert tuple(shlex.split(step.command)[1:]) == step.words
    printed("next", json.dumps(step.data, allow_nan=False))
    return step


def test_a_decided_sweep_has_nothing_left_to_do(tmp_path):
    step = step_of(planted(tmp_path / "s", {1e-3: 0.5, 3e-3: 0.0, 1e-2: 0.5}))
    assert (step.rule, step.words) == ("nothing", ())
    assert "lr=0.003 is best" in step.why


def test_settings_that_are_not_told_apart_get_seeds_and_others_do_not(tmp_path):
    losses = {1e-3: 0.5, 3e-3: 0.0, 1e-2: 0.02, 3e-2: 0.5}
    path = planted(tmp_path / "s", losses, wobble=0.03)
    step = step_of(path)
    assert step.rule == "seeds"
    command, folder, grid, seeds = step.words
    assert (command, folder, grid) == ("resume", str(path), "optimizer.lr=0.003,0.01")
    given = seeds.removeprefix("train.seed=").split(",")
    assert given[:3] == ["1", "2", "3"]
    assert step.runs == 2 * (len(given) - 3) > 0
    assert step.tokens == step.runs * 400 * 8 * 128
    # 10 s until a process trains, where nothing was measured
    assert step.hours == pytest.approx(step.runs * (400 * 0.5 + 10) / 3600)


def test_what_runs_take_beside_their_steps_counts_and_is_said(tmp_path):
    """By their status.json; of a run that went on it has the last part alone."""
    losses, more = {1e-3: 0.5, 3e-3: 0.0, 1e-2: 0.0}, {"wobble": 0.03}
    began = {"started": 1.8e9, "ended": 1.8e9 + 400 * 0.5 + 25}
    step = step_of(planted(tmp_path / "s", losses, status=began, **more))
    assert step.beside_s == pytest.approx(35)
    assert step.hours == pytest.approx(step.runs * (400 * 0.5 + 35) / 3600)
    assert "35s for the start" in str(step)
    again = {"started": 1.8e9, "ended": 1.8e9 + 60}
    assert step_of(planted(tmp_path / "t", losses, status=again, **more)).beside_s == 10


def test_single_runs_get_three_seeds_of_the_nearest_settings_and_a_grid_decides(tmp_path):
    losses = {round(1e-3 * 1.5**i, 6): 0.01 * (i - 5) ** 2 for i in range(11)}
    step = step_of(planted(tmp_path / "r", losses, seeds=(1,), sweep=False))
    assert step.rule == "seeds"
    assert step.words[-1] == "train.seed=2,3"
    assert step.runs == 8 * 2  # of eight settings
    grid = planted(tmp_path / "s", losses, seeds=(1,))
    step = step_of(grid)
    assert (step.rule, step.words) == ("decide", ("resume", str(grid), "sweep.decide=true"))
    assert step.runs == 11  # the first look is at two seeds each


def test_a_grid_whose_settings_computed_the_same_gets_no_seeds(tmp_path):
    points = {}
    for limit in (1.0, 2.0):
        given = [f"clip.max_norm={limit}", "train.seed=1"]
        facts, point = {"overrides": given}, {"overrides": given}
        points[f"c{limit}"] = dict(max_norm=limit, wobble=0.0, facts=facts, point=point)
    step = step_of(make_sweep(tmp_path / "s", points, ["clip.max_norm"]))
    assert (step.rule, step.words) == ("nothing", ())
    assert step.why.startswith("clip=1.0 and clip=2.0 computed the same")


def decided(path: Path, most: int = 3) -> Path:
    """A sweep that has looked at the three seeds of its settings."""
    look = {"seeds": ["1", "2", "3"], "level": 0.04, "most": most, "going": [], "worse": []}
    amend(path / "sweep.json", looks=[look | {"why": "all 3 seeds are trained"}])
    return path


def test_intervals_of_one_look_hold_over_all_looks(tmp_path):
    sweep = decided(planted(tmp_path / "s", {1e-3: 0.0, 3e-3: 0.1}, (1, 2, 3), wobble=0.3))
    (said,) = [s for s in compare([sweep]).why if s.startswith("Intervals")]
    assert said.startswith("Intervals are at 95 %, over all looks together, with the noise")


def test_where_seeds_are_too_many_that_is_said(tmp_path):
    step = step_of(planted(tmp_path / "s", {1e-3: 0.0, 3e-3: 0.0, 1e-2: 0.0}, (1, 2), wobble=0.3))
    assert step.rule == "nothing"
    assert step.why.startswith("more than 12 seeds each are not proposed. Undecided: ")


def test_a_sweep_that_ends_undecided_is_extended_and_chooses_the_seeds_of_a_further_value(tmp_path):
    losses = {1e-3: 0.5, 3e-3: 0.0, 1e-2: 0.02, 3e-2: 0.5}
    path = planted(tmp_path / "s", losses, wobble=0.03)
    assert step_of(path).rule == "seeds"
    step = step_of(decided(path))
    most = int(step.words[-1].removeprefix("sweep.max_seeds="))
    assert (step.rule, step.words[:2]) == ("seeds", ("resume", str(path)))
    assert step.runs == 2 * (most - 3)  # of the two that were not shown to be worse
    words = f"all 3 seeds are trained; {most - 3} more seeds each would tell"
    assert words in compare([path]).headline
    cut = decided(path, most=8)  # by hours or tokens, say
    assert (step_of(cut).rule, "3 seeds are trained" in step_of(cut).why) == ("nothing", True)
    path = decided(planted(tmp_path / "t", {1e-3: 0.9, 2e-3: 0.5, 4e-3: 0.0}))
    step = step_of(path)
    assert (step.rule, step.words) == ("wider", ("resume", str(path), "optimizer.lr=0.008"))
    assert step.runs == 3


@pytest.mark.parametrize(
    ("losses", "proposed"),
    [
        ({1e-3: 0.9, 2e-3: 0.5, 4e-3: 0.0}, "optimizer.lr=0.008"),
        ({1e-3: 0.0, 2e-3: 0.5, 4e-3: 0.9}, "optimizer.lr=0.0005"),
    ],
)
@pytest.mark.parametrize("seeds", [(1, 2, 3), (1,)])
def test_a_best_value_at_an_edge_widens_the_range(tmp_path, losses, proposed, seeds):
    step = step_of(planted(tmp_path / "s", losses, seeds))
    assert step.rule == "wider"
    assert step.words[2:] == (proposed, f"train.seed={','.join(map(str, seeds))}")
    assert step.runs == len(seeds)


def test_no_range_is_widened_past_what_a_knob_takes_no_limit_or_a_failure(tmp_path):
    falls = {0.5: 0.9, 1.0: 0.5, 2.0: 0.0}
    clip = planted(tmp_path / "c", falls | {None: 0.3}, key="clip.max_norm")
    assert step_of(clip).rule == "nothing"
    beta = planted(tmp_path / "b", {0.5: 0.9, 0.7: 0.5, 0.99: 0.0}, key="optimizer.beta2")
    assert step_of(beta).rule == "nothing"
    failed = planted(tmp_path / "f", falls | {4.0: 0.3}, key="clip.max_norm")
    for status in failed.glob("*v4.0*/status.json"):
        amend(status, state="failed")
    ledger = read_ledger(failed)
    for point in ledger.points:
        point.attempts = 2
    ledger.save()
    assert step_of(failed).rule == "nothing"


def test_nothing_is_proposed_that_was_trained_in_other_words_or_is_longer_than_the_runs(tmp_path):
    losses = {"1e-2": 0.5, "1.2e-2": 0.0, "1.45e-2": 0.38}  # lowest at 0.0122
    assert step_of(planted(tmp_path / "s", losses)).rule == "nothing"
    warmup = {100: 0.5, 300: 0.0}  # of 400 steps
    long = planted(tmp_path / "w", warmup, key="schedule.warmup_steps")
    assert step_of(long).rule == "nothing"


def test_of_each_step_more_micro_batches_may_be_proposed_than_there_are_steps(tmp_path):
    points, key = {}, "batch.gradient_accumulation_steps"
    for count, loss in ((8, 0.9), (16, 0.5), (32, 0.0)):
        for seed in (1, 2, 3):
            words = ["train.max_tokens=524288", f"{key}={count}", f"train.seed={seed}"]
            given = {"overrides": words}
            points[f"{count}-{seed}"] = dict(
                offset=loss + NOISE[seed] - 3 * math.exp(-512 / count / 80), seed=seed,
                steps=512 // count, accumulation=count, val_every=512 // count,
                facts=given, point=given,
            )  # fmt: skip
    step = step_of(make_sweep(tmp_path / "s", points, [key, "train.seed"]))
    assert (step.rule, step.words[2]) == ("wider", f"{key}=64")  # of runs of 16 steps


def test_what_is_left_or_failed_once_goes_first(tmp_path):
    path = planted(tmp_path / "s", {1e-3: 0.9, 3e-3: 0.5, 1e-2: 0.0})
    status = next(path.glob("0-*")) / "status.json"
    amend(status, state="failed")
    step = step_of(path)
    assert (step.rule, step.words, step.runs) == ("rest", ("resume", str(path)), 1)
    amend(status, error=f"the loss is not finite; {COMES_AGAIN}")
    assert step_of(path).rule != "rest"
    amend(status, state="preempted")
    assert step_of(path).words == ("resume", str(path))
    alone = make_run(tmp_path / "alone", state="preempted")
    assert step_of(alone).words == ("resume", str(alone))
    other = make_run(tmp_path / "other", state="preempted", seed=2)
    assert step_of(alone, other).words == ("resume", str(alone))
    assert step_of(alone, other).why.endswith("Of 2 such runs this is the first.")


def test_of_many_effects_of_a_screen_the_three_largest_are_confirmed(tmp_path):
    sizes = {"optimizer.lr": 0.4, "clip.max_norm": 0.3, "model.dropout": 0.2,
             "optimizer.beta2": 0.1, "schedule.warmup_steps": 0.0}  # fmt: skip
    points = {}
    for number, row in enumerate(design(5, 16)):
        own = dict(zip(sizes, row, strict=True))
        overrides = [f"{key}={0.1 + level}" for key, level in own.items()]
        points[f"p{number}"] = dict(
            offset=sum(sizes[key] * level for key, level in own.items()), wobble=1e-4,
            facts={"overrides": overrides}, point={"overrides": overrides},
            **{key.replace(".", "__"): 0.1 + level for key, level in own.items()},
        )  # fmt: skip
    path = make_sweep(tmp_path / "s", points, list(sizes))
    amend(path / "sweep.json", screen=True)
    step = step_of(path)
    assert (step.rule, step.runs) == ("screen", 2 * 2**3)
    assert [w for w in step.words if "," in w] == [
        "optimizer.lr=0.1,1.1", "clip.max_norm=0.1,1.1", "model.dropout=0.1,1.1"
    ]  # fmt: skip
    assert "optimizer.beta2=0.1" in step.words
    assert "the 3 largest effects are asked for" in step.why


def test_the_best_of_a_search_are_confirmed_with_fresh_seeds(tmp_path):
    losses = {0.0012: 0.3, 0.0031: 0.0, 0.0042: 0.1, 0.0077: 0.2}
    path = planted(tmp_path / "s", losses, seeds=(1,), fixed=["model=gpt_tiny"])
    amend(path / "sweep.json", grid=False)
    step = step_of(path)
    assert (step.rule, step.words) == ("confirm", ("resume", str(path), "sweep.search.confirm=3"))
    assert step.runs == 9


@pytest.mark.parametrize(
    ("fresh", "lrs", "asked", "runs"), [(2, 1, 4, 2), (1, 2, 3, 4), (2, 2, 4, 4), (1, 1, 4, 3)]
)
def test_fresh_seeds_of_a_search_that_are_too_few_become_more(tmp_path, fresh, lrs, asked, runs):
    """Also where it has confirmed a single setting, whose figure has no interval."""
    losses = {lr: 0.04 * i for i, lr in enumerate((0.001, 0.002)[:lrs])}
    seeds = [5, *range(1, fresh + 1)]  # that of the trials first
    path = planted(tmp_path / "s", losses, seeds, wobble=0.02, fixed=["model=gpt_tiny"])
    amend(path / "sweep.json", grid=False)
    step = step_of(path)
    assert step.words == ("resume", str(path), f"sweep.search.seeds={asked}")
    assert step.runs == runs


@pytest.mark.parametrize("sweep", [True, False])
def test_a_setting_alone_gets_more_seeds_than_two(tmp_path, sweep):
    path = planted(tmp_path / "s", {1e-3: 0.0}, (1, 3), sweep=sweep, fixed=["model=gpt_tiny"])
    step = step_of(path)
    assert (step.rule, step.runs) == ("seeds", 2)
    assert step.words[-1] == ("train.seed=1,3,2,4" if sweep else "train.seed=2,4")


def test_a_setting_alone_whose_runs_do_not_say_how_they_were_made_gets_no_command(tmp_path):
    for seed in (1, 2):
        make_run(tmp_path / f"{seed}", seed=seed)
    step = step_of(tmp_path)
    assert (step.rule, step.words) == ("nothing", ())
    assert step.why.startswith("no single command makes runs like these. seeds 1 and 2: ")


def test_unequal_budgets_are_made_equal(tmp_path):
    for steps, lr in ((400, 1e-3), (200, 3e-3)):
        words = [f"train.max_steps={steps}", "model=gpt_tiny", f"optimizer.lr={lr}"]
        facts = {"overrides": words}
        make_run(tmp_path / str(steps), steps=steps, optimizer__lr=lr, facts=facts)
    step = step_of(tmp_path)
    assert step.rule == "budget"
    grid = ("model=gpt_tiny", "tracker=none", "optimizer.lr=0.003,0.001", "train.seed=1")
    assert step.words == ("train", "-m", *grid, f"train.max_tokens={200 * 8 * 128}")


def test_a_sweep_anew_finds_the_same_options_and_hosts(tmp_path):
    points = {}
    for micro in (4, 8):
        words = ["model=mine", f"batch.micro_batch_size={micro}"]
        given = {"overrides": words}
        points[str(micro)] = dict(micro=micro, facts=given, point=given)
    path = make_sweep(tmp_path / "s", points, ["batch.micro_batch_size"])
    tree = json.loads((path / "sweep.json").read_text())
    place = ["--config-dir", "my conf", "hydra/launcher=slurm", "hydra.launcher.partition=gpu"]
    tree["arguments"] = ["-m", *place, "model=mine", "batch.micro_batch_size=4,8"]
    (path / "sweep.json").write_text(json.dumps(tree))
    step = step_of(path)
    assert (step.rule, step.words[:7]) == ("budget", ("train", "-m", *place, "model=mine"))


def test_runs_without_a_sweep_get_a_sweep_of_their_own(tmp_path):
    words = ("model.x='a b'",)
    losses = {1e-3: 0.0, 3e-3: 0.01}
    step = step_of(planted(tmp_path, losses, (1,), sweep=False, fixed=words))
    assert step.words[:3] == ("train", "-m", "train.max_steps=400")
    assert step.words[3:] == (
        *words, "tracker=none", "optimizer.lr=0.001,0.003", "train.seed=2,3"
    )  # fmt: skip
    assert step.runs == 4


def test_the_command_prints_what_python_returns(tmp_path, capsys, monkeypatch):
    import llmexp as program

    path = planted(tmp_path / "s", {1e-3: 0.9, 3e-3: 0.5, 1e-2: 0.0})
    assert llmexp(["next", str(path), "--json"]) == 0
    assert printed("next", capsys.readouterr().out) == program.next_step(path).data
    assert llmexp(["next", str(path)]) == 0
    first, cost, why = capsys.readouterr().out.splitlines()
    assert first.startswith(f"llmexp resume {path} optimizer.lr=")
    assert cost.startswith("3 runs, 1,228,800 tokens, about ")
    assert why.startswith("wider: the best lr, 0.01, is the highest")
    monkeypatch.setenv("COLUMNS", "40")  # where all is wrapped but the command
    assert llmexp(["next", str(path)]) == 0
    narrow, *rest = capsys.readouterr().out.splitlines()
    assert (narrow, " ".join(rest)) == (first, f"{cost} {why}")
    assert max(map(len, rest)) <= 40
    assert llmexp(["next", str(tmp_path / "none")]) == 2
    assert "for example llmexp next" in capsys.readouterr().err
    schema = json.loads((ROOT / "llmexp/schema-1.json").read_text())["$defs"]["next"]
    own = {"confirm_search": "confirm", "confirm_screen": "screen"}
    rules = (rule.__name__ for rule in NEXT_RULES if rule is not compared)
    names = {own.get(name, name) for name in rules} | {"nothing", "wait", "rung"}
    assert set(schema["properties"]["rule"]["enum"]) == names
    page = (ROOT / "docs/compare.md").read_text()
    assert all(f"| `{name}` |" in page for name in names)


def test_what_is_proposed_can_be_pasted_and_run(tmp_path):
    quick = ["data=synthetic", "data.n_tokens=4000", "train.max_steps=2", "train.eval_tokens=64"]
    grid = ["optimizer.lr=1e-3,3e-3", "hydra.sweep.dir=my sweep", "checkpoint.last=false"]
    assert run_llmexp("train", "-m", *TINY, *quick, *grid, cwd=tmp_path).code == 0
    proposed = run_llmexp("next", "my sweep", cwd=tmp_path).out.splitlines()
    words = shlex.split(proposed[0])
    assert words[:3] == ["llmexp", "resume", "my sweep"]
    assert proposed[1].startswith("2 runs, ")  # the least; chance decides how many it takes
    assert words[3:] == ["sweep.decide=true"]
    words += ["sweep.max_seeds=2"]
    done = run_llmexp(*words[1:], cwd=tmp_path)
    assert done.code == 0, done.err
    assert len(list((tmp_path / "my sweep").glob("*/metrics.jsonl"))) == 4


def test_numbers_that_are_written_in_two_ways_and_seeds_that_are_lost_are_no_error(tmp_path):
    for name, lr in (("a", "1e-2"), ("b", "0.01"), ("c", "1e-3")):
        facts = {"overrides": [f"optimizer.lr={lr}"]}
        make_run(tmp_path / name, optimizer__lr=float(lr), facts=facts, wobble=0.1 * ord(name[0]))
    assert step_of(tmp_path).rule in {rule.__name__ for rule in NEXT_RULES} | {"nothing"}
    config = tmp_path / "a/config.yaml"
    config.write_text(config.read_text().replace("seed: 1\n", ""))
    assert step_of(tmp_path)
