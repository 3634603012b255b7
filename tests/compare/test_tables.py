"""Runs that llmexp did not train: the same verdicts through every door, and odd tables."""

import csv
import gc
import itertools
import json
import math
import re
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import llmexp
from llmexp.compare.page import page
from llmexp.config.values import ConfigError
from tests.compare.synthetic import make_case, read_rows
from tests.conftest import ROOT
from tests.tools import printed, run_here

HERE = Path(__file__).parent
ODD = yaml.safe_load((HERE / "tables.yaml").read_text())
KEYS = ("clip.max_norm", "train.seed")
JUDGED = ("mark", "difference", "half", "basis", "val/loss")


@pytest.fixture(autouse=True)
def _here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def sweep() -> Any:
    """The folder of a sweep of three settings and three seeds, and its answer."""
    rng = np.random.default_rng(1)
    rows = [
        {"max_norm": norm, "seed": seed, "offset": 0.02 * i + float(rng.normal(0, 0.01))}
        for i, norm in enumerate((0.5, 1.0, 4.0))
        for seed in (1, 2, 3)
    ]
    return make_case(Path("runs"), rows, ["clip.max_norm", "train.seed"])


def lines_of(folder: Path, every: bool) -> list[dict[str, Any]]:
    """A line for each run of a sweep, or for each of its rows that has a val loss."""
    found = []
    for path in sorted(p.parent for p in folder.glob("*/metrics.jsonl")):
        config = yaml.safe_load((path / "config.yaml").read_text())
        own = {k: config[k.partition(".")[0]][k.partition(".")[2]] for k in KEYS}
        rows = [row for row in read_rows(path) if "val/loss" in row]
        for row in rows if every else rows[-1:]:
            figures = {"step": row["step"], "tokens": row["tokens_seen"]}
            found.append({"run": path.name, **own, **figures, "val/loss": row["val/loss"]})
    return found


def write_csv(path: str, lines: list[dict[str, Any]]) -> str:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)
    return path


def judged(answer: Any) -> dict[str, list[Any]]:
    """What a comparison says of each setting, to the bit."""
    return {
        run["label"]: [*(run[key] for key in JUDGED), run["intervals"].get("val/loss")]
        for run in answer.data["runs"]
    }


def doors(folder: Path) -> dict[str, Any]:
    """The runs of a sweep as every source has them."""
    import pandas
    import pyarrow
    from pyarrow import parquet

    wide, long = (lines_of(folder, every) for every in (False, True))
    found: dict[str, Any] = {
        "wide": write_csv("wide.csv", wide),
        "long": write_csv("long.csv", long),
        "frame": pandas.DataFrame(long),
        "without lengths": write_csv(
            "ends.csv", [{k: v for k, v in w.items() if k not in ("step", "tokens")} for w in wide]
        ),
        "without names": write_csv("nameless.csv", [{**line, "run": None} for line in long]),
    }
    Path("wide.jsonl").write_text("".join(json.dumps(line) + "\n" for line in wide))
    nested = [{"config": {"clip.max_norm": w["clip.max_norm"]}, **w} for w in wide]
    for line in nested:
        del line["clip.max_norm"]
    Path("nested.json").write_text(json.dumps(nested))
    parquet.write_table(pyarrow.Table.from_pylist(wide), "wide.parquet")
    return found | {"lines": "wide.jsonl", "parquet": "wide.parquet", "nested": "nested.json"}


def test_every_door_gives_the_same_verdicts_marks_and_intervals(sweep):
    own = judged(llmexp.compare(sweep))
    assert [values[0] for values in own.values()] != ["lowest", "undecided", "undecided"]
    for name, given in doors(sweep).items():
        answer = llmexp.compare(given)
        assert printed("compare", json.dumps(answer.data)) == answer.data
        found = judged(answer)
        if name == "nested":  # its keys have another name
            found = {k.replace("max_norm", "clip"): v for k, v in found.items()}
        assert found == own, name
        assert "Not checked" in " ".join(answer.data["notes"])
        assert not {"rounding", "one computation"} & set(str(answer).lower().split())


def test_a_frame_of_polars_is_one_of_pandas(sweep):
    polars = pytest.importorskip("polars")
    frame = polars.DataFrame(lines_of(sweep, True))
    assert judged(llmexp.compare(frame)) == judged(llmexp.compare(sweep))
    assert judged(llmexp.compare(frame.lazy())) == judged(llmexp.compare(sweep))
    frame.write_parquet("by_polars.parquet")
    assert judged(llmexp.compare("by_polars.parquet")) == judged(llmexp.compare(sweep))


def test_odd_cells_of_a_frame():
    import pandas

    loss = pandas.array([3.3, None, 3.1, 3.12], dtype="Float64")
    day = pandas.to_datetime(["2024-01-01", None, "2024-01-03", "2024-01-04"])
    frame = pandas.DataFrame({"lr": [0.1, 0.1, 0.2, 0.2], "seed": [1, 2, 1, 2], "loss": loss})
    answer = llmexp.compare(frame.assign(day=day, shape=[(1, 2)] * 4))
    assert {run["label"]: run["mark"] for run in answer.data["runs"]} == {
        "lr=0.2": "lowest",
        "lr=0.1": "undecided",
    }
    log = pandas.DataFrame({"iter": [0, 10], "val_loss": [3.0, 2.5]})
    assert llmexp.compare(log).headline == "Only setting: the frame, val_loss 2.5000."
    twice = pandas.DataFrame([[1, 2, 3]], columns=["lr", "lr", "loss"])
    with pytest.raises(ConfigError, match="the column 'lr' twice"):
        llmexp.compare(twice)


def test_the_index_that_a_frame_writes_is_neither_seed_nor_setting():
    losses = {0.1: (3.00, 3.10, 3.20, 3.31), 0.2: (3.02, 3.125, 3.22, 3.335)}
    for lr, own in losses.items():
        lines = [f"{i},{lr},{loss}" for i, loss in enumerate(own)]
        Path(f"{lr}.csv").write_text("\n".join([",lr,val_loss", *lines, ""]))
    for by in (["lr"], None):
        found = llmexp.compare(["0.1.csv", "0.2.csv"], figure="val_loss", by=by)
        assert [s["mark"] for s in found.data["runs"]] == ["lowest", "undecided"]
        assert found.data["runs"][0]["seeds"] == 4
        assert found.data["runs"][1]["half"] > 0.1  # seeds that are no seeds pair nothing


def test_what_was_compared_is_given_back_to_the_memory(sweep):
    records = [weakref.ref(r) for r in llmexp.compare([sweep]).found.runs]
    gc.collect()
    assert records
    assert not [one for one in records if one() is not None]


def test_a_log_of_its_own_says_its_settings_in_its_path(sweep):
    own, lines = judged(llmexp.compare(sweep)), lines_of(sweep, True)
    Path("logs").mkdir()
    for run in {line["run"]: line for line in lines}.values():
        name = ",".join(f"{key}={run[key]}" for key in KEYS)
        of = [w for w in lines if w["run"] == run["run"]]
        keys = ("step", "tokens", "val/loss")
        write_csv(f"logs/{name}.csv", [{k: w[k] for k in keys} for w in of])
    assert judged(llmexp.compare("logs/*.csv")) == own


def test_curves_come_from_a_file_of_their_own(sweep):
    own, lines = judged(llmexp.compare(sweep)), lines_of(sweep, True)
    runs = write_csv(
        "runs.csv", [{k: w[k] for k in ("run", *KEYS)} for w in lines_of(sweep, False)]
    )
    curves = write_csv("c.csv", [{k: v for k, v in w.items() if k not in KEYS} for w in lines])
    assert judged(llmexp.compare(runs, figure="val/loss", curves=curves)) == own
    with pytest.raises(ConfigError, match="curves="):
        llmexp.compare(runs, curves=write_csv("other.csv", [{"run": "x", "step": 1, "loss": 2}]))


def test_a_target_is_reached_at_the_same_place(sweep):
    own, long = llmexp.compare(sweep, target="val/loss=2.9"), doors(sweep)["long"]
    found = llmexp.compare(long, target="val/loss=2.9")
    for a, b in zip(own.data["runs"], found.data["runs"], strict=True):
        keys = ("label", "mark", "difference", "half", "target/tokens", "target/steps")
        assert {k: a[k] for k in keys} == {k: b[k] for k in keys}


def test_a_run_that_ends_at_its_target_is_not_too_short():
    curves = {("a", 1): 3, ("a", 2): 2, ("b", 1): 3, ("b", 2): 3}
    lines = [
        {"opt": opt, "seed": seed, "step": 10 * n, "val_loss": 4 - n / 2 + 0.01 * seed}
        for (opt, seed), length in curves.items()
        for n in range(1, length + 1)
    ]
    table = write_csv("curves.csv", lines)
    assert "too short (opt=a seed=2)" in " ".join(llmexp.compare(table).data["notes"])
    assert "too short" not in str(llmexp.compare(table, target="val_loss=3.1"))


def test_unequal_lengths_are_not_ranked(sweep):
    lines = [w for w in lines_of(sweep, True) if w["clip.max_norm"] != 4.0 or w["step"] < 300]
    answer = llmexp.compare(write_csv("unequal.csv", lines))
    assert answer.headline.startswith("No ranking: the budgets differ")
    assert {run["mark"] for run in answer.data["runs"]} >= {"not comparable"}
    assert any(note.startswith("To settle it: runs of one length") for note in answer.data["notes"])


def test_the_page_draws_curves_and_seeds_of_others(sweep):
    answer = llmexp.compare(doors(sweep)["long"])
    assert {"verdict", "losses"} <= answer.figures.keys()
    assert "Losses over training" in page(answer.comparison, inline=False)
    assert "losses" not in llmexp.compare("wide.csv").figures


def test_how_many_seeds_are_needed_is_said_without_a_command(sweep):
    two, how = write_csv("two.csv", lines_of(sweep, False)[:6]), {"figure": "val/loss"}
    step = llmexp.next_step(two, by="clip.max_norm", seed="train.seed", better="lower", **how)
    assert step == llmexp.next_step(two)
    assert not step.command
    assert "more seed" in step.why


def test_flags_of_tables_are_refused_for_run_folders(sweep):
    with pytest.raises(ConfigError) as refused:
        llmexp.compare(sweep, by=["clip.max_norm"])
    assert refused.value.kind == "idle_knob"


def test_what_rounding_to_few_digits_hides_widens_an_interval():
    losses = {0.1: (3.1, 3.2, 3.2), 0.2: (3.5, 3.6, 3.6)}
    lines = [
        {"lr": lr, "seed": s, "val_loss": y} for lr, of in losses.items() for s, y in enumerate(of)
    ]
    worse = llmexp.compare(write_csv("coarse.csv", lines)).data["runs"][1]
    # t of 2 x 2 degrees of freedom less those of the blocks, times the rounding of six figures
    assert worse["half"] == pytest.approx(4.3027 * 0.1 / math.sqrt(18), rel=1e-4)


def test_a_package_that_is_missing_is_named(monkeypatch):
    Path("runs.parquet").write_bytes(b"PAR1")
    for name in ("pyarrow", "pyarrow.parquet", "polars"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match="pyarrow or polars") as refused:
        llmexp.compare("runs.parquet")
    assert refused.value.kind == "missing_package"


def test_event_files_need_their_package(monkeypatch):
    Path("lr=0.1").mkdir()
    Path("lr=0.1/events.out.tfevents.1").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ConfigError, match="needs the package tensorboard") as refused:
        llmexp.compare(".")
    assert refused.value.kind == "missing_package"


def test_event_files_are_judged_by_the_settings_in_their_paths():
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    for lr, seed in itertools.product((0.1, 0.2), (1, 2, 3)):
        with SummaryWriter(f"runs/lr={lr},seed={seed}") as writer:
            for step in (0, 10, 20):
                writer.add_scalar("val/acc", lr + step / 100 + seed * seed / 1000, step)
    answer = llmexp.compare("runs", figure="val/acc")
    assert {run["label"]: run["mark"] for run in answer.data["runs"]} == {
        "lr=0.2": "best",
        "lr=0.1": "worse",
    }


def test_many_runs_are_compared_in_time():
    rng = np.random.default_rng(1)
    lines = [
        {"lr": i / 100, "wd": k / 10, "seed": 1, "val_loss": 3 + float(rng.normal())}
        for i in range(100)
        for k in range(50)
    ]
    began = time.process_time()  # of this process alone: others may keep the machine busy
    answer = llmexp.compare(write_csv("many.csv", lines))
    assert len(answer.data["runs"]) == 5000
    assert time.process_time() - began < 20


GALLERY = {
    "value_embeddings": ({"by": "embeddings"}, {"five": "best", "three": "worse"}),
    "update_smoothing": ({"by": "forty"}, dict.fromkeys("abc", "undecided") | {"d": "lowest"}),
    "layer_dropout": (
        {"by": "configuration", "figure": "final_loss"},
        {"topological_r8": "lowest", "weighted_r8": "undecided"}
        | dict.fromkeys(("baseline", "weighted_r6"), "not comparable"),
    ),
}


@pytest.mark.parametrize("name", GALLERY)
def test_published_runs_have_the_verdicts_of_the_gallery(name):
    how, marks = GALLERY[name]
    answer = llmexp.compare(ROOT / "docs/gallery" / f"{name}.csv", **how)
    assert {run[how["by"]]: run["mark"] for run in answer.data["runs"]} == marks
    assert answer.headline.split(",")[0] in " ".join((ROOT / "docs/gallery.md").read_text().split())


def test_a_run_without_a_seed_is_called_by_its_name(capfd):
    runs = enumerate([(0.1, 2), (0.1, 2), (0.1, 1), (0.2, 2), (0.2, 2)])
    rows = [(i, lr, step) for i, (lr, steps) in runs for step in range(1, steps + 1)]
    lines = [f"r{i},{lr},{step},{3 - lr * step}" for i, lr, step in rows]
    Path("log.csv").write_text("\n".join(["run,lr,step,val_loss", *lines]))
    said = run_here(capfd, "compare", "log.csv", "--by", "lr").out
    assert "too short (lr=0.1 run=r2)" in " ".join(said.split())


def test_the_log_of_the_docs_has_its_answer(capfd):
    text = (ROOT / "docs/compare.md").read_text()
    log, answer = re.search(r"\$ cat log.csv\n(.*?)\$ (llmexp compare .*?)```", text, re.S).groups()
    Path("log.csv").write_text(log)
    command, _, shown = answer.partition("\n")
    assert run_here(capfd, *command.split()[1:]).out.startswith(shown)


@pytest.mark.parametrize("odd", ODD, ids=[odd["case"] for odd in ODD])
def test_odd_tables_end_in_an_answer_or_one_refusal(odd, capfd):
    table = Path(odd.get("file", "runs.csv"))
    if "text" in odd:
        table.write_text(odd["text"])
    result = run_here(capfd, "compare", str(table), "--json", *odd.get("flags", []))
    if "refused" in odd:
        assert result.code == 2
        assert odd["refused"] in json.loads(result.out)["error"]["message"]
        return
    assert result.code == 0, result.err
    found = json.loads(result.out)
    assert {run["label"]: run["mark"] or "" for run in found["runs"]} == odd["marks"]
    for note in odd.get("notes", []):
        said = [found["headline"], *found["notes"]]
        assert any(note in text for text in said), said
