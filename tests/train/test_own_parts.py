"""The user's own model, data, optimizer and hooks, from their own files; and what a config file may
not do."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from llmexp.__main__ import run
from tests.conftest import TINY, Result, llmexp
from tests.tools import cut_after, exact

CODE = '''
import numpy as np
import torch
from torch import nn
from torch.optim import AdamW

EVENTS = []


class Bigram(nn.Module):
    """Ten lines: token ids in, logits out."""

    def __init__(self, vocab_size: int, width: int):
        super().__init__()
        self.vocab_size = vocab_size
        self.embed = nn.Embedding(vocab_size, width)
        self.head = nn.Linear(width, vocab_size)

    def forward(self, tokens_bt):
        return self.head(self.embed(tokens_bt))


def cycle(vocab_size: int, length: int):
    ids = np.arange(length) % 50
    return ids, ids[: length // 5]


def plain_sgd(model, lr: float):
    return torch.optim.SGD(model.parameters(), lr=lr)


def note(event, context):
    with open("events.txt", "a") as f:
        print(event, context.step, "-" if context.row is None else sorted(context.row)[0], file=f)
    torch.rand(3), np.random.rand(3)
    noise = torch.nn.functional.dropout(torch.ones(5), 0.5)
    if event == "step_end":
        return {"mine/weight": float(next(context.model.parameters()).detach().abs().max()), "mine/noise": noise.sum()}


def breaks(event, context):
    if event == "step_end" and context.step == 2:
        raise ZeroDivisionError("by zero")


def leaves(event, context):
    if event == "step_start" and context.step == 2:
        raise SystemExit(0)


def lost(vocab_size: int, n_tokens: int):
    raise KeyError("no such corpus")


def unread(n_tokens: int):
    return np.load("corpus.npy")


class Empty(nn.Module):
    def __init__(self, vocab_size: int, width: int):
        super().__init__()


def every(event, context, every: int, name: str = "mine/seen"):
    if event == "step_end" and context.step % every == 0:
        return {name: context.user["scale"] * context.step}


every.better = {"mine/seen": "lower", "b": "higher"}


def torn(event, context):
    pass


torn.better = {"mine/seen": "least"}


class Tuple(Bigram):
    def forward(self, tokens_bt):
        return super().forward(tokens_bt), None


class Turned(Bigram):
    def forward(self, tokens_bt):
        return super().forward(tokens_bt).transpose(1, 2)


class Narrow(Bigram):
    def __init__(self, vocab_size: int, width: int):
        super().__init__(257, width)


class Chosen(Bigram):
    def forward(self, tokens_bt):
        return (super().forward(tokens_bt) * 9).long()


class Detached(Bigram):
    def forward(self, tokens_bt):
        return super().forward(tokens_bt).detach()


class Crashes(Bigram):
    def forward(self, tokens_bt):
        return self.head(self.embed(tokens_bt).mT)


class NotOnMeta(Bigram):
    def forward(self, tokens_bt):
        assert tokens_bt.max().item() >= 0
        return super().forward(tokens_bt)


class Output(dict):
    pass


class Wrapped(Bigram):
    def forward(self, tokens_bt):
        found = Output()
        found.logits = super().forward(tokens_bt)
        return found


class Late(Bigram):
    calls = 0

    def forward(self, tokens_bt):
        self.calls += 1
        if self.calls > 2:
            raise ArithmeticError("too late")
        return super().forward(tokens_bt)


class Missing(Bigram):
    calls = 0

    def forward(self, tokens_bt):
        self.calls += 1
        if self.calls > 2:
            open("rope_cache.bin")
        return super().forward(tokens_bt)


class Sixteen(Bigram):
    """A kernel that takes 16 bits only."""

    def forward(self, tokens_bt):
        logits = super().forward(tokens_bt)
        if logits.dtype != torch.bfloat16:
            raise RuntimeError("only fp16 and bf16 are supported")
        return logits


class Puts(Bigram):
    """By an operation that torch has no deterministic kernel for."""

    def forward(self, tokens_bt):
        place = torch.tensor([tokens_bt.max().item()])
        return super().forward(tokens_bt) + torch.zeros(99).put_(place % 99, torch.zeros(1)).sum()


def never(update, total):
    return None


def late(update, total):
    return 1.0 if update + 1 < total else float("inf")


class Pairs:
    """Two bytes an id; an odd last byte, and the end of a document, have their own."""

    n_vocab, eot_token = 256 * 256 + 257, 256 * 256 + 256

    def __init__(self, broken: str = ""):
        self.byte_lengths = np.array([2] * 256 * 256 + [1] * 256 + [0])
        self.broken = broken
        if broken == "lengths":
            self.byte_lengths = [1, 2]

    def encode_batch(self, texts):
        if self.broken == "crash":
            return self.table[texts]
        if self.broken == "range":
            return [[70_000] for text in texts]
        return [self.ids(text.encode()) for text in texts]

    def ids(self, raw):
        pairs = [a * 256 + b for a, b in zip(raw[::2], raw[1::2])]
        return pairs + ([256 * 256 + raw[-1]] if len(raw) % 2 else [])

    def decode(self, ids):
        kept = [i for i in ids if i != self.eot_token]
        raw = b"".join(bytes(divmod(i, 256)) if i < 256 * 256 else bytes([i - 256 * 256]) for i in kept)
        return raw.decode(errors="replace")


class Unfinished:
    n_vocab = 10

    def decode(self, ids):
        return ""


def counts(event, context):
    return 3 if event == "step_start" else None


def texts(event, context):
    return {"mine/name": "x"} if event == "step_start" else None


def numbered(event, context):
    return {1: 2.0} if event == "saved" else None


def changing(model, lr: float):
    """An optimizer that adds to the model, and wants to find it bare."""
    assert not hasattr(model, "scale")
    model.scale = 1.0
    return torch.optim.SGD(model.parameters(), lr=lr)


class Spare(Bigram):
    def __init__(self, vocab_size: int, width: int):
        super().__init__(vocab_size, width)
        self.spare = nn.Linear(2, 2)


def replaces(event, context):
    if event == "backward_end" and context.step == 2:
        p = [*context.model.parameters()][-1]
        p.grad = p.grad * 2


def clashes(event, context):
    return {"lr": 1.0} if event == "step_end" else None
'''  # noqa: E501

FILES = {
    "mymodel.py": CODE,
    "conf/model/mine.yaml": "_target_: mymodel.Bigram\nvocab_size: null\nwidth: 8\n",
    "conf/data/mine.yaml": "_target_: mymodel.cycle\nlength: 3000\n",
    "conf/optimizer/mine.yaml": "_target_: mymodel.plain_sgd\nlr: 1.0\n",
    "conf/schedule/never.yaml": "_target_: mymodel.never\n",
    "conf/schedule/late.yaml": "_target_: mymodel.late\n",
    "conf/tokenizer/unfinished.yaml": "_target_: mymodel.Unfinished\n",
    "conf/tokenizer/pairs.yaml": "_target_: mymodel.Pairs\n",
} | {
    f"conf/tokenizer/{broken}.yaml": f"_target_: mymodel.Pairs\nbroken: {broken}\n"
    for broken in ("lengths", "range", "crash")
}
BASE = ["--config-dir", "conf", "model=mine", "batch.sequence_length=12", "tracker=none",
"train.sample_tokens=0",
        "train.log_every=1", "metrics.picture=false", "data=synthetic",
        "data.n_tokens=5000"]  # fmt: skip


def write_files(folder: Path) -> None:
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    write_files(folder)
    return folder


@pytest.fixture
def allowed(own, monkeypatch) -> Path:
    """The folder of own parts, to be in, where they are allowed."""
    monkeypatch.chdir(own)
    monkeypatch.setenv("LLMEXP_ALLOW", "mymodel")
    monkeypatch.syspath_prepend(str(own))
    return own


@pytest.fixture(scope="module")
def all_own(own) -> Result:
    """A run of nothing but own parts, five steps of eight, then resumed to the end."""
    overrides = ["data=mine", "optimizer=mine", "train.max_steps=8", "checkpoint.every=4",
    "schedule=constant",
                 "schedule.warmup_steps=0"]  # fmt: skip
    base = [o for o in BASE if not o.startswith("data")]
    result = llmexp("train", *base, *overrides, "--allow", "mymodel", "hydra.run.dir=all", cwd=own)
    assert result.code == 0, result.err
    return result


def test_own_parts_train(all_own):
    rows = all_own.rows()
    assert len(rows) == 8
    assert (
        rows[-1]["train/loss"] < rows[0]["train/loss"] - 0.1
    )  # the next id of a cycle is quickly learnt
    assert [row["lr"] for row in rows] == [1.0] * 8  # the user's optimizer, at the user's rate
    assert "val/loss" in rows[-1]
    assert "mfu" not in rows[-1]  # the model says nothing about its FLOPs: no figure
    assert all_own.json("run.json")["train_tokens"] == 3000


def test_resume_needs_allow_again(own, all_own):
    for path in all_own.folder.glob("checkpoints/step_00000008/*"):
        path.unlink()
    (all_own.folder / "checkpoints" / "step_00000008").rmdir()
    (all_own.folder / "status.json").write_text('{"state": "running"}')
    before = exact(all_own)
    refused = llmexp("resume", "all", cwd=own)
    assert refused.code == 2
    assert "model._target_=mymodel.Bigram" in refused.err
    assert "--allow mypackage" in refused.err
    resumed = llmexp("resume", "all", "--allow", "mymodel", cwd=own)
    assert resumed.code == 0, resumed.err
    assert "resumed from step_00000004" in resumed.out
    assert exact(all_own) == before


def line_of(own: Path, text: str) -> str:
    """FILE:LINE of the first line of mymodel.py that has the text."""
    number = next(
        i for i, line in enumerate((own / "mymodel.py").read_text().splitlines(), 1) if text in line
    )
    return f"{own / 'mymodel.py'}:{number}"


@pytest.mark.parametrize(
    ("part", "says", "line"),
    [
        (
            "data=lost",
            "data: mymodel.lost failed: KeyError: 'no such corpus'",
            'raise KeyError("no such corpus")',
        ),
        (
            "data=unread",
            "data: mymodel.unread failed: FileNotFoundError: [Errno 2]",
            'np.load("corpus.npy")',
        ),
        (
            "model._target_=broken.Model",
            "model._target_=broken.Model: importing broken failed: SyntaxError",
            "def (",
        ),
    ],
)
def test_an_error_of_the_users_code_shows_that_code(own, part, says, line):
    """Its own frames and no others, before anything is written; of a sweep, each point that it
    makes impossible."""
    (own / "broken.py").write_text("x = 1\ndef (\n")
    for name in ("lost", "unread"):
        (own / f"conf/data/{name}.yaml").write_text(f"_target_: mymodel.{name}\nn_tokens: 1\n")
    allowed = ["--allow", "mymodel,broken"]
    failed = llmexp("train", *BASE, *allowed, part, "hydra.run.dir=lost", cwd=own)
    assert failed.code == 2
    first, *block = failed.err.splitlines()
    assert first.startswith(f"llmexp: {says}")
    files = [text.split('"')[1] for text in block if text.startswith("  File ")]
    assert files == [str(own / ("broken.py" if "broken" in part else "mymodel.py"))]
    assert line in "".join(block)
    assert not (own / "lost").exists()
    if part == "data=lost":
        sweep = llmexp(
            "train", "-m", *BASE, *allowed, part, "train.seed=1,2", "hydra.sweep.dir=lost", cwd=own
        )
        assert sweep.code == 2
        assert "Traceback" not in sweep.err
        assert f"0-seed_1, 1-seed_2: {says}" in sweep.err
        assert not (own / "lost").exists()


def test_allowing(own, capsys, monkeypatch):
    """By the flag, by the environment; not at all; and never by a config file."""
    monkeypatch.chdir(own)
    monkeypatch.delenv("LLMEXP_ALLOW", raising=False)
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.syspath_prepend(str(own))
    before = sorted(own.rglob("*.json"))
    assert run(["plan", *BASE]) == 2
    message = capsys.readouterr().err
    assert "model._target_=mymodel.Bigram" in message
    assert "--allow mypackage" in message
    for attempt in ("+allow=mymodel", "+hydra.job.env_set.LLMEXP_ALLOW=mymodel"):
        assert run(["plan", *BASE, attempt]) == 2
    capsys.readouterr()
    monkeypatch.setenv("LLMEXP_ALLOW", "other, mymodel")
    assert run(["plan", *BASE]) == 0
    assert "Bigram" in capsys.readouterr().out
    monkeypatch.setenv("LLMEXP_ALLOW", "mymodel_not")
    assert run(["plan", *BASE]) == 2
    assert run(["plan", *BASE, "--allow=mymodel"]) == 0
    # What the module has merely imported is not in the allowed package.
    assert run(["plan", *BASE, "optimizer=mine", "optimizer._target_=mymodel.AdamW"]) == 2
    capsys.readouterr()
    # A name that is not there, with the nearest; an argument that is not there.
    assert run(["plan", *BASE, "model._target_=mymodel.Bigramm"]) == 2
    assert "Did you mean Bigram?" in capsys.readouterr().err
    assert run(["plan", *BASE, "+model.widht=3"]) == 2
    assert "Did you mean width?" in capsys.readouterr().err
    assert sorted(own.rglob("*.json")) == before


@pytest.fixture(scope="module")
def dropout_run(own) -> tuple[list[str], Result]:
    """A run that draws random numbers itself, without hooks."""
    overrides = [*TINY, "data=synthetic", "data.n_tokens=5000", "model.dropout=0.2",
    "train.max_steps=6",
                 "train.log_every=2", "train.eval_every=4", "checkpoint.every=3"]  # fmt: skip
    result = llmexp("train", *overrides, "hydra.run.dir=bare", cwd=own)
    assert result.code == 0, result.err
    return overrides, result


def test_hooks_see_every_event_and_change_nothing(own, dropout_run):
    overrides, bare = dropout_run
    hooked = llmexp(
        "train", *overrides, "hooks=[mymodel.note]", "--allow=mymodel", "hydra.run.dir=hooked",
        cwd=own
    )  # fmt: skip
    assert hooked.code == 0, hooked.err
    mine = ("mine/weight", "mine/noise")
    assert [{k: v for k, v in row.items() if k not in mine} for row in exact(hooked)] == exact(bare)
    assert all(0 < row["mine/weight"] < 10 for row in hooked.rows())
    seen = [line.split() for line in (own / "events.txt").read_text().splitlines()]
    expected: list[tuple[str, int, bool]] = []
    for step in range(1, 7):
        expected += [
            (event, step, False) for event in ("step_start", "backward_start", "backward_end")
        ]
        expected += [("step_end", step, step % 2 == 0)]
        expected += [("evaluated", step, True)] * (step in (4, 6)) + [("saved", step, False)] * (
            step in (3, 6)
        )
    assert [(event, int(step), row != "-") for event, step, row in seen] == expected


@pytest.mark.parametrize(
    ("part", "says", "line"),
    [
        ("model._target_=mymodel.Tuple", "returned a tuple of 2, where a tensor of logits "
                                         "(2, 12, 320) = (batch", "tokens_bt), None"),
        ("model._target_=mymodel.Wrapped", "= (batch, time, vocabulary) is needed; return its "
                                           ".logits", "found = Output()"),
        ("model._target_=mymodel.Turned", "returned a tensor (2, 320, 12), where",
                                          "transpose(1, 2)"),
        ("model._target_=mymodel.Narrow", "returned logits over 257 ids, where the vocabulary "
                                          "has 320", "def forward(self, tokens_bt):"),
        ("model._target_=mymodel.Chosen", "returned int64 values, where floating-point logits",
                                          "* 9).long()"),
        ("model._target_=mymodel.Detached", "its logits depend on no parameter",
                                            "super().forward(tokens_bt).detach()"),
        ("model._target_=mymodel.Crashes", "failed on tokens (2, 12): RuntimeError: mat1 and mat2",
                                           "self.embed(tokens_bt).mT"),
        ("model._target_=mymodel.Empty", "model._target_=mymodel.Empty: has no parameters to train",
                                         "class Empty"),
        ("schedule=never", "returned None for update 0", "def never("),
        ("schedule=late", "returned inf for update 299; the factor on the base rate, a finite",
                          "def late("),
        ("tokenizer=unfinished", "tokenizer._target_=mymodel.Unfinished: Unfinished lacks "
                                 "encode_batch, eot_token, byte_lengths; a tokenizer has",
                                 "class Unfinished"),
        ("tokenizer=lengths", "tokenizer._target_=mymodel.Pairs: Pairs.byte_lengths must hold "
                              "65,793 whole numbers", "class Pairs"),
        ("tokenizer=range", "must return ids from 0 to 65792 (n_vocab - 1), not [70000]",
                            "class Pairs"),
        ("tokenizer=crash", "failed: AttributeError: 'Pairs' object has no attribute 'table'",
                            "self.table[texts]"),
        ("hooks=[mymodel.torn]", "its attribute better={'mine/seen': 'least'} must name lower or",
                                 "def torn("),
        ("hooks=[mymodel.unread]", "hooks=mymodel.unread: cannot be called as (event, context)",
                                   "def unread("),
        ("hooks=[{_target_:mymodel.every}]", "hooks=mymodel.every: cannot be called as (event, ",
                                             "def every("),
        ("hooks=[{_target_:mymodel.every,evry:2}]", "hooks.0.evry: mymodel.every has no such "
                                                    "argument. Did you mean", ""),
        ("hooks=[{every:2}]", "hooks.0._target_: this key is missing", ""),
        ("hooks=[3]", "hooks=3: the dotted name of a function", ""),
        ("+user.api_key=abcdefgh", "user.api_key: is a secret by its name", ""),
        ("+user.x=${oc.env:NOT_SET_AT_ALL}", "user.x=${oc.env:NOT_SET_AT_ALL}: the environment "
                                             "variable NOT_SET_AT_ALL is not set", ""),
        ("user.x=1", "+user.x=...", ""),
        ("user=3", "user=3: a section of keys", ""),
        ("+my.key=1", "+user.my=...", ""),
        ("+train.mine=1", "+user.mine=...", ""),
    ],
)  # fmt: skip
def test_what_a_part_may_not_be_is_refused_before_training_with_its_line(
    allowed, capsys, part, says, line
):
    """The line of the user's file that makes it so; what has none is one line of text."""
    assert run(["plan", *BASE, part]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    if not line:
        assert len(err.splitlines()) == 1
        return
    number = next(i for i, text in enumerate(CODE.splitlines(), 1) if line in text)
    places = {int(n) for n in re.findall(r'mymodel.py(?::|", line )(\d+)', err)}
    assert places & {number, number - 1}, err


def test_a_model_that_the_meta_device_cannot_run_is_tried_on_a_tiny_batch(allowed, capsys):
    assert run(["plan", *BASE, "model._target_=mymodel.NotOnMeta"]) == 0


def test_a_tokenizer_of_ones_own_trains_samples_and_resumes(own):
    for name in ("a", "b"):
        (own / f"{name}.txt").write_text(f"file {name} says: the same line again and again\n" * 40)
    settings = ["tokenizer=pairs", "data=text", "data.train_files=[a.txt,b.txt]", "model=mine",
    "model.width=4",
                "batch.micro_batch_size=2", "batch.sequence_length=12", "train.sample_tokens=4",
                "train.max_steps=6",
                "train.log_every=1", "checkpoint.every=3", "tracker=none", "--config-dir=conf",
                "--allow=mymodel",
                "precision=fp32"]  # fmt: skip
    done = llmexp("train", *settings, "hydra.run.dir=pairs", cwd=own)
    assert done.code == 0, done.err
    assert "tokenizer Pairs" in done.out
    whole = exact(done)
    last = whole[-1]
    # two bytes an id
    assert last["val/bits_per_byte"] == pytest.approx(last["val/loss"] / np.log(2) / 2, rel=0.02)
    assert done.json("run.json")["tokenizer_vocab_size"] == 65793
    said = llmexp(
        "sample", "pairs", "--prompt", "the same", "--tokens", "3", "--allow=mymodel", cwd=own
    )
    assert said.code == 0, said.err
    assert said.out.startswith("the same")
    (own / "copies").mkdir()
    copy = cut_after(done, own / "copies", 3)
    again = llmexp("resume", str(copy), "--allow=mymodel", cwd=own)
    assert again.code == 0, again.err
    assert exact(Result(0, "", "", copy)) == whole


def test_a_hook_takes_arguments_and_reads_the_section_user(own, dropout_run):
    overrides, bare = dropout_run
    hooks = "hooks=[{_target_:mymodel.every,every:2},{_target_:mymodel.every,every:4,name:b},mymodel.note]"  # noqa: E501
    user = ["+user.scale=0.5", "+user.deep.text=a b", "+user.home=${oc.env:MY_HOME}"]
    done = llmexp(
        "train",
        *overrides,
        hooks,
        *user,
        "--allow=mymodel",
        "hydra.run.dir=args",
        cwd=own,
        MY_HOME="/some/where",
    )
    assert done.code == 0, done.err
    assert [(r.get("mine/seen"), r.get("b")) for r in done.rows()] == [
        (1.0, None),
        (2.0, 2.0),
        (3.0, None),
    ]
    added = ("mine/", "b")
    assert [{k: v for k, v in r.items() if not k.startswith(added)} for r in exact(done)] == exact(
        bare
    )
    assert done.json("run.json")["better"] == {"mine/seen": "lower", "b": "higher"}
    table = llmexp("compare", "args", "--sort", "mine/seen", cwd=own)
    assert table.code == 0, table.err
    assert "mine/seen 3, the only run" in table.out
    saved = yaml.safe_load((done.folder / "config.yaml").read_text())
    assert saved["user"] == {"scale": 0.5, "deep": {"text": "a b"}, "home": "${oc.env:MY_HOME}"}


def test_points_that_differ_in_what_nobody_reads_are_twins(allowed, capsys):
    assert run(["plan", "-m", *BASE, "+user.scale=1,2"]) == 2
    assert "same config as 0-" in capsys.readouterr().err
    assert (
        run(["plan", "-m", *BASE, "+user.scale=1,2", "hooks=[{_target_:mymodel.every,every:2}]"])
        == 0
    )


@pytest.mark.parametrize(
    ("hook", "says"),
    [
        (
            "breaks",
            "the hook mymodel.breaks failed at step_end of step 2: ZeroDivisionError('by zero')",
        ),
        ("leaves", "the hook mymodel.leaves failed at step_start of step 2: SystemExit(0)"),
        (
            "clashes",
            "returned lr, which the row of step 2 has already; choose another name, for example "
            "mine/lr",
        ),
        (
            "replaces",
            "the hook mymodel.replaces put another tensor in the place of a gradient at "
            "backward_end of step 2",
        ),
        (
            "counts",
            "the hook mymodel.counts returned 3 (int) at step_start of step 1; a hook returns None "
            "or a dict",
        ),
        (
            "texts",
            "the hook mymodel.texts returned mine/name='x' (str) at step_start of step 1; a hook "
            "returns None",
        ),
        (
            "numbered",
            "the hook mymodel.numbered returned the key 1 (int) at saved of step 3; a hook returns "
            "None or a",
        ),
    ],
)
def test_a_hook_that_fails_is_named(own, dropout_run, hook, says):
    overrides, _ = dropout_run
    result = llmexp(
        "train",
        *overrides,
        f"hooks=[mymodel.{hook}]",
        "--allow",
        "mymodel",
        f"hydra.run.dir={hook}",
        cwd=own,
    )
    assert result.code == 3
    assert says in result.err
    assert "Traceback" not in result.err
    status = json.loads((own / hook / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", 3)
    assert says in status["error"]
    assert f"{own / 'mymodel.py'}:" in status["error"]


def test_a_parameter_without_a_part_in_the_loss(own):
    """Its gradient is 0 on any layout, so weight decay alone moves it."""
    found = []
    for kind in ("single", "ddp", "fsdp"):
        two = [] if kind == "single" else ["parallelism.nproc_per_node=2"]
        done = llmexp(
            "train", *BASE, "--allow", "mymodel", "model._target_=mymodel.Spare", *two,
            f"parallelism={kind}", "batch.micro_batch_size=2", "batch.real_batch_size=4",
            "train.max_steps=3", "precision=fp64", f"hydra.run.dir=spare_{kind}", cwd=own,
        )  # fmt: skip
        assert done.code == 0, done.err
        found.append([done.rows()[-1][key] for key in ("train/loss", "weight_norm")])
    assert found[1] == pytest.approx(found[0], rel=1e-12)
    assert found[2] == pytest.approx(found[0], rel=1e-12)


@pytest.mark.parametrize(
    ("model", "says", "line"),
    [
        ("Late", "ArithmeticError: too late", 'ArithmeticError("too late")'),
        (
            "Missing",
            "FileNotFoundError: [Errno 2] No such file or directory: 'rope_cache.bin'",
            'open("rope_cache.bin")',
        ),
    ],
)
def test_an_error_of_the_users_code_in_training_names_its_line(own, model, says, line):
    """With its type, the place and the trace, also where it is one of files."""
    done = llmexp(
        "train", *BASE, "--allow", "mymodel", f"model._target_=mymodel.{model}",
        f"hydra.run.dir={model}", "train.max_steps=4", cwd=own,
    )  # fmt: skip
    assert done.code == 3
    assert f"{says} ({line_of(own, line)})" in done.err.splitlines()[-1]
    assert "Traceback" in done.err


def test_a_model_for_16_bits_only_is_tried_as_it_is_trained(own):
    """Under the autocast of the run."""
    done = llmexp(
        "train", *BASE, "--allow", "mymodel", "model._target_=mymodel.Sixteen", "precision=bf16",
        "train.max_steps=1", "hydra.run.dir=sixteen", cwd=own,
    )  # fmt: skip
    assert done.code == 0, done.err


@pytest.mark.parametrize("values", ["true,false", "false,true"])
def test_the_check_of_a_deterministic_point_changes_no_other(allowed, capsys, values):
    points = ["model._target_=mymodel.Puts", f"train.deterministic={values}"]
    assert run(["plan", "-m", *BASE, *points]) == 2
    out, err = capsys.readouterr()
    refused = values.split(",").index("true")
    assert re.findall(r"refused: (\S+?):", err) == [f"{refused}-deterministic_True"]
    assert f"\n{1 - refused}          false " in out
    assert "put_ does not have a deterministic implementation" in err
    assert not torch.are_deterministic_algorithms_enabled()


def test_an_optimizer_that_changes_the_model_gets_one_of_its_own_for_each_point(allowed, capsys):
    (allowed / "conf/optimizer/changing.yaml").write_text("_target_: mymodel.changing\nlr: 1.0\n")
    assert run(["plan", "-m", *BASE, "optimizer=changing", "train.seed=1,2"]) == 0, (
        capsys.readouterr().err
    )
