"""The user's own model, data, optimizer, tokenizer and hooks. What may not be one is refused by the
rows of tests/refusals/train.yaml."""

from pathlib import Path

import numpy as np
import pytest
import yaml

from llmexp.__main__ import run
from tests.conftest import Result, llmexp
from tests.tools import cut_after, exact
from tests.train.resumed import goes_on

SMALL = [
    "--allow=own", "batch.sequence_length=12", "tracker=none", "train.sample_tokens=0",
    "train.log_every=1", "metrics.picture=false", "precision=fp32",
]  # fmt: skip
SYNTHETIC = ["data=synthetic", "data.n_tokens=5000"]
MODEL = ["~model", "+model={_target_: own.nets.Bigram, vocab_size: null, width: 8}"]
OWN = [*SMALL, *SYNTHETIC, *MODEL]
DROPOUT = [
    *SYNTHETIC, "model.dropout=0.2", "train.max_steps=6", "train.log_every=2",
    "train.eval_every=4", "checkpoint.every=3",
]  # fmt: skip


def trained(cwd: Path, name: str, *overrides: str, **env: str) -> Result:
    done = llmexp("train", *overrides, f"hydra.run.dir={name}", cwd=cwd, **env)
    assert done.code == 0, done.err
    return done


def test_a_run_of_nothing_but_own_parts_trains_and_goes_on_with_allow(tmp_path):
    parts = [
        "~data", "+data={_target_: own.nets.cycle, vocab_size: null, length: 3000}",
        "~optimizer", "+optimizer={_target_: own.nets.plain_sgd, lr: 1.0}",
        "schedule=constant", "schedule.warmup_steps=0", "train.max_steps=8", "checkpoint.every=4",
    ]  # fmt: skip
    whole = trained(tmp_path, "whole", *SMALL, *MODEL, *parts)
    rows = whole.rows()
    assert len(rows) == 8
    # the next id of a cycle is quickly learnt
    assert rows[-1]["train/loss"] < rows[0]["train/loss"] - 0.1
    assert [row["lr"] for row in rows] == [1.0] * 8  # the user's optimizer, at the user's rate
    assert "val/loss" in rows[-1]
    assert "mfu" not in rows[-1]  # the model says nothing about its FLOPs: no figure
    assert whole.json("run.json")["train_tokens"] == 3000
    cut = Result(0, "", "", cut_after(whole, tmp_path, 4))
    refused = llmexp("resume", cut.folder.name, cwd=tmp_path)
    assert refused.code == 2
    assert "model._target_=own.nets.Bigram" in refused.err
    assert "resumed from step_00000004" in goes_on(cut, whole, "--allow=own").out


@pytest.mark.parametrize(
    "sweep", [["hydra.run.dir=new"], ["-m", "train.seed=1,2", "hydra.sweep.dir=new"]]
)
def test_a_module_that_cannot_be_imported_is_refused_with_its_line_alone(tmp_path, sweep):
    (tmp_path / "broken.py").write_text("x = 1\ndef (\n")
    given = [*sweep, *OWN, "--allow=own,broken", "model._target_=broken.Model"]
    failed = llmexp("train", *given, cwd=tmp_path)
    assert failed.code == 2
    assert "importing broken failed: SyntaxError" in failed.err
    files = [line.split('"')[1] for line in failed.err.splitlines() if line.startswith("  File ")]
    assert {*files} <= {str(tmp_path / "broken.py")}
    assert files or "-m" in sweep
    assert "Traceback" not in failed.err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("more", "allow"),
    [
        ([], "other, own"),
        (["--allow=own"], "own_not"),
        # the meta device cannot run it: it is tried on a tiny batch
        (["model._target_=own.nets.NotOnMeta"], "own"),
        # it is tried under the autocast of the run
        (["model._target_=own.nets.Sixteen", "precision=bf16"], "own"),
        # points that differ in what a hook reads are no twins
        (["-m", "+user.scale=1,2", "hooks=[{_target_:own.hooks.every,every:2}]"], "own"),
        # each point has a model of its own
        (["-m", "~optimizer", "+optimizer={_target_: own.nets.changing, lr: 1.0}",
          "train.seed=1,2"], "own"),
    ],
)  # fmt: skip
def test_what_a_part_may_be(tmp_path, monkeypatch, capsys, more, allow):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLMEXP_ALLOW", allow)
    assert run(["plan", *OWN[1:], *more]) == 0, capsys.readouterr().err


def without(rows: list[dict], *names: str) -> list[dict]:
    return [{k: v for k, v in row.items() if k not in names} for row in rows]


def test_hooks_see_every_event_and_change_nothing(runs):
    """They draw random numbers, as the model does."""
    hooked = runs(*DROPOUT, "hooks=[own.hooks.note]", "--allow=own")
    assert without(exact(hooked), "mine/weight", "mine/noise") == exact(runs(*DROPOUT))
    assert all(0 < row["mine/weight"] < 10 for row in hooked.rows())
    lines = (hooked.folder.parent / "events.txt").read_text().splitlines()
    expected: list[tuple[str, int, bool]] = []
    for step in range(1, 7):
        events = ("step_start", "backward_start", "backward_end")
        expected += [(event, step, False) for event in events]
        expected += [("step_end", step, step % 2 == 0)]
        expected += [("evaluated", step, True)] * (step in (4, 6))
        expected += [("saved", step, False)] * (step in (3, 6))
    seen = [line.split() for line in lines]
    assert [(event, int(step), row != "-") for event, step, row in seen] == expected


def test_a_hook_takes_arguments_and_reads_the_section_user(runs, capsys):
    name = "own.hooks.every"
    hooks = f"hooks=[{{_target_:{name},every:2}},{{_target_:{name},every:4,name:b}}]"
    user = ["+user.scale=0.5", "+user.deep.text=a b", "+user.home=${oc.env:MY_HOME}"]
    done = runs(*DROPOUT, hooks, *user, "--allow=own", MY_HOME="/some/where")
    assert [(r.get("mine/seen"), r.get("b")) for r in done.rows()] == [
        (1.0, None),
        (2.0, 2.0),
        (3.0, None),
    ]
    assert without(exact(done), "mine/seen", "b") == exact(runs(*DROPOUT))
    assert done.json("run.json")["better"] == {"mine/seen": "lower", "b": "higher"}
    assert run(["compare", str(done.folder), "--sort", "mine/seen"]) == 0
    assert ", mine/seen 3." in capsys.readouterr().out
    saved = yaml.safe_load((done.folder / "config.yaml").read_text())
    assert saved["user"] == {"scale": 0.5, "deep": {"text": "a b"}, "home": "${oc.env:MY_HOME}"}


HOOKS = ("breaks", "leaves", "clashes", "replaces", "counts", "texts", "numbered")


@pytest.mark.parametrize("kind", [*HOOKS, "late", "missing"])
def test_a_part_that_fails_in_training_is_named_with_its_line(tmp_path, words, kind):
    """An error of a model has its type, place and trace, also where it is one of files."""
    part = f"hooks=[{{_target_: own.wrong.fails, kind: {kind}}}]"
    if kind not in HOOKS:
        part = f"+model={{_target_: own.wrong.Logits, vocab_size: null, kind: {kind}}}"
    more = ["train.max_steps=4", "checkpoint.every=3", "hydra.run.dir=run"]
    model = [MODEL[0], part] if kind not in HOOKS else [*MODEL, part]
    failed = llmexp("train", *SMALL, *SYNTHETIC, *model, *more, cwd=tmp_path)
    assert failed.code == 3
    assert ("Traceback" in failed.err) == (kind not in HOOKS)
    status = failed.json("status.json")
    assert (status["state"], status["exit_code"]) == ("failed", 3)
    assert "own/wrong.py:" in status["error"]
    words.hidden |= {r"/\S*/own/wrong.py:\d+": "own/wrong.py:LINE"}
    words("train/failing", failed.err.splitlines()[-1], kind)


def test_a_tokenizer_of_ones_own_trains_samples_and_resumes(tmp_path):
    for name in ("a", "b"):
        text = f"file {name} says: the same line again and again\n" * 40
        (tmp_path / f"{name}.txt").write_text(text)
    chosen = [
        *SMALL, *MODEL, "tokenizer._target_=own.nets.Pairs", "data=text", "model.width=4",
        "data.train_files=[a.txt,b.txt]", "batch.micro_batch_size=2", "train.sample_tokens=4",
        "train.max_steps=6", "checkpoint.every=3",
    ]  # fmt: skip
    done = trained(tmp_path, "pairs", *chosen)
    last = done.rows()[-1]
    # two bytes an id
    assert last["val/bits_per_byte"] == pytest.approx(last["val/loss"] / np.log(2) / 2, rel=0.02)
    assert done.json("run.json")["tokenizer_vocab_size"] == 65793
    asked = ["sample", "pairs", "--prompt", "the same", "--tokens", "3", "--allow=own"]
    said = llmexp(*asked, cwd=tmp_path)
    assert said.code == 0, said.err
    assert said.out.startswith("the same")
    goes_on(Result(0, "", "", cut_after(done, tmp_path, 3)), done, "--allow=own")
