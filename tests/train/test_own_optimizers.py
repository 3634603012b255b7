"""Optimizers and models of one's own, tried before a run begins: what it would leave untrained is
named. What a run could not go on with is refused by the rows of tests/refusals/train.yaml."""

import pytest

from llmexp.__main__ import run
from tests.conftest import Result, llmexp
from tests.tools import cut_after, exact
from tests.train.resumed import goes_on

BASE = [
    "--allow=own", "data=synthetic", "data.n_tokens=3000", "batch.sequence_length=12",
    "batch.micro_batch_size=2", "tracker=none", "train.sample_tokens=0", "train.log_every=1",
    "metrics.picture=false", "precision=fp32",
]  # fmt: skip


def optimizer(name: str, **more: str) -> list[str]:
    given = "".join(f", {key}: {value}" for key, value in more.items())
    return ["~optimizer", f"+optimizer={{_target_: own.optimizers.{name}, lr: 0.01{given}}}"]


def model(name: str = "Layered", kind: str = "none") -> list[str]:
    target = f"_target_: own.optimizers.{name}"
    return ["~model", f"+model={{{target}, vocab_size: null, width: 8, kind: {kind}}}"]


NO_PART, LEFT_OUT = "had no part in the logits of a trial", "leaves out 1 of the parameters"


@pytest.mark.parametrize(
    ("parts", "texts"),
    [
        ([*model(), *optimizer("momentum", kind="state")], ()),
        ([*model(), *optimizer("momentum", kind="counter")], ()),
        ([*model(), *optimizer("momentum", kind="random")], ()),
        ([*model(), *optimizer("faulty", kind="left out")], (LEFT_OUT, "are: layers.1.bias")),
        ([*model(), *optimizer("faulty", kind="none")], ()),
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
    assert run(["plan", *BASE, *parts]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert all(text in out for text in texts)
    assert ("warning" in out) == bool(texts)


def test_what_steps_change_in_a_group_goes_on_in_a_resumed_run_and_in_a_fork(tmp_path):
    own = [*model(), *optimizer("momentum", kind="counter"), "schedule=constant"]
    own += ["schedule.warmup_steps=0", "checkpoint.every=3", "train.max_steps=6"]
    whole = llmexp("train", *BASE, *own, "hydra.run.dir=whole", cwd=tmp_path)
    assert whole.code == 0, whole.err
    goes_on(Result(0, "", "", cut_after(whole, tmp_path, 3)), whole, "--allow=own")
    given = ["fork.run=whole", "fork.step=3", "--allow=own", "hydra.run.dir=fork"]
    fork = llmexp("train", *given, cwd=tmp_path)
    assert fork.code == 0, fork.err
    assert exact(fork) == exact(whole)[3:]
