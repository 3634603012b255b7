"""The user's own model, data, optimizer, tokenizer and hooks. What may not be one is refused by the
rows of tests/refusals/train.yaml."""

import numpy as np
import pytest
import yaml

from llmexp.__main__ import run
from tests.conftest import Result
from tests.tools import cut_after, exact
from tests.train.resumed import ends, goes_on, goes_on_from

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


def optimizer(name: str, kind: str = "none") -> list[str]:
    given = "" if name == "sized" else f", kind: {kind}"
    return ["~optimizer", f"+optimizer={{_target_: own.optimizers.{name}, lr: 0.01{given}}}"]


def model(name: str = "Layered", kind: str = "none") -> list[str]:
    target = f"_target_: own.optimizers.{name}"
    return ["~model", f"+model={{{target}, vocab_size: null, width: 8, kind: {kind}}}"]


def test_a_run_of_nothing_but_own_parts_trains_and_goes_on_with_allow(tmp_path):
    parts = [
        "~data", "+data={_target_: own.nets.cycle, vocab_size: null, length: 3000}",
        "~optimizer", "+optimizer={_target_: own.nets.plain_sgd, lr: 1.0}",
        "schedule=constant", "schedule.warmup_steps=0", "train.max_steps=8", "checkpoint.every=4",
    ]  # fmt: skip
    whole = ends(tmp_path, "train", *SMALL, *MODEL, *parts, "hydra.run.dir=whole")
    rows = whole.rows()
    assert len(rows) == 8
    # the next id of a cycle is quickly learnt
    assert rows[-1]["train/loss"] < rows[0]["train/loss"] - 0.1
    assert [row["lr"] for row in rows] == [1.0] * 8  # the user's optimizer, at the user's rate
    assert "val/loss" in rows[-1]
    assert "mfu" not in rows[-1]  # the model says nothing about its FLOPs: no figure
    assert whole.json("run.json")["train_tokens"] == 3000
    cut = Result(0, "", "", cut_after(whole, tmp_path, 4))
    refused = ends(tmp_path, "resume", cut.folder.name, code=2)
    assert "model._target_=own.nets.Bigram" in refused.err
    assert "resumed from step_00000004" in goes_on(cut, whole, "--allow=own").out


def test_what_steps_change_in_a_group_goes_on_in_a_resumed_run_and_in_a_fork(tmp_path):
    own = [*SMALL, *SYNTHETIC, *model(), *optimizer("momentum", "counter"), "schedule=constant"]
    own += ["schedule.warmup_steps=0", "checkpoint.every=3", "train.max_steps=6"]
    whole = ends(tmp_path, "train", *own, "hydra.run.dir=whole")
    goes_on_from(3, whole, tmp_path, "--allow=own")
    given = ["fork.run=whole", "fork.step=3", "--allow=own", "hydra.run.dir=fork"]
    assert exact(ends(tmp_path, "train", *given)) == exact(whole)[3:]


NO_PART, LEFT_OUT = "had no part in the logits of a trial", "leaves out 1 of the parameters"


@pytest.mark.parametrize(
    ("parts", "texts"),
    [
        ([*model(), *optimizer("momentum", "state")], ()),
        ([*model(), *optimizer("momentum", "counter")], ()),
        ([*model(), *optimizer("momentum", "random")], ()),
        ([*model(), *optimizer("faulty", "left out")], (LEFT_OUT, "are: layers.1.bias")),
        ([*model(), *optimizer("faulty")], ()),
        ([*model(), *optimizer("sized")], ("own.optimizers.sized could not be tried on small",)),
        (model(kind="spare"), (NO_PART, "spare.weight, spare.bias")),
        (model(kind="never"), (NO_PART, "layers.1.weight, layers.1.bias")),
        (model("ByFeatures"), (NO_PART, "gate")),
        (model(kind="frozen"), ()),  # nobody trains them
        (model(kind="dropped"), ()),  # used in evaluation
        (model(kind="hidden"), ()),  # beneath torch's older checkpoint, which hides them
        (model(kind="shown"), ()),
    ],
)
def test_what_would_stay_untrained_is_named_in_the_plan(
    tmp_path, monkeypatch, capsys, parts, texts
):
    monkeypatch.chdir(tmp_path)
    assert run(["plan", *SMALL, *SYNTHETIC, "batch.micro_batch_size=2", *parts]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert all(text in out for text in texts)
    assert ("warning" in out) == bool(texts)


@pytest.mark.parametrize(
    "sweep", [["hydra.run.dir=new"], ["-m", "train.seed=1,2", "hydra.sweep.dir=new"]]
)
def test_a_module_that_cannot_be_imported_is_refused_with_its_line_alone(tmp_path, sweep):
    (tmp_path / "broken.py").write_text("x = 1\ndef (\n")
    given = [*sweep, *OWN, "--allow=own,broken", "model._target_=broken.Model"]
    failed = ends(tmp_path, "train", *given, code=2)
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
    found = [(row.get("mine/seen"), row.get("b")) for row in done.rows()]
    assert found == [(1.0, None), (2.0, 2.0), (3.0, None)]
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
    parts = [*(MODEL if kind in HOOKS else MODEL[:1]), part]
    failed = ends(tmp_path, "train", *SMALL, *SYNTHETIC, *parts, *more, code=3)
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
    done = ends(tmp_path, "train", *chosen, "hydra.run.dir=pairs")
    last = done.rows()[-1]
    # two bytes an id
    assert last["val/bits_per_byte"] == pytest.approx(last["val/loss"] / np.log(2) / 2, rel=0.02)
    assert done.json("run.json")["tokenizer_vocab_size"] == 65793
    asked = ["--prompt", "the same", "--tokens", "3", "--allow=own"]
    assert ends(tmp_path, "sample", "pairs", *asked).out.startswith("the same")
    goes_on_from(3, done, tmp_path, "--allow=own")
