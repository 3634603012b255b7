"""Runs that llmexp did not train: the same verdicts through every source, and odd tables."""

import gc
import itertools
import json
import os
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
from tests.compare.synthetic import make_case
from tests.conftest import ROOT
from tests.tools import printed, run_here

ODD = yaml.safe_load((Path(__file__).parent / "tables.yaml").read_text())
KEYS = ["clip.max_norm", "train.seed"]
JUDGED = ("mark", "difference", "half", "basis", "val/loss")
# Sources without curves.
WIDE = ("wide.csv", "without_lengths.csv", "wide.parquet", "lines.jsonl", "nested.json")
LONG, FIGURE = "long.csv", {"figure": "val/loss"}


@pytest.fixture(autouse=True)
def _here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")


def judged(answer: Any) -> dict[str, list[Any]]:
    """What a comparison says of each setting, to the bit."""
    return {
        run["label"]: [*(run[key] for key in JUDGED), run["intervals"].get("val/loss")]
        for run in answer.data["runs"]
    }


def a_sweep() -> tuple[Any, Any]:
    """The answer of a sweep of three settings and three seeds, and a frame of its evaluations."""
    import pandas

    noise = np.random.default_rng(1).normal(0, 0.01, (3, 3)).tolist()
    rows = [
        {"max_norm": norm, "seed": {s: 0.02 * i + own for s, own in enumerate(noise[i], 1)}}
        for i, norm in enumerate((0.5, 1.0, 4.0))
    ]
    answer = llmexp.compare(make_case(Path("runs"), rows, KEYS))
    lines = [
        {"run": r.name, **{key: r.config[key] for key in KEYS}, "step": int(r.columns["step"][i]),
         "tokens": int(r.columns["tokens_seen"][i]), "val/loss": r.columns["val/loss"][i]}
        for r in sorted(answer.comparison.runs, key=lambda r: r.path)
        for i in np.flatnonzero(np.isfinite(r.columns["val/loss"]))
    ]  # fmt: skip
    return answer, pandas.DataFrame(lines)


def sources(frame: Any) -> dict[str, Any]:
    """The runs of a sweep as every source has them; some need arguments."""
    wide = frame.drop_duplicates("run", keep="last")
    tables = {
        "wide": wide, "long": frame, "without_lengths": wide.drop(columns=["step", "tokens"]),
        "without_names": frame.assign(run=None), "runs": wide[["run", *KEYS]],
        "curves": frame.drop(columns=KEYS),
    }  # fmt: skip
    for name, table in tables.items():
        table.to_csv(f"{name}.csv", index=False)
    wide.to_parquet("wide.parquet")
    lines = wide.to_dict("records")
    Path("lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    nested = [{"config": {KEYS[0]: line.pop(KEYS[0])}, **line} for line in lines]
    Path("nested.json").write_text(json.dumps(nested))
    Path("logs").mkdir()
    for (norm, seed), own in frame.groupby(KEYS):  # a log of its own says settings in its path
        path = f"logs/clip.max_norm={norm},train.seed={seed}.csv"
        own[["step", "tokens", "val/loss"]].to_csv(path, index=False)
    plain = ("wide.csv", LONG, "without_lengths.csv", "without_names.csv", "wide.parquet")
    found = {name: (name, {}) for name in (*plain, "lines.jsonl", "nested.json", "logs/*.csv")}
    return found | {"frame": (frame, {}), "curves": ("runs.csv", FIGURE | {"curves": "curves.csv"})}


def test_every_source_gives_the_same_verdicts_marks_and_intervals():
    trained, frame = a_sweep()
    own = judged(trained)
    assert [values[0] for values in own.values()] != ["lowest", "undecided", "undecided"]
    for name, (given, how) in sources(frame).items():
        answer = llmexp.compare(given, **how)
        assert printed("compare", json.dumps(answer.data)) == answer.data
        found = judged(answer)
        if name == "nested.json":  # its keys have another name
            found = {k.replace("max_norm", "clip"): v for k, v in found.items()}
        assert found == own, name
        assert "Not checked" in " ".join(answer.data["notes"])
        assert not {"rounding", "one computation"} & set(str(answer).lower().split())
        assert ("losses" in answer.figures) == (name not in WIDE), name
    Path("other.csv").write_text("run,step,loss\nx,1,2\n")
    with pytest.raises(ConfigError, match="curves="):
        llmexp.compare("runs.csv", curves="other.csv")
    answer = llmexp.compare(LONG)
    assert {"verdict", "losses"} <= answer.figures.keys()
    assert "Losses over training" in page(answer.comparison, inline=False)
    # a target is reached at the same place
    reached = [
        [[run[key] for key in (*JUDGED[:3], "label", "target/tokens", "target/steps")]
         for run in llmexp.compare(given, target="val/loss=2.9").data["runs"]]
        for given in ("runs", LONG)
    ]  # fmt: skip
    assert reached[0] == reached[1]
    # how many seeds are needed is said without a command
    frame.drop_duplicates("run", keep="last")[:6].to_csv("two.csv", index=False)
    step = llmexp.next_step("two.csv", by=KEYS[0], seed=KEYS[1], better="lower", **FIGURE)
    assert step == llmexp.next_step("two.csv")
    assert not step.command
    assert "more seed" in step.why
    # what was compared is given back to the memory
    records = [weakref.ref(r) for r in llmexp.compare(["runs"]).found.runs]
    gc.collect()
    assert records
    assert not [one for one in records if one() is not None]


def test_a_frame_of_polars_is_one_of_pandas():
    polars = pytest.importorskip("polars")
    trained, frame = a_sweep()
    frame = polars.from_pandas(frame)
    frame.write_parquet("by_polars.parquet")
    for given in (frame, frame.lazy(), "by_polars.parquet"):
        assert judged(llmexp.compare(given)) == judged(trained)


def test_odd_cells_of_a_frame():
    import pandas

    loss = pandas.array([3.3, None, 3.1, 3.12], dtype="Float64")
    day = pandas.to_datetime(["2024-01-01", None, "2024-01-03", "2024-01-04"])
    frame = pandas.DataFrame({"lr": [0.1, 0.1, 0.2, 0.2], "seed": [1, 2, 1, 2], "loss": loss})
    answer = llmexp.compare(frame.assign(day=day, shape=[(1, 2)] * 4))
    marks = {run["label"]: run["mark"] for run in answer.data["runs"]}
    assert marks == {"lr=0.2": "lowest", "lr=0.1": "undecided"}
    log = pandas.DataFrame({"iter": [0, 10], "val_loss": [3.0, 2.5]})
    assert llmexp.compare(log).headline == "Only setting: the frame, val_loss 2.5000."
    twice = pandas.DataFrame([[1, 2, 3]], columns=["lr", "lr", "loss"])
    with pytest.raises(ConfigError, match="the column 'lr' twice"):
        llmexp.compare(twice)


@pytest.mark.parametrize(
    ("file", "packages", "said"),
    [
        ("runs.parquet", ("pyarrow", "pyarrow.parquet", "polars"), "pyarrow or polars"),
        ("lr=0.1/events.out.tfevents.1", ("tensorboard",), "needs the package tensorboard"),
    ],
)
def test_a_package_that_is_missing_is_named(monkeypatch, file, packages, said):
    path = Path(file)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"PAR1")
    for name in packages:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=said) as refused:
        llmexp.compare(file if path.suffix == ".parquet" else ".")
    assert refused.value.kind == "missing_package"


@pytest.mark.parametrize("name", ["runs.csv", "runs.jsonl", "runs.parquet"])
def test_a_pipe_is_no_table_and_is_not_waited_for(capfd, name):
    os.mkfifo(name)
    result = run_here(capfd, "compare", name)
    assert (result.code, result.err) == (
        2,
        f"llmexp: {name}: cannot be read: is not a plain file\n",
    )


def test_event_files_are_judged_by_the_settings_in_their_paths():
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    for lr, seed in itertools.product((0.1, 0.2), (1, 2, 3)):
        with SummaryWriter(f"runs/lr={lr},seed={seed}") as writer:
            for step in (0, 10, 20):
                writer.add_scalar("val/acc", lr + step / 100 + seed * seed / 1000, step)
    runs = llmexp.compare("runs", figure="val/acc").data["runs"]
    assert {run["label"]: run["mark"] for run in runs} == {"lr=0.2": "best", "lr=0.1": "worse"}


def test_many_runs_are_compared_in_time():
    losses = np.random.default_rng(1).normal(3, 1, (40, 50))
    lines = [f"{i / 100},{k / 10},1,{loss}" for (i, k), loss in np.ndenumerate(losses)]
    Path("many.csv").write_text("\n".join(["lr,wd,seed,val_loss", *lines]))
    began = time.process_time()  # of this process alone: others may keep the machine busy
    assert len(llmexp.compare("many.csv").data["runs"]) == 2000
    assert time.process_time() - began < 20


def test_the_log_of_the_docs_has_its_answer(capfd):
    text = (ROOT / "docs/compare.md").read_text()
    log, answer = re.search(r"\$ cat log.csv\n(.*?)\$ (llmexp compare .*?)```", text, re.S).groups()
    Path("log.csv").write_text(log)
    command, _, shown = answer.partition("\n")
    assert run_here(capfd, *command.split()[1:]).out.startswith(shown)


@pytest.mark.parametrize("odd", ODD, ids=[odd["case"] for odd in ODD])
def test_odd_tables_end_in_an_answer_or_one_refusal(odd, capfd):
    files = odd.get("files", {odd.get("file", "runs.csv"): odd.get("text")})
    for name, text in files.items():
        if text is not None:
            Path(name).write_text(text)
    given = [str(ROOT / odd["published"])] if "published" in odd else [*files]
    result = run_here(capfd, "compare", *given, "--json", *odd.get("flags", []))
    if "refused" in odd:
        assert result.code == 2
        assert odd["refused"] in json.loads(result.out)["error"]["message"]
        return
    assert result.code == 0, result.err
    found = json.loads(result.out)
    assert {run["label"]: run["mark"] or "" for run in found["runs"]} == odd["marks"]
    for key, value in odd.get("figures", {}).items():
        assert found["runs"][-1][key] == pytest.approx(value, rel=1e-4)
    said = [found["headline"], *found["notes"]]
    for note in odd.get("notes", []):
        assert any(note in text for text in said), said
    assert not [text for text in said if odd.get("never", "no such text") in text]
    if "published" in odd:  # with its headline
        page = " ".join((ROOT / "docs/gallery.md").read_text().split())
        assert found["headline"].split(",")[0] in page
