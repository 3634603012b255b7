"""The command, run folders in: which runs are points, which are a ladder, what is printed."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import signal
from dataclasses import replace

import numpy as np
import pytest

import llmexp
from llmexp.__main__ import run as command
from llmexp.laws.answer import fit
from llmexp.laws.ladders import ladders
from llmexp.laws.table import to_json
from llmexp.runs.ledger import read_ledger
from llmexp.settings.values import ConfigError
from tests.compare.synthetic import parent_in
from tests.conftest import HANG_S, TINY, start
from tests.conftest import llmexp as llmexp_command
from tests.laws.folders import BLOCKS, BUDGETS, SMALL, isoflop, run
from tests.laws.planted import LAWS, Law, csv_of, ladder
from tests.tools import alive, amend, printed, wait_for

pytestmark = pytest.mark.usefixtures("few_draws")


def good(folder, *shape):
    """A CSV file of Hoffmann's law, budgets x sizes."""
    return csv_of(folder / "good.csv", ladder(LAWS["hoffmann"], *shape, noise=0.003, seed=1).points)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    return isoflop(tmp_path_factory.mktemp("laws") / "adamw")


def test_runs_in_an_answer_out(sweep, capsys):
    assert command(["fit", str(sweep), "--predict", "1e15", "--json"]) == 0
    found = printed("fit", capsys.readouterr().out)
    (one,) = found["ladders"]
    assert found["count"] == "head"
    assert one["runs"] == len(BLOCKS) * len(BUDGETS)
    for name, truth in (("E", SMALL.e), ("alpha", SMALL.alpha), ("beta", SMALL.beta)):
        e = one["law"][name]  # a bound for four standard errors: the interval has two on each side
        assert abs(e["value"] - truth) < e["high"] - e["low"]
    best = one["prediction"]
    assert best["parameters"]["value"] == pytest.approx(SMALL.size(1e15), rel=0.1)
    assert best["loss"]["value"] == pytest.approx(SMALL.best(1e15), rel=0.01)
    assert [r["flops"] for r in one["rungs"]] == pytest.approx(BUDGETS, rel=1e-3)
    assert one["left_out"] == {}
    assert set(one["exponents"]) == {"all", "blocks"}


def test_the_text_and_python_have_the_same_figures(sweep, capsys):
    assert command(["fit", str(sweep), "--predict", "1e15", "--why"]) == 0
    text = capsys.readouterr().out
    laws = llmexp.fit(sweep, predict=1e15)
    assert " ".join(text.split()).startswith(laws.headline)
    assert str(laws).splitlines()[0] == text.splitlines()[0]
    assert laws.headline.startswith("At 1e15 FLOPs: ")
    assert "N* ~ C^" in laws.headline
    assert command(["fit", str(sweep), "--predict", "1e15", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == laws.data
    for words in ("Held out: the largest budget (5 runs)", "With N as all parameters: N* ~ C^"):
        assert words in " ".join(text.split())


def test_two_ladders_of_one_name_as_json(tmp_path, capsys):
    paths = []
    for i, name in enumerate(("d1", "d2")):
        (tmp_path / name).mkdir()
        points = ladder(LAWS["hoffmann"], 3, 4, noise=0.003, seed=i).points
        paths.append(str(csv_of(tmp_path / name / "ladder.csv", points)))
    assert command(["fit", *paths, "--json"]) == 0
    found = printed("fit", capsys.readouterr().out)
    assert [one["name"] for one in found["ladders"]] == ["d1/ladder", "d2/ladder"]
    assert all(isinstance(one["knows_e"], bool) for one in found["ladders"])
    names = [one.name for one in ladders([tmp_path / "*" / "ladder.csv"])[0]]
    assert names == ["d1/ladder", "d2/ladder"]
    other = shutil.copy(paths[0], tmp_path / "d1" / "ladder.CSV")
    names = [one.name for one in ladders([paths[0], other])[0]]
    assert names == ["ladder (1)", "ladder (2)"]


@pytest.mark.parametrize("rates", [[1e-4], [1e-5, 1e-4]])
def test_where_no_row_is_of_the_peak_the_schedule_tells_of_the_decay(tmp_path, rates):
    folder = isoflop(tmp_path / "a", budgets=BUDGETS[:1])
    rows = folder / "0-0" / "metrics.jsonl"
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    for line in lines:
        del line["lr"]
    for line, rate in zip(lines[::-1], rates[::-1], strict=False):
        line["lr"] = rate
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (found,), _ = ladders([folder])
    assert found.out == {}
    assert len(found.points) == len(BLOCKS)


def test_a_ladder_wholly_at_a_constant_rate_beside_one_that_decays(tmp_path):
    isoflop(tmp_path / "x")
    constant = {"schedule___target_": "llmexp.update.schedule.constant"}
    isoflop(tmp_path / "y", rates=(1e-3, 1e-3), **constant)
    found, _ = ladders([tmp_path])
    assert [one.name for one in found] == ["cosine", "constant"]
    assert [len(one.points) for one in found] == [len(BLOCKS) * len(BUDGETS)] * 2


def test_neither_the_order_of_training_nor_a_resume_moves_a_byte(sweep, tmp_path):
    """Runs made in another order, one of them preempted first and resumed by another host."""
    again = tmp_path / "adamw"
    for path in sorted(sweep.iterdir(), reverse=True):
        shutil.copytree(path, again / path.name)
    amend(again / "1-2" / "status.json", host="other", attempts=2, started=5.0)
    assert to_json(fit([again], predict=1e15)) == to_json(fit([sweep], predict=1e15))


def test_counts_move_the_exponent(sweep):
    """Planted in N with the head: with blocks alone small models look smaller than they are."""
    by = {c: llmexp.fit(sweep, count=c).data for c in ("all", "head", "blocks")}
    found = {c: d["ladders"][0]["exponent"]["value"] for c, d in by.items()}
    assert found["all"] < found["head"] < found["blocks"]
    others = by["head"]["ladders"][0]["exponents"]
    assert others["blocks"]["value"] == found["blocks"]


def test_what_is_no_point_is_named(tmp_path):
    folder = isoflop(tmp_path / "a")
    run(folder / "diverged", 9.0, BLOCKS[0], 10**6, state="failed")
    run(folder / "short", 4.0, BLOCKS[0], 10**6, state="preempted")
    run(folder / "held", 4.0, BLOCKS[0], 10**6, rates=(1e-3, 1e-3))
    prints = {"data_fingerprint": {"tokenizer_sha256": "a", "val_files": ["other"]}}
    run(folder / "apart", 4.0, BLOCKS[0], 10**6, facts=prints)
    prints = {"data_fingerprint": {"tokenizer_sha256": "b", "val_files": ["v"]}}
    run(folder / "bpe", 4.0, BLOCKS[0], 10**6, facts=prints)
    run(folder / "twin", 4.0, BLOCKS[0], 10**6, train__twin=1)
    whole = llmexp.fit(folder).data["ladders"][0]
    assert whole["left_out"] == {
        "failed": ["diverged"], "preempted": ["short"], "a twin of another run": ["twin"],
        "another validation text": ["apart"], "another tokenizer": ["bpe"],
        "learning rate not decayed, as that of the others is": ["held"],
    }  # fmt: skip
    assert whole["law"] == llmexp.fit(isoflop(tmp_path / "b")).data["ladders"][0]["law"]


def test_branches_of_a_trunk_are_points_of_the_token_axis(tmp_path):
    trunk = parent_in("t", step=50, tokens=10**6, sequences=1, setting="x")
    schedule = "llmexp.update.schedule.cooldown"
    for i, tokens in enumerate(np.geomspace(1e6, 3e7, 6).astype(int)):
        loss = 2 + 300 * float(tokens) ** -0.4
        run(tmp_path / "h" / f"{i}", loss, BLOCKS[2], int(tokens), facts={"parent": trunk},
            schedule___target_=schedule)  # fmt: skip
    run(tmp_path / "h" / "trunk", 3.3, BLOCKS[2], 10**8, rates=(1e-3, 1e-3),
        schedule___target_="llmexp.update.schedule.wsd")  # fmt: skip
    found = llmexp.fit(tmp_path / "h", predict=1e9).data
    assert found["form"] == "power"
    (one,) = found["ladders"]
    assert one["by"] == "tokens"
    assert one["runs"] == 6
    assert one["law"]["p"]["value"] == pytest.approx(0.4, rel=1e-6)
    assert one["prediction"]["loss"]["value"] == pytest.approx(2 + 300 * 1e9**-0.4, rel=1e-6)
    assert list(one["left_out"].values()) == [["trunk"]]
    (tmp_path / "h" / "trunk").rename(tmp_path / "trunk")  # also from another path
    (apart,), _ = ladders([tmp_path / "trunk", tmp_path / "h"])
    assert apart.out == one["left_out"]


@pytest.mark.parametrize("key", ["batch.real_batch_size", "clip.max_norm"])
def test_a_power_law_over_a_knob(tmp_path, key):
    """Also where each value has a path of its own, which is another ladder over tokens."""
    for i, value in enumerate((8, 16, 32, 64, 128, 256)):
        knob = {key.replace(".", "__"): value}
        run(tmp_path / str(i) / "run", 1.5 + value**-0.5, BLOCKS[2], 10**7, **knob)
    whole = llmexp.fit(*sorted(tmp_path.iterdir()), form="power", by=key).data
    assert "no account" not in " ".join(whole["notes"])
    found = whole["ladders"][0]
    assert found["law"]["p"]["value"] == pytest.approx(0.5, rel=1e-6)
    assert found["law"]["E"]["value"] == pytest.approx(1.5, rel=1e-6)


def test_of_each_size_and_length_the_best_setting_counts(tmp_path):
    folder = isoflop(tmp_path / "a")
    tokens = round(BUDGETS[0] / (6 * (BLOCKS[0] + round(64 * math.sqrt(BLOCKS[0])))))
    budget = {"train__max_flops": BUDGETS[0]}
    run(folder / "worse", 9.0, BLOCKS[0], tokens, optimizer__lr=3e-3, **budget)
    run(folder / "seed", 4.0, BLOCKS[0], tokens, train__seed=2, **budget)
    (found,), _ = ladders([folder])
    assert "worse" not in [p.name for p in found.points]
    assert "seed" in [p.name for p in found.points]
    assert len(found.points) == 16
    assert "1 other setting is none" in found.notes[0]


def test_losses_that_rise_with_size_have_a_table_without_best_sizes(tmp_path, capsys):
    points = ladder(LAWS["hoffmann"], 4, 5, noise=0.003, seed=0).points
    rising = [replace(p, loss=1 + math.log(p.sizes["given"]) / 10) for p in points]
    assert command(["fit", str(csv_of(tmp_path / "rising.csv", rising))]) == 0
    text = capsys.readouterr().out
    assert text.startswith("No best size: ")
    assert text.count(" edge ") == 4


def test_a_run_that_is_set_apart_is_named_and_no_ladder(sweep, tmp_path):
    target = "llmexp.update.schedule.constant"
    stray = run(tmp_path / "stray", 4.0, BLOCKS[0], 10**6, rates=(1e-3, 1e-3),
                schedule___target_=target)  # fmt: skip
    for paths in ([sweep, stray], [stray, sweep]):
        found = llmexp.fit(*paths)
        assert found.problems == ()
        assert found.data["ladders"][0]["left_out"] == {
            "set apart by constant, and too few for a law of their own": ["stray"]
        }
        assert found.data["ladders"][0]["law"] == llmexp.fit(sweep).data["ladders"][0]["law"]


def test_runs_that_much_sets_apart_are_told_by_what_does(sweep, tmp_path):
    more = {"optimizer__lr": 2e-3, "clip__kind": "value", "clip__max_norm": 2.0}
    stray = run(tmp_path / "stray", 4.0, BLOCKS[0], 10**6, optimizer__beta2=0.9, **more)
    left_out = llmexp.fit(*sweep.iterdir(), stray).data["ladders"][0]["left_out"]
    assert left_out == {
        "set apart by clip.kind, clip.max_norm, optimizer.lr and 1 more, and too few for a law of "
        "their own": ["stray"]
    }


def test_settings_that_are_no_points_are_told_where_points_are_too_few(tmp_path):
    """Four runs, two settings of one size and length: two points."""
    for i, (lr, seed) in enumerate(itertools.product((1e-3, 2e-3), (1, 2))):
        run(tmp_path / str(i), 3.0 + i, BLOCKS[0], 10**6, optimizer__lr=lr, train__seed=seed)
    with pytest.raises(ConfigError) as error:
        llmexp.fit(tmp_path)
    assert "has 2 points with tokens above 0" in str(error.value)
    assert "is a point; 1 other setting is none." in str(error.value)


def test_a_path_for_each_size_is_one_ladder(sweep, tmp_path):
    paths = []
    for number in range(len(BLOCKS)):
        paths.append(tmp_path / f"size-{number}")
        for budget in range(len(BUDGETS)):
            shutil.copytree(sweep / f"{budget}-{number}", paths[-1] / str(budget))
    assert llmexp.fit(*paths).headline == llmexp.fit(sweep).headline


@pytest.mark.parametrize(
    "optimizer",
    [
        {"_target_": "llmexp.update.options.schedule_free"},
        {"_target_": "llmexp.update.library.library", "name": "pytorch_optimizer.ScheduleFreeSGD"},
    ],
)
def test_a_schedule_free_run_at_a_constant_rate_is_at_its_end(sweep, tmp_path, optimizer):
    knobs = {f"optimizer__{key}": value for key, value in optimizer.items()}
    free = isoflop(tmp_path / "free", rates=(1e-3, 1e-3), **knobs)
    found = fit([sweep, free])
    assert [len(law.losses) for law in found.laws] == [len(BLOCKS) * len(BUDGETS)] * 2


def test_ladders_are_drawn_with_noise_of_their_own(sweep, tmp_path):
    """Else what one ladder has against another of equally many runs would vary too little."""
    other = isoflop(tmp_path / "m", optimizer___target_="llmexp.update.optim.muon")
    one, two = (s.ensemble.laws for s in fit([sweep, other]).surfaces)
    assert abs(np.corrcoef(one[:, 0], two[:, 0])[0, 1]) < 0.5  # five standard deviations


@pytest.mark.parametrize("one_folder", [True, False])
def test_two_ladders_and_what_one_gains(tmp_path, capsys, one_folder):
    muon = Law(SMALL.e, SMALL.a, SMALL.b * 0.8, SMALL.alpha, SMALL.beta)
    places = [tmp_path / "all"] * 2 if one_folder else [tmp_path / "a", tmp_path / "m"]
    isoflop(places[0] / "x", seed=1)
    isoflop(places[1] / "y", muon, seed=2, optimizer___target_="llmexp.update.optim.muon")
    paths = [str(p) for p in dict.fromkeys(places)]
    assert command(["fit", *paths, "--predict", "1e15"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith("muon needs 0.")
    assert "x [" in text
    assert "of the compute of adamw at 2.5e13 FLOPs" in text
    found = llmexp.fit(*paths, predict=1e15).data
    assert [one["name"] for one in found["ladders"]] == ["adamw", "muon"]
    need = found["gains"][0]["common"]
    assert need["ratio"]["high"] < 1
    assert need["shown"]
    assert need["flops"] == pytest.approx(2.5e13, rel=1e-3)
    assert found["gains"][0]["trend"] in (None, "grows", "shrinks")


def test_paths_with_another_number_are_two_ladders_and_parts_of_one_are_one(tmp_path):
    isoflop(tmp_path / "clip1", seed=1)
    isoflop(tmp_path / "clip3", seed=2, clip__max_norm=3.0)
    found, _ = ladders([tmp_path / "clip1", tmp_path / "clip3"])
    assert [one.name for one in found] == ["clip=1.0", "clip=3.0"]
    for name in ("clip1", "clip3"):  # also where the folders have one name
        (tmp_path / name).rename(tmp_path / f"{name}-")
        (tmp_path / name).mkdir()
        (tmp_path / f"{name}-").rename(tmp_path / name / "runs")
    found, _ = ladders([tmp_path / "clip1" / "runs", tmp_path / "clip3" / "runs"])
    assert [one.name for one in found] == ["clip=1.0", "clip=3.0"]
    found, _ = ladders(sorted((tmp_path / "clip1").iterdir()))  # as a shell expands clip1/*
    assert [len(one.points) for one in found] == [15]


def test_a_csv_that_paths_name_twice_is_one_ladder(tmp_path):
    path = good(tmp_path, 4, 5)
    found = llmexp.fit(path, tmp_path / "*.csv", tmp_path / ".." / tmp_path.name / path.name)
    assert [ladder["name"] for ladder in found.data["ladders"]] == ["good"]


def test_a_csv_with_any_case_and_without_tokens(tmp_path):
    """A blank may follow a comma."""
    path = good(tmp_path, 4, 5)
    whole = llmexp.fit(path, predict=1e21).data
    assert whole["count"] == "given"
    assert whole["ladders"][0]["runs"] == 20
    lines = [line.split(",") for line in path.read_text().splitlines()[1:]]
    short = [f"{n},{6 * float(n) * float(d)},{loss}" for n, d, loss in lines]
    (tmp_path / "c.csv").write_text("\n".join(["n,c,Loss", *short, "1e9,1e18,inf"]))
    other = llmexp.fit(tmp_path / "c.csv", predict=1e21).data["ladders"][0]
    assert other["left_out"] == {"not finite, or not above 0": ["line 22"]}
    spaced = path.read_text().replace(",", ", ").replace("loss", "loss, depth")
    (tmp_path / "d.csv").write_text("".join(f"{x}, {i}\n" if i else f"{x}\n" for i, x in
                                            enumerate(spaced.splitlines())))  # fmt: skip
    assert len(llmexp.fit(tmp_path / "d.csv", by="depth").data["ladders"][0]["points"]) == 20
    value = whole["ladders"][0]["prediction"]["loss"]["value"]
    assert other["prediction"]["loss"]["value"] == pytest.approx(value, rel=1e-9)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{csv}", "--form", "line"], "--form line: must be one of surface, isoflop, power"),
        (["{csv}", "--predict", "-1"], "--predict -1: a number above 0 is needed, FLOPs"),
        (
            ["{csv}", "--predict", "abc", "--by", "tokens"],
            "--predict abc: a number above 0 is needed, tokens; for example --predict 1e9",
        ),
        (["{csv}", "--by", "tokens", "--form", "isoflop"], "--by tokens: is of a power law"),
        (
            ["{csv}", "--by", "nothing"],
            "--by nothing: no run has a number above 0 of that name (runs "
            "differ in D, N and loss); for example --by tokens.",
        ),
        (["{csv}", "--by", "token"], "Did you mean tokens?"),
        (
            ["{one}"],
            "one: has 1 point with tokens above 0, at 1 value, and a power law needs 5 "
            "at 4 values; train more budgets, or give the paths of more runs",
        ),
        (["{csv}", "--count", "all"], "--count all: a CSV file has one N"),
        (["{flat}"], "flat: all losses are 3, so they depend on nothing"),
        (["{flat}", "--by", "tokens"], "flat: all losses are 3, so they depend on nothing"),
        (["{csv}", "--count", "some"], "--count some: must be one of head, all, blocks"),
        (["{folder}"], "there is no run to fit"),
        (["{bad}"], "line 3: D=x: must be a number"),
        (["{comma}"], "line 2: has more values than the 3 columns; a decimal sign is a point: 2.9"),
        (["{csv}", "{head}"], "head.csv: has no line of numbers above 0"),
        (["{csv}", "{inf}"], "inf.csv: has no line of numbers above 0"),
        (["{thin}"], "needs the columns N (parameters), D (tokens) and loss"),
        (["{few}"], "train at least 3 sizes at 3 budgets"),
        (["{twice}"], "has the column loss twice; leave one out"),
        (["{bytes}"], "its first line names the columns, such as N,D,loss"),
    ],
)
def test_what_is_refused(tmp_path, capsys, words, said):
    good(tmp_path, 3, 4)
    (tmp_path / "bad.csv").write_text("N,D,loss\n\n1e6,x,3\n")
    (tmp_path / "comma.csv").write_text("N,D,loss\n1e6,1e8,2,9\n")
    (tmp_path / "bytes.csv").write_bytes(b"N,D,loss\n\xff\xfe")
    (tmp_path / "head.csv").write_text("N,D,loss\n")
    (tmp_path / "inf.csv").write_text("N,D,loss\n1e6,2e7,inf\n")
    (tmp_path / "thin.csv").write_text("N,loss\n1e6,3\n")
    (tmp_path / "twice.csv").write_text("N,D,loss,Loss\n1e6,1e7,3,4\n")
    (tmp_path / "few.csv").write_text("N,D,loss\n1e6,1e7,3\n2e6,1e7,3\n1e6,2e7,2.9\n")
    (tmp_path / "one.csv").write_text("N,D,loss\n1e6,1e7,3\n")
    flat = [f"{n},{d},3" for n in (1e6, 2e6, 4e6) for d in (1e7, 2e7, 4e7, 8e7)]
    (tmp_path / "flat.csv").write_text("\n".join(["N,D,loss", *flat]))
    (tmp_path / "empty").mkdir()
    names = {"csv": "good.csv", "folder": "empty"}
    names |= {n: f"{n}.csv" for n in ("bad", "thin", "few", "one", "flat", "head", "inf")}
    names |= {n: f"{n}.csv" for n in ("twice", "comma", "bytes")}
    paths = {k: str(tmp_path / v) for k, v in names.items()}
    assert command(["fit", *(w.format(**paths) for w in words)]) == 2
    assert said in capsys.readouterr().err
    with pytest.raises(ConfigError, match="form='line': must be one of surface"):
        llmexp.fit(paths["csv"], form="line")  # as Python has it
    with pytest.raises(ConfigError, match=r"; for example form='power' by='tokens'$"):
        llmexp.fit(paths["few"], form="surface")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--predict", "1e3"], "That is 15.0 decades below the smallest run: so far out"),
        (["--by", "tokens", "--predict", "1e3"], "decades below the smallest tokens: so far out"),
        (["--by", "parameters"], "The runs differ in tokens too, of which this law takes no"),
        (["--by", "tokens"], "The runs differ in parameters too, of which this law takes no"),
        (["--form", "isoflop"], "the surface, as in the table, has"),
        (["--by", "parameters"], "[not known] x parameters^-"),
        (["--by", "parameters"], "Factor and exponent cannot be told from these runs"),
    ],
)
def test_what_is_said_beside_the_answer(tmp_path, capsys, words, said):
    path = good(tmp_path, 4, 5)
    assert command(["fit", str(path), *words]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert said in text
    assert command(["fit", str(path), "--predict", "1e17"]) == 0  # as far as is near enough
    text = " ".join(capsys.readouterr().out.split())
    assert "decades" not in text
    assert "no account" not in text


@pytest.mark.parametrize("columns", [60, 100])
def test_the_text_fits_the_terminal(tmp_path, capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    path = good(tmp_path, 4, 5)
    assert command(["fit", str(path), "--predict", "1e24", "--why"]) == 0
    text = capsys.readouterr().out
    assert all(len(line) <= columns for line in text.splitlines())
    assert "4.0 decades beyond the largest budget" in " ".join(text.split())


@pytest.mark.slow
def test_a_ladder_that_is_killed_and_resumed_has_the_answer_of_an_unbroken_one(tmp_path):
    """SIGKILL takes the sweep and its worker in the middle of the fifth of nine runs."""
    ladder_ = [
        *TINY, "data=synthetic", "data.n_tokens=20000", "train.device=cpu", "precision=fp32",
        "schedule=linear", "checkpoint.every=20", "train.log_every=20", "train.eval_every=null",
        "model.d_model=8,16,32", "train.max_flops=5e8,1.5e9,4.5e9",
    ]  # fmt: skip
    answers = []
    for name in ("whole", "cut"):
        folder = tmp_path / name / "ladder"
        process = start("train", "-m", *ladder_, f"hydra.sweep.dir={folder}", cwd=tmp_path)
        if name == "cut":
            wait_for(lambda f=folder: list(f.glob("4-*/checkpoints/step_*/manifest.json")), process)
            process.kill()
            workers = alive(next(folder.glob("4-*")))
            for pid in workers:
                os.kill(pid, signal.SIGKILL)
            process.communicate(timeout=HANG_S)
            assert workers
            states = [p.state for p in read_ledger(folder).points]
            assert states.count("finished") == 4
            process = start("resume", str(folder), cwd=tmp_path)
        _, errors = process.communicate(timeout=HANG_S)
        assert process.returncode == 0, errors
        found = llmexp_command("fit", str(folder), "--predict", "1e10", "--json", cwd=tmp_path)
        assert found.code == 0, found.err
        answers.append(found.out)
    assert json.loads(answers[0])["ladders"][0]["runs"] == 9
    assert answers[1] == answers[0]
