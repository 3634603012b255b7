"""What `llmexp next` proposes for run folders whose losses are planted."""

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

import llmexp
from llmexp.compare.next_step import NEXT_RULES, compared
from llmexp.compare.screening import design
from llmexp.folders.ending import COMES_AGAIN
from llmexp.folders.ledger import read_ledger
from tests.compare.synthetic import make_case, make_run
from tests.conftest import ROOT, TINY
from tests.conftest import llmexp as run_llmexp
from tests.tools import amend, printed, run_here

NOISE = {1: 0.0, 2: 0.02, 3: -0.01, 4: 0.013, 5: -0.02}
PARSER = OverridesParser.create()
ROWS = yaml.safe_load((Path(__file__).parent / "next.yaml").read_text())


def told(*overrides: str) -> dict[str, Any]:
    """What says of a run and of its point which overrides made it."""
    return {"facts": {"overrides": [*overrides]}, "point": {"overrides": [*overrides]}}


def planted(path: Path, losses: dict[object, float], seeds=(1, 2, 3), *, wobble=0.001,
            key="optimizer.lr", sweep=True, fixed=(), **more) -> Path:  # fmt: skip
    """Runs of settings that differ in one number, over seeds that they share."""
    runs = []
    for i, (value, loss) in enumerate(losses.items()):
        for seed in seeds:
            text = "null" if value is None else value
            given = told("train.max_steps=400", *fixed, f"{key}={text}", f"train.seed={seed}")
            own = wobble * np.random.default_rng([i, seed]).normal()
            run = {"name": f"v{value}+seed_{seed}", "seed": seed, key: value}
            runs.append(run | {"offset": loss + NOISE[seed] + own} | given | more)
    return make_case(path, runs, [key, "train.seed"] if sweep else [])


def step_of(*paths: Path) -> Any:
    step = llmexp.next_step(*paths)
    for word in shlex.split(step.command)[2:]:  # what is pasted is what Hydra reads
        if ("=" in word and step.words[0] == "train") or word.startswith("optimizer."):
            assert PARSER.parse_override(word)
    assert tuple(shlex.split(step.command)[1:]) == step.words
    printed("next", json.dumps(step.data, allow_nan=False))
    return step


def decided(path: Path, most: int = 3) -> Path:
    """A sweep that has looked at the three seeds of its settings."""
    look = {"seeds": ["1", "2", "3"], "level": 0.04, "most": most, "going": [], "worse": []}
    amend(path / "sweep.json", looks=[look | {"why": "all 3 seeds are trained"}])
    return path


def fail(path: Path, runs: str) -> None:
    """Have these runs of a sweep fail, and fail again."""
    for status in path.glob(f"{runs}/status.json"):
        amend(status, state="failed")
    ledger = read_ledger(path)
    for point in ledger.points:
        point.failures = 2
    ledger.save()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["case"])
def test_what_is_proposed(tmp_path, monkeypatch, words, row):
    monkeypatch.chdir(tmp_path)
    path = Path("SWEEP")
    if "runs" in row:
        runs = []
        for one in row["runs"]:
            more = told(*one["overrides"]) if "overrides" in one else {}
            runs.append({k: v for k, v in one.items() if k != "overrides"} | more)
        make_case(path, runs, row.get("swept", ()))
    else:
        names = ("losses", "seeds", "wobble", "key", "sweep", "fixed", "status")
        planted(path, **{key: row[key] for key in names if key in row})
    if "looks" in row:
        decided(path, row["looks"])
    if "ledger" in row:
        amend(path / "sweep.json", **row["ledger"])
    if "failed" in row:
        fail(path, row["failed"])
    step = step_of(path)
    assert step.rule == row["rule"]
    if "last" in row:
        assert step.words[-1] == row["last"]
    else:
        assert list(step.words) == row.get("words", [])
    if "losses" in row:  # runs of 400 steps
        assert step.runs == row.get("cost", 0)
        assert step.tokens == step.runs * 400 * 8 * 128
        beside = row.get("beside", 0)
        assert step.beside_s == pytest.approx(beside)
        assert (f"with {beside}s for the start and end of each" in str(step)) == bool(beside)
        assert (step.hours or 0) == pytest.approx(step.runs * (400 * 0.5 + beside) / 3600)
    words("compare/next", step.why, row["case"])


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
    # a seed that is lost, and numbers that are written in two ways, are no error
    config = path.parent / "b/config.yaml"
    for name, lr in (("a", "1e-2"), ("b", "0.01"), ("c", "1e-3")):
        facts = {"overrides": [f"optimizer.lr={lr}"]}
        folder = path.parent / name
        make_run(folder, optimizer__lr=float(lr), facts=facts, wobble=0.1 * ord(name))
    three = [path.parent / name for name in "abc"]
    assert step_of(*three)
    config.write_text(config.read_text().replace("seed: 1\n", ""))
    assert step_of(*three)


def test_of_many_effects_of_a_screen_the_three_largest_are_confirmed(tmp_path):
    sizes = {"optimizer.lr": 0.4, "clip.max_norm": 0.3, "model.dropout": 0.2,
             "optimizer.beta2": 0.1, "schedule.warmup_steps": 0.0}  # fmt: skip
    runs = []
    for levels in design(5, 16):
        own = {key: 0.1 + level for key, level in zip(sizes, levels, strict=True)}
        loss = sum(size * level for size, level in zip(sizes.values(), levels, strict=True))
        given = told(*(f"{key}={value}" for key, value in own.items()))
        runs.append(own | given | {"offset": loss, "wobble": 1e-4})
    path = make_case(tmp_path / "s", runs, list(sizes))
    amend(path / "sweep.json", screen=True)
    step = step_of(path)
    assert (step.rule, step.runs) == ("screen", 2 * 2**3)
    assert [w for w in step.words if "," in w] == [
        "optimizer.lr=0.1,1.1", "clip.max_norm=0.1,1.1", "model.dropout=0.1,1.1"
    ]  # fmt: skip
    assert "optimizer.beta2=0.1" in step.words
    assert "the 3 largest effects are asked for" in step.why
    fail(path, "3-3")
    assert step_of(path).why == "a screen is judged once all of its runs have finished."


def test_the_command_prints_what_python_returns(tmp_path, capfd, monkeypatch):
    path = planted(tmp_path / "s", {1e-3: 0.9, 3e-3: 0.5, 1e-2: 0.0})
    found = printed("next", run_here(capfd, "next", str(path), "--json").out)
    assert found == llmexp.next_step(path).data
    monkeypatch.setenv("COLUMNS", "1000")
    first, cost, why = run_here(capfd, "next", str(path)).out.splitlines()
    assert first.startswith(f"llmexp resume {path} optimizer.lr=")
    assert cost.startswith("3 runs, 1,228,800 tokens, about ")
    monkeypatch.setenv("COLUMNS", "40")  # where all is wrapped but the command
    narrow, *rest = run_here(capfd, "next", str(path)).out.splitlines()
    assert (narrow, " ".join(rest)) == (first, f"{cost} {why}")
    assert max(map(len, rest)) <= 40
    schema = json.loads((ROOT / "llmexp/schema-2.json").read_text())["$defs"]["next"]
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
    done = run_llmexp(*words[1:], "sweep.max_seeds=2", cwd=tmp_path)
    assert done.code == 0, done.err
    assert len(list((tmp_path / "my sweep").glob("*/metrics.jsonl"))) == 4
