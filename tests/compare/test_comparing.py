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
    val_loss,
    write_rows,
    write_steps,
)
from tests.tools import printed

HERE = Path(__file__).parent
CASES = {case["case"]: case for case in yaml.safe_load((HERE / "cases.yaml").read_text())}
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
    answer = llmexp.compare(folder, **given_to(options))
    assert list(marks(answer).items()) == list(case["marks"].items())
    assert printed("compare", json.dumps(answer.data)) == answer.data
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
            assert by_label[label][key] == (value if exact else pytest.approx(value, rel=1e-9)), key
    words("compare/cases", told(answer), part(name, options))


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
    for name, steps, slope in (("a", 400, 1.0), ("b", 202, 3.0)):
        better = {"better": {"mine/norm": "lower", "mine/odd": "no"}}
        run = make_run(tmp_path / name, steps=steps, max_norm=slope, facts=better, val_every=50)
        config = run / "config.yaml"
        config.write_text(config.read_text() + "hooks: [mymodel.watch]\n")
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


def test_a_value_is_one_setting_however_it_is_spelled(tmp_path):
    """100 of one run and 100.0 of another; a seed stays as it is, and so do other values."""
    for name, value, seed in (("a", 100, 1), ("b", 100.0, 2), ("c", 200, 1), ("d", 200.0, 2)):
        make_run(
            tmp_path / name, seed=seed, own=int(value), model__mine=value, optimizer__lr=value / 10
        )
    labels = {run["label"] for run in llmexp.compare(tmp_path).data["runs"]}
    assert labels == {"mine=100.0 lr=10.0", "mine=200.0 lr=20.0"}
    lines = ("lr,seed,loss", "100,1,3.0", "100.0,2,3.1", "200,1,3.3", "2e2,2,3.4")
    for name, rows in (("x.csv", lines[:3]), ("y.csv", (lines[0], *lines[3:]))):
        (tmp_path / name).write_text("\n".join(rows))
    tables = llmexp.compare(tmp_path / "x.csv", tmp_path / "y.csv", by=["lr"])
    assert {run["label"] for run in tables.data["runs"]} == {"lr=100.0", "lr=200.0"}


@settings(max_examples=15, deadline=None)
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


def test_a_setting_has_the_mean_of_its_seeds_and_students_interval(tmp_path):
    spread = {1: -0.01, 2: 0.0, 3: 0.012}
    make_case(tmp_path / "s", [{"seed": spread}, {"max_norm": 2.0, "offset": 0.1}])
    first, _ = llmexp.compare(tmp_path).data["runs"]
    ends = [val_loss(400, own) for own in spread.values()]
    half = 4.302653 * np.std(ends, ddof=1) / math.sqrt(3)
    assert first["val/loss"] == pytest.approx(np.mean(ends), rel=1e-12)
    found = [end - first["val/loss"] for end in first["intervals"]["val/loss"]]
    assert found == pytest.approx([-half, half], rel=1e-6)


# Mean and scatter of paired differences, the mark, and the mark where every difference matters.
PAIRED = [
    (0.05, 0.0010, "worse", "worse"),
    (0.0012, 0.0001, "same", "worse"),
    (0.0, 0.0001, "same", "undecided"),
    (0.0019, 0.0009, "worse", "worse"),  # below what matters, but its interval is not
    # (t(0.975, n-1) + t(0.8, n-1)) 0.004 / sqrt(n) <= 0.003 from n = 16 on: (2.131 + 0.866) 0.001
    (0.003, 0.0040, "undecided", "undecided"),
]


@pytest.mark.parametrize(("gap", "scatter", "mark", "strict"), PAIRED)
def test_differences_over_five_seeds(tmp_path, words, gap, scatter, mark, strict):
    shape = np.array([-1.0, 0.0, 1.0, 0.5, -0.5])
    offsets = gap + scatter * shape / shape.std(ddof=1)
    rows = [{"seed": dict.fromkeys(range(1, 6), 0.0)},
            {"seed": dict(enumerate(offsets.tolist(), 1)), "max_norm": 2.0}]  # fmt: skip
    answer = llmexp.compare(make_case(tmp_path / "s", rows))
    assert answer.data["runs"][1]["mark"] == mark
    half = 2.776445 * scatter / math.sqrt(5)  # t(0.975, 4)
    assert answer.data["runs"][1]["half"] == pytest.approx(half, rel=1e-4)
    (pair,) = (text for text in answer.data["why"] if text.startswith("Nearest pair"))
    words("compare/five_seeds", f"{answer.headline}\n{pair}", f"{gap} and {scatter}")
    assert f"(standard error {scatter / math.sqrt(5):.3g}, degrees of freedom 4;" in pair
    exact = llmexp.compare(tmp_path, min_effect=0.0)
    assert exact.data["runs"][1]["mark"] == strict


STOPPED = {"state": "preempted", "point": {"state": "preempted"}}


@pytest.mark.parametrize(
    ("key", "rows", "planned"),
    [
        ("train.seed", [{"seed": {1: 0.0, 2: 0.0}}],
         ["a=1 train.seed=1", "a=1 train.seed=2", "a=1 train.seed=3", "a=2 train.seed=1"]),
        ("clip.max_norm",
         [{"max_norm": {1.0: 0.01, 2.0: 0.02}},
          {"max_norm": 3.0, "offset": 0.03, "steps": 250, **STOPPED},
          {"max_norm": 4.0, "offset": 0.04, "steps": 130, **STOPPED}],
         [f"clip.max_norm={i}" for i in range(1, 7)]),
    ],
)  # fmt: skip
def test_runs_that_a_sweep_has_left_to_train_are_counted(words, key, rows, planned):
    sweep = make_case(Path("sweep"), rows, [key])
    ledger = read_ledger(sweep)
    for i, text in enumerate(planned):
        if i >= len(ledger.points):
            ledger.add("x", [])
        ledger.points[i].overrides = text.split()
    ledger.save()
    words("compare/left_to_train", told(llmexp.compare(sweep)), key)


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


@pytest.mark.parametrize("copies", [1, 4])
def test_more_cells_with_the_same_seeds_do_not_make_an_effect_clearer(tmp_path, copies):
    """Two seeds and their copies under other names: the interval is that of the two seeds alone."""
    limits = {float(limit): 0.0 for limit in range(1, 2 + copies)}
    rows = [{"max_norm": limits, "data.end": end, "seed": {s: end * 0.012 * s for s in (1, 2)}}
            for end in (0, 1)]  # fmt: skip
    answer = llmexp.compare(make_case(tmp_path / "s", rows, ["data.end", "clip.max_norm"]))
    # Differences 0.012 and 0.024: mean 0.018, half width t(1 - 0.025 / 2, 1) * 0.006 for two keys.
    half = math.tan(math.pi * (0.5 - 0.025 / 2)) * 0.006
    (said,) = [text for text in answer.data["why"] if text.startswith("end: ")]
    assert f"0.02 ± {half:.2g}" in said


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        (("0-seed_1+lr_0.1", "1-seed_2+lr_0.1"), "0-lr_0.1 x2"),
        (("0-lr_0.1+seed_1+max_norm_1", "1-lr_0.1+seed_2+max_norm_1"), "0-lr_0.1+max_norm_1 x2"),
        (("0-seed_1", "1-seed_2"), "0 x2"),
    ],
)
def test_the_name_of_folded_seeds(tmp_path, names, folded):
    for seed, name in enumerate(names, 1):
        make_run(tmp_path / name, seed=seed, steps=20)
    assert [run["name"] for run in llmexp.compare(tmp_path).data["runs"]] == [folded]


def test_settings_that_are_left_out_have_the_names_of_their_folders(tmp_path):
    for i, (folder, steps) in enumerate((("long", 400), ("short", 20))):
        for norm in (1.0, 2.0):
            rows = [
                {"name": f"clip={norm},seed={s}", "max_norm": norm, "seed": s, "own": 3 * i + s}
                for s in (1, 2)
            ]
            more = {"offset": norm / 10, "steps": steps, "val_every": 10}
            make_case(tmp_path / folder / str(norm), [row | more for row in rows])
    answer = llmexp.compare(tmp_path)
    marks = {run["label"]: run["mark"] for run in answer.data["runs"]}
    assert list(marks.values()) == ["best", "worse", "too short", "too short"]
    assert [name.partition("clip=")[2] for name in marks] == ["1.0", "2.0", "1.0 x2", "2.0 x2"]
    short = [name for name, mark in marks.items() if mark == "too short"]
    assert f"Left out: too short ({short[0]} and {short[1]})." in answer.data["notes"]


def test_who_leads_over_shared_seeds_stands_first_though_its_mean_is_higher():
    """A sweep that decides was stopped in the middle: one setting has a seed more, a bad one."""
    why = "2 of 2 settings can still be best; the next analysis is at 5 seeds"
    look = Look([*"1234"], 0.01, 8, ["0", "1"], [], why)
    noise = [0.0, 0.011, -0.007, 0.004, 0.3]
    apart = [0.012, -0.008, 0.012, -0.008]
    runs = [trained(0, seed, 3 + noise[seed - 1], [look]) for seed in range(1, 6)]
    runs += [
        trained(1, seed, 3 + noise[seed - 1] + apart[seed - 1], [look]) for seed in range(1, 5)
    ]
    found = with_words(findings(runs))
    first, second = found.settings
    assert (first.label, first.mark, second.mark) == ("lr=1.0", "lowest", "undecided")
    assert first.figures["val/loss"] > second.figures["val/loss"]
    assert second.size == pytest.approx(0.002)
    (note,) = (note for note in found.notes if note.startswith("Means over unequal seeds"))
    assert "lr=1.0 has 5 seeds and lr=2.0 has 4 seeds" in note
    runs = runs[:4] + runs[5:]
    assert not any("unequal" in note for note in with_words(findings(runs)).notes)
