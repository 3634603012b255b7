"""Rates that are none and values that are not finite: found at the step that has them, and never
saved. At the command line, with parts of one's own."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from llmexp.__main__ import run
from llmexp.checkpoint import saving
from llmexp.optim.states import Traits
from tests.conftest import TINY, Result
from tests.tools import exact
from tests.train.resumed import ends

BASE = [
    *TINY, "--allow=own", "data=synthetic", "data.n_tokens=3000", "train.log_every=1",
    "batch.micro_batch_size=2",
]  # fmt: skip
RATE = ["~schedule", "+schedule={_target_: own.notfinite.rate}"]
TURNS = "hooks=[own.notfinite.turns]"
NO_RATES = ("nan", "inf", "-inf", "-1e-9", "None", "text")


def optimizer(name: str, **more: object) -> list[str]:
    given = "".join(f", {key}: {value}" for key, value in more.items())
    return ["~optimizer", f"+optimizer={{_target_: own.notfinite.{name}, lr: 1e-3{given}}}"]


def failed(folder: Path, *overrides: str) -> Result:
    """A run that fails, into folder/run."""
    done = ends(folder, "train", *BASE, *overrides, "hydra.run.dir=run", code=3)
    status = done.json("status.json")
    assert (status["state"], status["exit_code"]) == ("failed", 3)
    assert all(math.isfinite(row["train/loss"]) for row in done.rows())
    return done


def are_finite(folder: Path) -> list[int]:
    """The steps of the checkpoints, of which each tensor is finite."""
    for file in folder.glob("checkpoints/step_*/*.safetensors"):
        assert all(bool(t.isfinite().all()) for t in load_file(file).values()), file
    return sorted(int(path.name[5:]) for path in folder.glob("checkpoints/step_*"))


@pytest.mark.parametrize(
    ("value", "bad", "steps"),
    [*((value, 57, 200) for value in (*NO_RATES, "0.0", "7.5")), ("nan", 0, 1), ("nan", 255, 256)],
)
def test_a_schedule_is_looked_at_before_a_run_begins(
    tmp_path, monkeypatch, capsys, value, bad, steps
):
    """At each of up to 256 updates."""
    monkeypatch.chdir(tmp_path)
    rate = [*RATE, f"+schedule.bad={bad}", f"+schedule.value='{value}'"]
    code = run(["plan", *BASE, *rate, f"train.max_steps={steps}"])
    text = capsys.readouterr().err
    assert code == (2 if value in NO_RATES else 0), text
    if code:
        assert "schedule._target_=own.notfinite.rate: returned " in text
        assert f"for update {bad};" in text
        assert "own/notfinite.py:" in text


@settings(max_examples=2, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    bad=st.integers(0, 5),
    value=st.sampled_from(NO_RATES),
    every=st.integers(1, 3),
    late=st.booleans(),
    ranks=st.just(1),
)
@example(bad=3, value="nan", every=2, late=True, ranks=2)
def test_a_step_without_a_rate_is_refused_and_goes_on_when_it_is_mended(
    runs, tmp_path_factory, bad, value, every, late, ranks
):
    """By its name, before its update; what was saved before it is good, and goes on as a run
    without the fault."""
    folder = tmp_path_factory.mktemp("rate")
    several = ["parallelism=ddp", f"parallelism.nproc_per_node={ranks}"] * (ranks > 1)
    done = failed(
        folder, *RATE, f"+schedule.bad={bad}", f"+schedule.value='{value}'",
        "+schedule.always=false", TURNS, "train.max_steps=6", f"checkpoint.every={every}",
        f"checkpoint.async={late}", *several,
    )  # fmt: skip
    last = done.err.splitlines()[-1]
    assert f"step {bad + 1} is refused: schedule._target_=own.notfinite.rate: returned " in last
    assert "llmexp resume" in last or bad < every
    assert "fork.run" not in last
    saved = are_finite(done.folder)
    assert saved[-1:] == [bad // every * every][: bad // every]
    assert [row["step"] for row in done.rows()] == [*range(1, bad + 1)]
    assert all("lr" in row for row in done.rows())
    ends(folder, "resume", "run", "hooks=[]", "--allow=own")
    if ranks == 1:
        good = runs(*BASE[len(TINY) :], *RATE, "train.max_steps=6")
        assert exact(done) == exact(good)


@pytest.mark.parametrize(
    ("key", "value", "every"),
    [
        ("initial_lr", "nan", 1),
        ("initial_lr", "-1.0", 9),
        ("weight_decay", "inf", 1),
        ("weight_decay", "nan", 9),
    ],
)
def test_a_rate_that_a_hook_changes_is_refused_and_not_saved(tmp_path, key, value, every):
    hook = f"hooks=[{{_target_: own.notfinite.base, at: 2, key: {key}, value: '{value}'}}]"
    done = failed(tmp_path, hook, "train.max_steps=5", f"checkpoint.every={every}")
    what = "what step 2 has left is not saved" if every == 1 else "step 3 is refused"
    name = "base rate" if key == "initial_lr" else "weight decay"
    assert f"{what}: optimizer: the {name}" in done.err
    assert f"is {value}" in done.err
    assert are_finite(done.folder) == [1][: every == 1]


# The way in which a run saves, the step, and what is not finite then.
PATHS = {
    "periodic": (["checkpoint.every=1"], 2, "nan", "exp_avg"),
    "late": (["checkpoint.every=1", "checkpoint.async=true"], 3, "inf", "weights"),
    "by time": (["checkpoint.every_minutes=1e-9"], 2, "-inf", "weights"),
    "stop": (["train.stop_step=3", "data.val_ratio=0"], 3, "nan", "exp_avg_sq"),
    "last": (["train.max_steps=1", "data.val_ratio=0"], 1, "nan", "weights"),
    "unsaved": (["train.max_steps=2", "data.val_ratio=0", "checkpoint.last=false"], 2, "nan",
                "weights"),
    "shared": (["checkpoint.every=1", "parallelism=fsdp", "parallelism.nproc_per_node=2"], 2,
               "nan", "exp_avg"),
}  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_what_is_not_finite_is_never_saved(tmp_path, path):
    """By none of the ways in which a run saves, although loss and norm of the step were fine: the
    newest checkpoint is that of the last good step. Which tensors: the snapshot's test below."""
    more, at, value, where = PATHS[path]
    bursts = optimizer("bursts", at=at, value=f"'{value}'", where=where)
    done = failed(tmp_path, *bursts, TURNS, "train.max_steps=4", *more)
    assert f"what step {at} has left is not saved: values that are not finite: " in done.err
    saved = are_finite(done.folder)
    periodic = at > 1 and path in ("periodic", "late", "by time", "shared")
    assert saved[-1:] == [at - 1] * periodic
    if saved:
        assert f"the last checkpoint is step_{saved[-1]:08d}" in done.err
        assert "fork.run=" in done.err


def test_first_weights_that_are_not_finite_are_not_saved(tmp_path):
    done = failed(tmp_path, *optimizer("spoils"), "checkpoint.save_initial=true")
    assert "what step 0 has left is not saved" in done.err
    assert are_finite(done.folder) == []


def test_infinities_in_a_state_of_the_users_are_saved(runs):
    done = runs(*BASE[len(TINY) :], *optimizer("lowest"), "train.max_steps=2", "checkpoint.every=1")
    saved = load_file(done.checkpoint(1) / "optimizer.safetensors")
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
    pieces = saving.snapshot(model, [optimizer], 0, 1, False, {"ema": average})
    wrong = held is not None and value != "largest"
    wrong = wrong and not (kind in ("buffer", "cache", "own state") and math.isinf(value))
    names = {"parameter": "model weight", "buffer": "model mask", "ema": "ema weight"}
    names |= {"cache": "model cache"} | dict.fromkeys(
        ("state", "own state"), "optimizer 0/weight/low"
    )
    assert pieces.bad == ([names[kind]] if wrong else [])
