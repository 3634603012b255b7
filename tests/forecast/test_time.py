"""Time and cost that are known before a run starts; tests/refusals/forecast.yaml has what cannot
be planned."""

from functools import partial
from types import SimpleNamespace as Namespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmexp.__main__ import run
from llmexp.forecast.duration import Times, cost_of, estimated, over_slots, part_counts
from llmexp.forecast.duration import cost_sections as sections
from llmexp.models.gpt2 import GPT2
from llmexp.models.recompute import recomputed_share
from llmexp.modes import calibration
from llmexp.run import Run
from llmexp.system.devices import device_named
from llmexp.train.feature import Features
from llmexp.train.loop import due_after
from tests.conftest import TINY
from tests.tools import printed

EVERY = st.none() | st.integers(1, 9)
DATA = ["data=synthetic", "data.n_tokens=5000"]


def config_of(tokens=None, row=10, last=True, initial=False, **every: int | None) -> Namespace:
    given = Namespace(log_every=row, stop_step=None, eval_every_tokens=tokens, tasks=[])
    for name in ("eval_every", "tasks_every", "sample_every"):
        setattr(given, name, every.get(name))
    saved = {name: every.get(name) for name in ("every", "keep_every")}
    return Namespace(train=given, checkpoint=Namespace(**saved, last=last, save_initial=initial))


@given(
    steps=st.integers(1, 40), every=st.tuples(*[EVERY] * 3, st.integers(1, 9)), tokens=EVERY,
    last=st.booleans(), first=st.integers(0, 40),
)  # fmt: skip
def test_what_comes_between_steps_is_counted_as_the_loop_does(steps, every, tokens, last, first):
    first %= steps  # of a fork
    evaluation, save, keep, row = every
    config = config_of(tokens, row, last, True, eval_every=evaluation, every=save, keep_every=keep)
    sizes = {"tokens_at": lambda step: 3 * step, "stages": ()}
    planned = Namespace(max_steps=steps, first_step=first, **sizes)
    planned.evaluations = partial(Run.evaluations, planned)
    due = [
        due_after(step, step == steps, config, planned, False, Features())
        for step in range(first + 1, steps + 1)
    ]
    found = part_counts(planned, config)
    assert found["step"] == steps - first
    assert found["evaluation"] == sum(d.evaluation for d in due)
    if tokens:  # the steps after which another multiple is reached
        reached = {step for step in range(first + 1, steps) if 3 * step % tokens < 3}
        assert found["evaluation"] == len(reached) + 1
    assert found["save"] == (first == 0) + sum(d.checkpoint for d in due)
    assert found["row"] == sum(step % row == 0 for step in range(first + 1, steps + 1))


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_recomputation_costs_what_is_computed_again(dropout):
    """Counted by hand: the forward pass of the blocks; without dropout nobody needs the output of
    the last product of each, which torch does not compute again."""
    layers, width, inner, vocab, length = 3, 32, 80, 96, 48
    attention = 4 * length * width  # of the scores and the values
    products = 2 * (4 * width**2 + 2 * width * inner)
    step = layers * 3 * (products + attention) + 6 * vocab * width
    last = 0 if dropout else 2 * width * inner

    def make() -> GPT2:
        return GPT2(vocab, length, layers, 4, width, inner, dropout)

    assert make().flops_per_token(length) == step
    found = recomputed_share(make, "full", length)
    assert found == pytest.approx(layers * (products + attention - last) / step, rel=1e-12)
    assert recomputed_share(make, "selective", length) == 0


def test_an_estimate_is_arithmetic(words):
    planned = Namespace(
        flops_per_token=6e9, world_size=8, max_steps=1000, first_step=0, tokens_per_step=2**19,
        gradient_accumulation_steps=4, eval_sequences=10, sequence_length=1024, ramp=None,
    )  # fmt: skip
    planned.evaluations = partial(Run.evaluations, planned)
    times = estimated(planned, device_named("h200"), "bf16", 0.4)
    rate = 8 * 0.4 * 989e12 / 6e9  # tokens a second
    assert times.step_s == pytest.approx(2**19 / rate)
    assert times.evaluation_s == pytest.approx(10 * 1024 / 3 / rate)
    assert estimated(planned, device_named("t4"), "fp64", 0.4) is None
    again = estimated(planned, device_named("h200"), "bf16", 0.4, 0.25)
    assert again.step_s == pytest.approx(1.25 * times.step_s)
    assert again.evaluation_s == times.evaluation_s
    # each micro-batch waits for 64 GB/s
    moved = estimated(planned, device_named("h200"), "bf16", 0.4, 0.0, 32 * 10**9)
    assert moved.step_s == pytest.approx(times.step_s + 4 * 0.5)
    config = config_of(eval_every=100)
    cost = cost_of(planned, config, Times(step_s=2.0, start_s=7.0, evaluation_s=3.0), 8, 2.5)
    assert cost.duration_s == 7 + 1000 * 2 + 10 * 3
    assert cost.gpu_hours == pytest.approx(8 * 2037 / 3600)
    assert cost.money == pytest.approx(2.5 * 8 * 2037 / 3600)
    assert cost.tokens_per_sec == 2**18
    words("forecast/time", dict(sections(cost, ""))["time"], "steps of one size")
    # 900 steps of a quarter of a batch, then 100 of a whole one
    stages = {"ramp": "{0: 128, 9: 512}", "real_batch_size": 512}
    stages["sequences_at"] = lambda step: 128 * min(step, 900) + 512 * max(0, step - 900)
    vars(planned).update(stages)
    cost = cost_of(planned, config, Times(step_s=2.0, start_s=7.0, evaluation_s=3.0), 8, 2.5)
    assert cost.duration_s == pytest.approx(7 + 900 * 0.5 + 100 * 2 + 10 * 3)
    words("forecast/time", dict(sections(cost, ""))["time"], "a ramp")
    planned.ramp = config.train.eval_every = None
    brief = cost_of(planned, config, Times(step_s=1e-5, evaluation_s=0.01), 8, 2.5)
    words("forecast/time", dict(sections(brief, ""))["time"], "very short")


def test_points_start_as_slots_become_free():
    assert over_slots([4, 1, 1, 1], 1) == 7
    assert over_slots([4, 1, 1, 1, 3], 2) == 6


@pytest.mark.usefixtures("forking")
def test_steps_are_measured_and_leave_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    points = ["train.seed=1,2", "batch.micro_batch_size=2", "train.max_steps=70"]
    assert run(["plan", "-m", "--measure", "--json", *TINY, *DATA, *points]) == 0
    found = printed("plan", capsys.readouterr().out)
    one, other = (point["time"] for point in found["points"])
    assert one == other  # of one kind, and measured once
    assert 3 <= one["timed_steps"] <= 48
    kinds = ("start", "step", "row", "evaluation", "save", "end")
    assert all(one[f"{kind}_s"] > 0 for kind in kinds)
    parts = sum(one[f"{kind}_count"] * one[f"{kind}_s"] for kind in ("row", "evaluation", "save"))
    whole = 70 * one["step_s"] + one["start_s"] + one["first_s"] + one["end_s"] + parts
    assert one["duration_s"] == pytest.approx(whole)
    assert one["tokens_per_sec"] == pytest.approx(2 * 12 / one["step_s"])
    assert found["total"]["duration_s"] == pytest.approx(
        2 * whole + one["import_s"] + one["start_s"]
    )
    assert found["total"]["slots"] == 1
    assert not list(tmp_path.glob("llmexp-steps-*"))
    assert run(["plan", "--measure", *TINY, *DATA, "plan.device=l4"]) == 2
    assert "--measure times the device of this machine" in capsys.readouterr().err


def test_steps_of_a_fork_are_timed_and_all_ranks_stop_together(monkeypatch):
    began, signalled = [], []
    monkeypatch.setattr(calibration, "finish_step", lambda loop: None)
    monkeypatch.setattr(calibration, "ENOUGH_S", 1e9)
    monkeypatch.setattr(calibration.mesh, "any_rank", lambda mesh, *own: [bool(signalled), own[1]])

    def take_step(loop, windows, due):
        loop.progress.step += 1
        return None, None

    monkeypatch.setattr(calibration, "take_step", take_step)
    for last, taken in ((63, 3), (1000, calibration.MOST)):
        loop = Namespace(
            setup=Namespace(model=Namespace(train=lambda: None)), mesh=None, windows=began.append,
            run=Namespace(max_steps=last), progress=Namespace(step=60),
        )  # fmt: skip
        at, _, stopped = calibration._steps(loop)
        assert (len(at) - 1, stopped) == (taken, False)
    assert began == [60, 60]
    signalled.append("another rank")
    assert calibration.run(loop, {"all": False}) is None


def test_a_sweep_is_planned_for_a_device(tmp_path, capsys, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    points = ["train.max_steps=2,3", "plan.device=l4", "plan.price_per_gpu_hour=2"]
    points += ["model.n_layers=1"]
    assert run(["plan", "-m", *TINY, *DATA, *points, "sweep.max_parallel=2"]) == 0
    words.hidden |= {r"\d+\.\d+(e\+\d+)?": "N", r"\b\d+s\b": "N s"}
    words("forecast/sweep", capsys.readouterr().out, "plan -m train.max_steps=2,3 plan.device=l4")


def test_each_arithmetic_has_its_own_rate(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny = [option for option in TINY if not option.startswith("precision")]
    plan = ["plan", *tiny, *DATA, "model.n_layers=1", "train.max_steps=2"]
    peaks = {"fp32": 30.3, "tf32": 60, "bf16": 121}
    assert run([*plan, "-m", "--json", f"precision={','.join(peaks)}", "plan.device=l4"]) == 0
    found = printed("plan", capsys.readouterr().out)
    points = found["points"]
    assert all(p["fits"] for p in points)
    assert found["total"]["flops"] == sum(p["total_flops"] for p in points)
    rates = {p["precision"]: p["total_flops"] / 2 / p["time"]["step_s"] for p in points}
    assert rates == pytest.approx({kind: 0.3e12 * peak for kind, peak in peaks.items()})
