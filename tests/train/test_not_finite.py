"""Rates that are none and values that are not finite: found at the step that has them, and never
saved. At the command line, with parts of one's own."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from llmexp.__main__ import run
from llmexp.checkpoint import saving
from llmexp.update.states import Traits
from tests.conftest import TINY, Result, llmexp
from tests.tools import exact

CODE = '''
import torch
from llmexp.update.optim import AdamW

BAD = False


def rate(update, total, bad=None, value="1.0", always=True):
    """A schedule with one bad value; without `always` only once a hook says so."""
    if update == bad and (always or BAD):
        return {"None": None, "text": "text"}[value] if value in ("None", "text") else float(value)
    return 1 - update / total / 2


def turns(event, context):
    global BAD
    BAD = True


def base(event, context, at=1, key="initial_lr", value="nan"):
    """A hook that changes a group."""
    if event == "step_end" and context.step == at:
        for group in context.optimizers[0].param_groups:
            group[key] = float(value)


class Bursts(AdamW):
    """AdamW, whose update number `at` leaves a value in the weights, or in a state."""

    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            group["count"] += 1
            if BAD and group["count"] == group["at"]:  # not in a trial before the run
                for p in group["params"][1:2]:
                    held = p if group["where"] == "weights" else self.state[p][group["where"]]
                    with torch.no_grad():
                        held.fill_(group["value"])


def bursts(model, lr, at, value, where):
    given = {"count": 0, "at": at, "value": float(value), "where": where}
    return Bursts([{"params": list(model.parameters()), **given}], lr=lr)


class Lowest(AdamW):
    """AdamW, which also keeps the smallest gradients so far: of those that are negative."""

    def step(self, closure=None):
        super().step()
        for p in self.param_groups[0]["params"]:
            low = self.state[p].get("low", torch.full_like(p, torch.inf))
            self.state[p]["low"] = torch.where(p.grad < 0, p.grad.minimum(low), low)


def lowest(model, lr):
    return Lowest(model.parameters(), lr=lr)


def spoils(model, lr):
    """An optimizer that spoils the first weights, not those of a trial."""
    p = next(model.parameters())
    with torch.no_grad():
        p.fill_(torch.nan if len(p) > 16 else 0)
    return AdamW(model.parameters(), lr=lr)
'''
BASE = [
    *TINY, "--config-dir=conf", "--allow=faulty", "data=synthetic", "data.n_tokens=3000",
    "train.log_every=1", "batch.micro_batch_size=2",
]  # fmt: skip
NO_RATES = ("nan", "inf", "-inf", "-1e-9", "None", "text")


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faulty")
    (folder / "faulty.py").write_text(CODE)
    for kind, text in {
        "schedule/faulty": "_target_: faulty.rate",
        "optimizer/bursts": "_target_: faulty.bursts\nlr: 1e-3\nat: 2\nvalue: nan\nwhere: weights",
        "optimizer/lowest": "_target_: faulty.lowest\nlr: 1e-3",
        "optimizer/spoils": "_target_: faulty.spoils\nlr: 1e-3",
    }.items():
        (folder / f"conf/{kind}.yaml").parent.mkdir(parents=True, exist_ok=True)
        (folder / f"conf/{kind}.yaml").write_text(text)
    return folder


def few(examples: int) -> settings:
    checks = [HealthCheck.function_scoped_fixture]
    return settings(max_examples=examples, suppress_health_check=checks)


def are_finite(folder: Path) -> list[int]:
    """The steps of the checkpoints, of which each tensor is finite."""
    for file in folder.glob("checkpoints/step_*/*.safetensors"):
        assert all(bool(t.isfinite().all()) for t in load_file(file).values()), file
    return sorted(int(path.name[5:]) for path in folder.glob("checkpoints/step_*"))


@few(25)
@given(
    value=st.sampled_from(NO_RATES) | st.floats(0, 9).map(str),
    steps=st.integers(1, 256),
    data=st.data(),
)
def test_a_schedule_is_looked_at_before_a_run_begins(
    faulty, monkeypatch, capsys, value, steps, data
):
    monkeypatch.chdir(faulty)
    monkeypatch.syspath_prepend(str(faulty))
    bad = data.draw(st.integers(0, steps - 1))
    given = ["schedule=faulty", f"+schedule.bad={bad}", f"+schedule.value='{value}'"]
    code = run(["plan", *BASE, *given, f"train.max_steps={steps}"])
    text = capsys.readouterr().err
    assert code == (2 if value in NO_RATES else 0), text
    if code:
        assert "schedule._target_=faulty.rate: returned " in text
        assert f"for update {bad};" in text
        assert f"{faulty / 'faulty.py'}:" in text


@pytest.fixture(scope="module")
def good(faulty: Path) -> list[dict]:
    """The rows of a run without a fault."""
    done = llmexp(
        "train", *BASE, "schedule=faulty", "train.max_steps=6", "hydra.run.dir=good", cwd=faulty
    )
    assert done.code == 0, done.err
    return exact(done)


@few(5)
@given(
    bad=st.integers(0, 5),
    value=st.sampled_from(NO_RATES),
    every=st.integers(1, 3),
    late=st.booleans(),
    ranks=st.sampled_from([1, 1, 2]),
)
def test_a_step_without_a_rate_is_refused_and_goes_on_when_it_is_mended(
    faulty, good, tmp_path_factory, bad, value, every, late, ranks
):
    """By its name, before its update; what was saved before it is good, and goes on as a run
    without the fault."""
    folder = tmp_path_factory.mktemp("rate") / "run"
    several = ["parallelism=ddp", f"parallelism.nproc_per_node={ranks}"] * (ranks > 1)
    done = llmexp(
        "train", *BASE, "schedule=faulty", f"+schedule.bad={bad}", f"+schedule.value='{value}'",
        "+schedule.always=false", "hooks=[faulty.turns]", "train.max_steps=6",
        f"checkpoint.every={every}", f"checkpoint.async={late}", f"hydra.run.dir={folder}",
        *several, cwd=faulty,
    )  # fmt: skip
    assert done.code == 3, done.err
    last = done.err.splitlines()[-1]
    assert f"step {bad + 1} is refused: schedule._target_=faulty.rate: returned " in last
    assert "llmexp resume" in last or bad < every
    assert "fork.run" not in last
    saved = are_finite(folder)
    assert saved[-1:] == [bad // every * every][: bad // every]
    rows = Result(0, "", "", folder).rows()
    assert [row["step"] for row in rows] == [*range(1, bad + 1)]
    assert all("lr" in row for row in rows)
    again = llmexp("resume", str(folder), "hooks=[]", "--allow=faulty", cwd=faulty)
    assert again.code == 0, again.err
    if ranks == 1:
        assert exact(Result(0, "", "", folder)) == good


@pytest.mark.parametrize("key", ["initial_lr", "weight_decay"])
@pytest.mark.parametrize("value", ["nan", "inf", "-1.0"])
@pytest.mark.parametrize("every", [1, 9])
def test_a_rate_that_a_hook_changes_is_refused_and_not_saved(faulty, tmp_path, key, value, every):
    hook = f"hooks=[{{_target_: faulty.base, at: 2, key: {key}, value: '{value}'}}]"
    done = llmexp(
        "train", *BASE, hook, "train.max_steps=5", f"checkpoint.every={every}",
        f"hydra.run.dir={tmp_path / 'run'}", cwd=faulty,
    )  # fmt: skip
    assert done.code == 3, done.err
    what = "what step 2 has left is not saved" if every == 1 else "step 3 is refused"
    assert f"{what}: optimizer: the {'base rate' if key == 'initial_lr' else 'weight decay'}" in (
        done.err
    )
    assert f"is {value}" in done.err
    assert are_finite(tmp_path / "run") == [1][: every == 1]


PATHS = {
    "periodic": ["checkpoint.every=1"],
    "late": ["checkpoint.every=1", "checkpoint.async=true"],
    "by time": ["checkpoint.every_minutes=1e-9"],
    "stop": ["train.stop_step=AT", "data.val_ratio=0"],
    "last": ["train.max_steps=AT", "data.val_ratio=0"],
    "unsaved": ["train.max_steps=AT", "data.val_ratio=0", "checkpoint.last=false"],
    "shared": ["checkpoint.every=1", "parallelism=fsdp", "parallelism.nproc_per_node=2"],
}


@pytest.mark.parametrize("path", PATHS)
@few(2)
@given(
    at=st.integers(1, 3),
    value=st.sampled_from(["nan", "inf", "-inf"]),
    where=st.sampled_from(["weights", "exp_avg", "exp_avg_sq"]),
)
def test_what_is_not_finite_is_never_saved(faulty, tmp_path_factory, path, at, value, where):
    """By none of the ways in which a run saves, although loss and norm of the step were fine: the
    newest checkpoint is that of the last good step."""
    where = "weights" if path == "unsaved" or value != "nan" else where
    folder = tmp_path_factory.mktemp("value") / "run"
    more = [word.replace("AT", str(at)) for word in PATHS[path]]
    done = llmexp(
        "train", *BASE, "optimizer=bursts", f"optimizer.at={at}", f"optimizer.value='{value}'",
        f"optimizer.where={where}", "hooks=[faulty.turns]", "train.max_steps=4", *more,
        f"hydra.run.dir={folder}", cwd=faulty,
    )  # fmt: skip
    assert done.code == 3, done.err
    assert f"what step {at} has left is not saved: values that are not finite: " in done.err
    status = json.loads((folder / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", 3)
    saved = are_finite(folder)
    assert saved[-1:] == (
        [at - 1] if at > 1 and path in ("periodic", "late", "by time", "shared") else []
    )
    rows = Result(0, "", "", folder).rows()
    assert all(math.isfinite(row["train/loss"]) for row in rows)
    if saved:
        assert f"the last checkpoint is step_{saved[-1]:08d}" in done.err
        assert "fork.run=" in done.err


def test_first_weights_that_are_not_finite_are_not_saved(faulty, tmp_path):
    done = llmexp(
        "train", *BASE, "optimizer=spoils", "checkpoint.save_initial=true",
        f"hydra.run.dir={tmp_path / 'run'}", cwd=faulty,
    )  # fmt: skip
    assert done.code == 3
    assert "what step 0 has left is not saved" in done.err
    assert are_finite(tmp_path / "run") == []


def test_infinities_in_a_state_of_the_users_are_saved(faulty, tmp_path):
    folder = tmp_path / "run"
    done = llmexp(
        "train", *BASE, "optimizer=lowest", "train.max_steps=2", "checkpoint.every=1",
        f"hydra.run.dir={folder}", cwd=faulty,
    )  # fmt: skip
    assert done.code == 0, done.err
    saved = load_file(folder / "checkpoints/step_00000001/optimizer.safetensors")
    assert any(t.isinf().any() for name, t in saved.items() if name.endswith("low"))


@given(
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    value=st.sampled_from([math.nan, math.inf, -math.inf, "largest"]),
    kind=st.sampled_from(["parameter", "buffer", "cache", "ema", "state", "own state", "none"]),
    data=st.data(),
)
@settings(max_examples=60)
def test_a_snapshot_names_what_is_not_finite(dtype, sizes, value, kind, data):
    """To the last element, also where the norm of finite values overflows; infinities of a buffer,
    such as a mask of attention has, and of a state of an optimizer of the user's, are none."""
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.randn(sizes, dtype=torch.float64).to(dtype))
    model.register_buffer("mask", torch.zeros(sizes, dtype=dtype))
    model.register_buffer("cache", torch.zeros(sizes, dtype=dtype), persistent=False)
    average = {"weight": model.weight.detach().clone()}
    optimizer = torch.optim.AdamW([model.weight])
    state = optimizer.state[model.weight]["low"] = torch.zeros(sizes, dtype=dtype)
    if kind == "own state":
        optimizer.llmexp_traits = Traits("own", (), False, True, True, 1.0)
    tensors = {"parameter": model.weight, "buffer": model.mask, "cache": model.cache}
    tensors |= {"ema": average["weight"], "state": state, "own state": state}
    held = tensors.get(kind)
    if held is not None:
        number = torch.finfo(dtype).max if value == "largest" else value
        place = data.draw(st.integers(0, held.numel() - 1))
        with torch.no_grad():
            held.view(-1)[place] = number
            if value == "largest":
                held.fill_(number)
    pieces = saving.snapshot(model, [optimizer], 0, 1, False, average)
    wrong = held is not None and value != "largest"
    wrong = wrong and not (kind in ("buffer", "cache", "own state") and math.isinf(value))
    names = {"parameter": "model weight", "buffer": "model mask", "ema": "ema weight"}
    names |= {"cache": "model cache"} | dict.fromkeys(
        ("state", "own state"), "optimizer 0/weight/low"
    )
    assert pieces.bad == ([names[kind]] if wrong else [])
