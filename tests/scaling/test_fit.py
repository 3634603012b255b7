"""The command, run folders in: which runs are points, which are a ladder, what is printed."""

import glob
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

import llmexp
from llmexp.__main__ import run as command
from llmexp.config.values import ConfigError
from tests.compare.synthetic import parent_in, read_rows, write_rows
from tests.scaling.folders import BLOCKS, BUDGETS, SMALL, isoflop, run
from tests.scaling.planted import LAWS, Law, csv_of, ladder
from tests.tools import amend, printed

pytestmark = pytest.mark.usefixtures("few_draws")

COUNT = len(BLOCKS) * len(BUDGETS)
HOFFMANN = LAWS["hoffmann"]
CASES = yaml.safe_load((Path(__file__).parent / "cases.yaml").read_text())
FIGURES = {r"[-+]?[0-9][0-9.,e+-]*": "N", " +": " "}  # of fits: their last digits may differ
MUON = {"optimizer___target_": "llmexp.optim.optimizers.muon.muon"}


@pytest.fixture(autouse=True)
def _here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def good(*shape):
    """A CSV file of Hoffmann's law, budgets x sizes."""
    return csv_of(Path("good.csv"), ladder(HOFFMANN, *shape, noise=0.003, seed=1).points)


def table(name, head, rows):
    path = Path(f"{name}.csv")
    path.write_text("\n".join([head, *(",".join(map(str, row)) for row in rows)]))
    return path


def planted(name, sizes, ratios):
    """A CSV file of Hoffmann's law at some tokens per parameter of each size."""
    points = [(n, ratio * n) for n in sizes for ratio in ratios]
    return table(name, "N,D,loss", [(n, d, HOFFMANN.loss(n, d)) for n, d in points])


def ladders_of(*paths, **more):
    return llmexp.fit(*paths, **more).data["ladders"]


@pytest.mark.parametrize("sizes", [1, 2, 5])
def test_a_table_of_flops_and_tokens_is_one_of_sizes_and_tokens(sizes):
    points = [(10**7 * 3**i, round(1e9 * 1.37**j)) for i in range(sizes) for j in range(7)]
    losses = [HOFFMANN.loss(n, d) * (1 + 1e-3 * math.sin(n + d)) for n, d in points]
    given = {
        "N,D": points,
        "C,D": [(6.0 * n * d, d) for n, d in points],
        "C,N": [(6.0 * n * d, n) for n, d in points],
    }
    answers = []
    for head, numbers in given.items():
        rows = [(*pair, loss) for pair, loss in zip(numbers, losses, strict=True)]
        try:
            (found,) = ladders_of(table("runs", f"{head},loss", rows))
            answers.append({k: list(v.values()) for k, v in found["law"].items()})
        except ConfigError as error:
            answers.append({error.kind: [0.0]})
    for answer in answers[1:]:
        assert answer.keys() == answers[0].keys()
        for key, wanted in answers[0].items():
            assert answer[key] == pytest.approx(wanted, rel=1e-9)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    return isoflop(tmp_path_factory.mktemp("laws") / "adamw")


def test_runs_in_an_answer_out(sweep, capsys, monkeypatch, words):
    given = ["fit", str(sweep), "--predict", "1e15"]
    assert command([*given, "--json"]) == 0
    found = printed("fit", capsys.readouterr().out)
    laws = llmexp.fit(sweep, predict=1e15)
    assert found == laws.data
    (one,) = found["ladders"]
    assert (found["count"], one["runs"], one["left_out"]) == ("head", COUNT, {})
    for name, truth in (("E", SMALL.e), ("alpha", SMALL.alpha), ("beta", SMALL.beta)):
        e = one["law"][name]  # a bound for four standard errors: the interval has two on each side
        assert abs(e["value"] - truth) < e["high"] - e["low"]
    best = one["prediction"]
    assert best["parameters"]["value"] == pytest.approx(SMALL.size(1e15), rel=0.1)
    assert best["loss"]["value"] == pytest.approx(SMALL.best(1e15), rel=0.01)
    assert [r["flops"] for r in one["rungs"]] == pytest.approx(BUDGETS, rel=1e-3)
    # Planted in N with the head: with blocks alone small models look smaller than they are.
    assert set(one["exponents"]) == {"all", "blocks"}
    by = {count: ladders_of(sweep, count=count)[0]["exponent"] for count in ("all", "blocks")}
    low, middle, high = (e["value"] for e in (by["all"], one["exponent"], by["blocks"]))
    assert low < middle < high == one["exponents"]["blocks"]["value"]
    for columns in (60, 100):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert command([*given, "--why"]) == 0
        text = capsys.readouterr().out
        assert all(len(line) <= columns for line in text.splitlines())
        assert " ".join(text.split()).startswith(laws.headline)
        words.hidden |= FIGURES
        words("scaling/fit", text, f"{columns} columns")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["case"])
def test_which_runs_are_points_of_which_ladder(case):
    for row in case["runs"]:
        more = {key.replace(".", "__"): value for key, value in row.items()}
        at = Path(more.pop("at"))
        if "text" in more:
            at.write_text(more["text"])
        elif "loss" in more:
            run(at, more.pop("loss"), BLOCKS[0], more.pop("tokens", 10**6), **more)
        else:
            isoflop(at, **more)
    for paths in case["paths"]:
        expanded = [at for path in paths for at in sorted(glob.glob(path))]  # as a shell does
        if "refused" in case:
            with pytest.raises(ConfigError, match=case["refused"]):
                llmexp.fit(*expanded, **case.get("how", {}))
            continue
        found = llmexp.fit(*expanded)
        if "names" in case:
            assert [one["name"] for one in found.data["ladders"]] == case["names"]
        counts = case.get("counts", [COUNT] * len(case.get("names", [0])))
        assert [one["runs"] for one in found.data["ladders"]] == counts
        assert found.data["ladders"][0]["left_out"] == case.get("left_out", {})
        assert list(found.problems) == case.get("problems", [])


def test_names_of_ladders_in_files(tmp_path):
    paths = [tmp_path / name / "ladder.csv" for name in ("d1", "d2")]
    for seed, path in enumerate(paths):
        path.parent.mkdir()
        csv_of(path, ladder(HOFFMANN, 3, 4, noise=0.003, seed=seed).points)
    other = shutil.copy(paths[0], "d1/ladder.CSV")
    twice = [paths[0], tmp_path / "d1/*.csv", tmp_path / "d2/../d1/ladder.csv"]
    for given, names in (
        ([tmp_path / "d*/ladder.csv"], ["d1/ladder", "d2/ladder"]),
        ([paths[0], other], ["ladder (1)", "ladder (2)"]), (twice, ["ladder"]),
    ):  # fmt: skip
        assert [one["name"] for one in ladders_of(*given)] == names


@pytest.mark.parametrize("rates", [[1e-4], [1e-5, 1e-4]])
def test_where_no_row_is_of_the_peak_the_schedule_tells_of_the_decay(rates):
    folder = isoflop(Path("a"))
    rows = [{k: v for k, v in row.items() if k != "lr"} for row in read_rows(folder / "0-0")]
    for row, rate in zip(rows[::-1], rates[::-1], strict=False):
        row["lr"] = rate
    write_rows(folder / "0-0", rows)
    (found,) = ladders_of(folder)
    assert (found["left_out"], found["runs"]) == ({}, COUNT)


def test_neither_the_order_of_training_nor_a_resume_nor_paths_move_a_byte(sweep):
    """Runs made in another order, one of them resumed by another host; a path for each size."""
    whole = llmexp.fit(sweep, predict=1e15)
    for path in sorted(sweep.iterdir(), reverse=True):
        shutil.copytree(path, Path("again/adamw") / path.name)
        shutil.copytree(path, Path(f"size-{path.name[2:]}") / path.name)
    amend(Path("again/adamw/1-2/status.json"), host="other", attempts=2, started=5.0)
    assert llmexp.fit("again/adamw", predict=1e15).data == whole.data
    assert llmexp.fit(*sorted(glob.glob("size-*")), predict=1e15).headline == whole.headline


def test_branches_of_a_trunk_are_points_of_the_token_axis():
    trunk = parent_in("t", step=50, tokens=10**6, sequences=1, setting="x")
    cooldown = {"schedule___target_": "llmexp.optim.schedule.cooldown", "facts": {"parent": trunk}}
    for i, tokens in enumerate(np.geomspace(1e6, 3e7, 6).astype(int)):
        run(Path(f"h/{i}"), 2 + 300 * float(tokens) ** -0.4, BLOCKS[2], int(tokens), **cooldown)
    wsd = {"schedule___target_": "llmexp.optim.schedule.wsd"}
    run(Path("h/trunk"), 3.3, BLOCKS[2], 10**8, rates=(1e-3, 1e-3), **wsd)
    found = llmexp.fit("h", predict=1e9).data
    (one,) = found["ladders"]
    assert (found["form"], one["by"], one["runs"]) == ("power", "tokens", 6)
    assert one["law"]["p"]["value"] == pytest.approx(0.4, rel=1e-6)
    assert one["prediction"]["loss"]["value"] == pytest.approx(2 + 300 * 1e9**-0.4, rel=1e-6)
    assert list(one["left_out"].values()) == [["trunk"]]
    Path("h/trunk").rename("trunk")  # also from another path
    (apart,) = ladders_of("trunk", "h")
    assert apart["left_out"] == one["left_out"]


@pytest.mark.parametrize("key", ["batch.real_batch_size", "clip.max_norm"])
def test_a_power_law_over_a_knob(key):
    """Also where each value has a path of its own, which is another ladder over tokens."""
    for value in (8, 16, 32, 64, 128, 256):
        knob = {key.replace(".", "__"): value}
        run(Path(f"{value}/run"), 1.5 + value**-0.5, BLOCKS[2], 10**7, **knob)
    whole = llmexp.fit(*sorted(glob.glob("*")), form="power", by=key).data
    assert "Not in this law" not in " ".join(whole["notes"])
    law = whole["ladders"][0]["law"]
    assert (law["p"]["value"], law["E"]["value"]) == pytest.approx((0.5, 1.5), rel=1e-6)


@pytest.mark.parametrize("one_folder", [True, False])
def test_two_ladders_and_what_one_gains(words, one_folder):
    """Each is drawn with noise of its own, or their difference would vary too little."""
    muon = Law(SMALL.e, SMALL.a, SMALL.b * 0.8, SMALL.alpha, SMALL.beta)
    places = ["all", "all"] if one_folder else ["a", "m"]
    isoflop(Path(places[0], "x"), seed=1)
    isoflop(Path(places[1], "y"), muon, seed=2, **MUON)
    laws = llmexp.fit(*dict.fromkeys(places), predict=1e15)
    words.hidden |= FIGURES
    words("scaling/gain", laws.headline)
    assert [one["name"] for one in laws.data["ladders"]] == ["adamw", "muon"]
    need = laws.data["gains"][0]["common"]
    assert need["ratio"]["high"] < 1
    assert need["shown"]
    assert need["flops"] == pytest.approx(2.5e13, rel=1e-3)
    one, two = (law.ensemble.laws for law in laws.found.surfaces)
    assert abs(np.corrcoef(one[:, 0], two[:, 0])[0, 1]) < 0.5  # five standard deviations


def test_a_csv_with_any_case_and_without_tokens(words):
    """A blank may follow a comma."""
    path = good(4, 5)
    whole = llmexp.fit(path, predict=1e21).data
    assert (whole["count"], whole["ladders"][0]["runs"]) == ("given", 20)
    head, *lines = path.read_text().splitlines()
    cells = [[float(cell) for cell in line.split(",")] for line in lines]
    short = [(n, 6 * n * d, loss) for n, d, loss in cells]
    (other,) = ladders_of(table("c", "n,c,Loss", [*short, (1e9, 1e18, "inf")]), predict=1e21)
    assert other["left_out"] == {"not finite, or not above 0": ["line 22"]}
    value = whole["ladders"][0]["prediction"]["loss"]["value"]
    assert other["prediction"]["loss"]["value"] == pytest.approx(value, rel=1e-9)
    spaced = [[f" {cell}" for cell in (*line, i)] for i, line in enumerate(cells, 1)]
    assert len(ladders_of(table("d", f"{head}, depth", spaced), by="depth")[0]["points"]) == 20
    # what is said beside the answer
    words.hidden |= FIGURES
    for more in (
        {"predict": 1e3}, {"by": "tokens", "predict": 1e3}, {"by": "parameters"},
        {"by": "tokens"}, {"form": "isoflop"}, {"predict": 1e24},
        {"predict": 1e17},  # as far as is near enough
    ):  # fmt: skip
        words("scaling/beside", "\n".join(llmexp.fit(path, **more).data["notes"]), str(more))
    shown = str(llmexp.fit(good(6, 5), form="power", by="flops"))
    assert re.search(r"^ *1e18 ", shown, re.M), shown  # rows of FLOPs
    # losses that rise with size have a table without best sizes
    points = ladder(HOFFMANN, 4, 5, noise=0.003, seed=0).points
    rising = [replace(p, loss=1 + math.log(p.sizes["given"]) / 10) for p in points]
    found = llmexp.fit(csv_of(Path("rising.csv"), rising))
    (one,) = found.data["ladders"]
    assert one["edge"]
    assert {rung["parameters"] for rung in one["rungs"]} == {None}
    assert str(found).count(" edge ") == 4


def test_a_size_and_tokens_have_a_loss_whatever_the_best_size():
    """Of sizes by tokens per parameter nobody knows the best size, and the law is known."""
    path = planted("ratios", (1e7, 3e7, 1e8, 3e8), (5, 10, 20, 40))
    found = llmexp.fit(path, predict="N=1e9,D=2e10")
    place = found.data["ladders"][0]["place"]
    assert place["loss"]["value"] == pytest.approx(HOFFMANN.loss(1e9, 2e10), rel=1e-4)
    assert (place["parameters"], place["tokens"]) == (1e9, 2e10)
    assert found.headline.startswith("At 1 B parameters and 20 B tokens: loss 2.")
    # At the edge that of the ratio next to the best is known, also beyond the runs.
    path = planted("edge", (1e8, 3e8, 1e9, 3e9), (1, 2, 4))
    for predict in (None, 1e22):
        (one,) = ladders_of(path, predict=predict)
        assert one["edge"] == "smaller"
        at, c = one["place"], predict or 6 * 3e9 * 4 * 3e9
        assert at["tokens"] == pytest.approx(4 * at["parameters"], rel=1e-9)
        assert 6 * at["parameters"] * at["tokens"] == pytest.approx(c, rel=1e-9)
        truth = HOFFMANN.loss(at["parameters"], at["tokens"])
        assert at["loss"]["value"] == pytest.approx(truth, rel=1e-3)
    assert " tokens: loss" in llmexp.fit(path).headline.partition("No best size")[0]
    # Sizes of one ratio have a power law over FLOPs.
    rows = [(f"r{n:g}", n, 20 * n, 1.5 + n**-0.2) for n in np.geomspace(1e7, 1e9, 6)]
    (one,) = ladders_of(table("one", "run,params,tokens,val_loss", rows), predict=1e22)
    assert (one["by"], one["law"]["E"]["value"]) == ("flops", pytest.approx(1.5, rel=1e-6))
    truth = 1.5 + (1e22 / 120) ** -0.1
    assert one["prediction"]["loss"]["value"] == pytest.approx(truth, rel=1e-6)


def test_runs_of_others_are_ladders_by_their_words_and_at_their_last_losses():
    pandas = pytest.importorskip("pandas")
    points = [(n, r * n) for n in (1e7, 3e7, 1e8, 3e8) for r in (5, 20, 80)]
    rows = [
        {"run": f"{opt}{n}-{d}", "opt": opt, "n_params": n, "step": step, "tokens": d * step / 2,
         "val_loss": HOFFMANN.loss(n, d) + off + 2 - step, "train_loss": 3 + HOFFMANN.loss(n, d),
         "state": "done"}
        for opt, off in (("adam", 0.0), ("muon", -0.05)) for n, d in points for step in (1, 2)
    ]  # fmt: skip
    rows[-1]["state"] = "crashed"
    of_adam = pandas.DataFrame([row for row in rows if row["opt"] == "adam"])
    named = llmexp.fit(of_adam, figure="train_loss", predict="N=1e9,D=2e10").headline
    assert ": train_loss " in named
    assert "val" not in named
    adam, muon = llmexp.fit(pandas.DataFrame(rows)).found.laws
    assert [law.ladder.name for law in (adam, muon)] == ["opt=adam", "opt=muon"]
    assert (len(adam.losses), len(muon.losses)) == (12, 11)
    assert adam.ladder.out == {"failed": [rows[-1]["run"]]}
    assert adam.tokens.tolist() == [d for _, d in points]
    assert adam.numbers["beta"].value == pytest.approx(HOFFMANN.beta, rel=1e-3)
    assert adam.ladder.notes == [
        ("Figure", "val_loss, not train_loss; chosen by its name, as no --figure is given"),
        ("Lines", "48 lines of 24 runs, each a point at its last; to have each line be a run, "
         "leave out the column of names"),
    ]  # fmt: skip
