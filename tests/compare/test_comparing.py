"""What a comparison says of runs whose differences are known."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import llmexp
from llmexp.compare.comparing import findings, with_words
from llmexp.config.values import ConfigError
from llmexp.folders.ledger import Look, read_ledger
from tests.compare.made import trained
from tests.compare.synthetic import (
    make_case,
    make_run,
    read_rows,
    told,
    write_rows,
    write_steps,
)
from tests.refusals.test_refusals import damaged
from tests.tools import printed

CASES = {
    case["case"]: case
    for case in yaml.safe_load((Path(__file__).parent / "cases.yaml").read_text())
}
OPTIONS = ("align", "sort", "min_effect", "target")
ALL = [
    pytest.param(name, options, id=f"{name} {options.get('align', '')} {options.get('sort', '')}")
    for name, case in CASES.items()
    for options in case.get("options", [{}])
]


def given_to(options: dict) -> dict:
    return {key: options[key] for key in OPTIONS if key in options}


def part(name: str, options: dict) -> str:
    return " ".join([name, *(f"--{key} {value}" for key, value in given_to(options).items())])


@pytest.fixture(autouse=True)
def _here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")


def marks(answer: Any) -> dict[str, str]:
    return {run["label"]: run["mark"] or "" for run in answer.data["runs"]}


def test_each_case_has_its_words_and_no_other_stands_there(words):
    words.only("compare/cases", [part(*case.values) for case in ALL])


@pytest.mark.parametrize(("name", "options"), ALL)
def test_what_is_reported_of(words, name, options):
    case = {**CASES[name], **options}
    folder = make_case(Path("runs"), case["runs"], case.get("swept", ()))
    if "left" in case:
        ledger = read_ledger(folder)
        for _ in range(case["left"]):
            ledger.add("x", [])
        ledger.save()
    for operation in case.get("damage", []):
        damaged(folder, *operation)
    answer = llmexp.compare(folder, **given_to(options))
    assert list(marks(answer).items()) == list(case["marks"].items())
    assert printed("compare", json.dumps(answer.data, allow_nan=False)) == answer.data
    assert len({tuple(run) for run in answer.data["runs"]}) == 1  # the same keys
    if "at" in case:
        assert answer.data["align_at"] == pytest.approx(case["at"])
    if "differing" in case:
        assert answer.data["differing"] == case["differing"]
    if "spikes" not in name:
        assert "spikes" not in answer.data["runs"][0]
    by_label = {run["label"]: run for run in answer.data["runs"]}
    for label, figures in case.get("figures", {}).items():
        for key, value in figures.items():
            exact = value is None or isinstance(value, str)
            near = value if exact else pytest.approx(value, rel=1e-4 if key == "half" else 1e-9)
            assert by_label[label][key] == near, key
    text = told(answer)
    assert case.get("says", "") in text
    words("compare/cases", text, part(name, options))


def test_runs_are_the_same_to_the_last_bit_only_if_all_steps_are(tmp_path, words):
    for cut in (1, 2):
        make_run(tmp_path / str(cut), micro=8 // cut, accumulation=cut)
    words("compare/last_bit", llmexp.compare(tmp_path).headline, "equal")
    file = tmp_path / "2/steps.bin"
    losses = np.fromfile(file)[::4]
    losses[17] = math.nextafter(losses[17], 9)
    write_steps(file.parent, losses.tolist(), [1024] * len(losses))
    words("compare/last_bit", llmexp.compare(tmp_path).headline, "one loss differs in a bit")


def test_any_key_of_the_rows_orders_and_is_a_column(tmp_path):
    """A hook's figure in every fourth row: its last value up to where losses are read."""
    better = {"better": {"mine/norm": "lower", "mine/odd": "no"}}
    for name, steps, slope in (("a", 400, 1.0), ("b", 202, 3.0)):
        more = {"steps": steps, "max_norm": slope, "facts": better, "val_every": 50}
        run = make_run(tmp_path / name, **more)
        with open(run / "config.yaml", "a") as config:
            config.write("hooks: [mymodel.watch]\n")
        rows = read_rows(run)
        for row in rows[3::4]:
            row |= {"mine/norm": slope * row["step"], "weight_norm": slope, "mine/odd": 1.0}
        write_rows(run, rows)
    answer = llmexp.compare(tmp_path, sort="mine/norm")
    # the last row up to step 202 that has it is the one of step 200
    assert [run["mine/norm"] for run in answer.data["runs"]] == [200.0, 600.0]
    assert list(marks(answer).values()) == ["lowest", ""]
    assert answer.data["metric"] == "mine/norm"
    by_itself = llmexp.compare(tmp_path)
    assert "mine/norm" in by_itself.data["runs"][0]
    assert "mine/norm" in repr(by_itself.figures["others"])
    for key in ("mine/odd", "weight_norm"):  # of which nobody says which way is better
        assert set(marks(llmexp.compare(tmp_path, sort=key)).values()) == {""}
    with pytest.raises(ConfigError, match="Did you mean mine/norm"):
        llmexp.compare(tmp_path, sort="mine/nrm")


@settings(max_examples=12, deadline=None)
@given(
    offsets=st.lists(st.sampled_from([0.0, 1e-5, 0.0003, 0.01, 0.5]), min_size=2, max_size=5),
    wobble=st.sampled_from([0.0, 0.002]),
)
def test_one_seed_decides_nothing(tmp_path_factory, offsets, wobble):
    """But that runs whose rows are all equal computed the same."""
    alike = [not wobble and offset == min(offsets) for offset in sorted(offsets)[1:]]
    where = tmp_path_factory.mktemp("runs")
    for i, offset in enumerate(offsets):
        run = {"offset": offset, "wobble": wobble, "max_norm": float(i + 1)}
        make_run(where / str(i), own=i, steps=100, **run)
    for align in ("tokens", "steps", "time"):
        answer = llmexp.compare(where, align=align)
        found = [run["mark"] for run in answer.data["runs"]]
        assert found == ["lowest", *("same" if same else "undecided" for same in alike)]
        assert not re.search(r"\b(is best|real|clearly|better)\b", str(answer.data["sentences"]))


@pytest.mark.parametrize("draws", [60, pytest.param(2000, marks=pytest.mark.slow)])
def test_false_alarms_over_whole_sweeps_are_at_most_one_in_twenty(draws):
    """Sweeps of 2 to 6 settings in which nothing but the seeds makes a difference, and the
    last setting scatters as the others or five times as far."""
    rng = np.random.default_rng(11)
    alarms = 0
    for draw in range(draws):
        count = 2 + draw % 5
        scatter = np.ones((count, 1))
        scatter[-1] = 1 + 4 * (draw // 5 % 2)
        paired = draw // 10 % 2 == 0  # else each setting has seeds of its own
        seeds = np.arange(3)[None] + 3 * np.arange(count)[:, None] * (not paired)
        noise = rng.standard_normal(3 * count)[seeds] + scatter * rng.standard_normal((count, 3))
        places = np.ndindex(count, 3)
        records = [trained(i, int(seeds[i, k]), 3 + 0.01 * noise[i, k]) for i, k in places]
        alarms += any(e.mark == "worse" for e in with_words(findings(records)).settings)
    assert 0 < alarms <= 0.05 * draws + 3 * math.sqrt(draws * 0.05 * 0.95)  # nor is it blind


def test_who_leads_over_shared_seeds_stands_first_though_its_mean_is_higher():
    """A sweep that decides was stopped in the middle: one setting has a seed more, a bad one."""
    why = "2 of 2 settings can still be best; the next analysis is at 5 seeds"
    look = Look([*"1234"], 0.01, 8, ["0", "1"], [], why)
    noise = [0.0, 0.011, -0.007, 0.004, 0.3]
    apart = [0.012, -0.008, 0.012, -0.008]
    runs = [trained(0, seed, 3 + own, [look]) for seed, own in enumerate(noise, 1)]
    pairs = zip(noise, apart, strict=False)
    runs += [trained(1, seed, 3 + own + more, [look]) for seed, (own, more) in enumerate(pairs, 1)]
    found = with_words(findings(runs))
    first, second = found.settings
    assert (first.label, first.mark, second.mark) == ("lr=1.0", "lowest", "undecided")
    assert first.figures["val/loss"] > second.figures["val/loss"]
    assert second.size == pytest.approx(0.002)
    (note,) = (note for note in found.notes if note.startswith("Means over unequal seeds"))
    assert "lr=1.0 has 5 seeds and lr=2.0 has 4 seeds" in note
    runs = runs[:4] + runs[5:]
    assert not any("unequal" in note for note in with_words(findings(runs)).notes)
