"""`llmexp verify resume` and `llmexp verify determinism`: they pass on a run that is really killed,
and on one that is made twice, and find in its step what was lost, or is otherwise."""

import dataclasses
import json
import os
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmexp.checkpoint import hashes
from llmexp.config.convert import build, with_knobs
from llmexp.config.targets import locate
from llmexp.config.values import ConfigError
from llmexp.folders import rundir
from llmexp.verify import determinism, record, resume, runs
from llmexp.verify.determinism import Remains, same_bits
from llmexp.verify.resume import Kill
from tests.conftest import ROOT, TINY, Result, environment, llmexp
from tests.tools import amend, cut_after

STEPS = 6
TWO = "parallelism.nproc_per_node=2"
RUN = [
    *TINY, "data=synthetic", "data.n_tokens=5000", "train.eval_tokens=100", "precision=fp16",
    "batch.micro_batch_size=4", "batch.gradient_accumulation_steps=2", "model.dropout=0.1",
    "hydra.run.dir=proof",
]  # fmt: skip

# Hooks: a disk so slow that a save can be met; what a resume may lose, which is honest until its
# process starts in the middle of the run; what a run may do otherwise from its third step on.
PLANT = """
import os
import random
import time
import torch
from llmexp.train import state

started = []


def resumed(event, context):
    if event != "step_start" or started:
        return False
    started.append(context.step)
    return context.step > 1


def slow_disk(event, context, fsync=os.fsync):
    os.fsync = lambda file: (time.sleep(0.04), fsync(file))[1]


def rng(event, context):
    if resumed(event, context):
        state.seed_step = lambda *known: torch.manual_seed(os.getpid())


def moments(event, context):
    if resumed(event, context):
        for optimizer in context.optimizers:
            optimizer.state.clear()


def noise(event, context):
    # A module adds noise that no seed fixes, by an operation that torch has no other kernel for.
    if event == "step_start" and context.step == 3:
        mlp = context.model.blocks[1].mlp
        quiet = mlp.forward

        def forward(h_btd):
            drawn = torch.tensor([float.fromhex("0x" + os.urandom(2).hex())])
            offset = torch.zeros(2).put_(torch.tensor([1]), drawn)
            return quiet(h_btd) * (1 + offset.sum())

        mlp.forward = forward


def push(event, context):
    if (event, context.step) == ("step_start", 3):
        with torch.no_grad():
            context.model.blocks[1].mlp.down_proj.weight[0, 0] += 0.5


def shuffled(event, context):
    pass
"""
# In place as soon as the worker looks up its hooks, before the first window is read.
ORDER = """
import dataclasses, os
from llmexp.train import windows

sampler_of = windows.sampler_of
windows.sampler_of = lambda *given: dataclasses.replace(sampler_of(*given), seed=os.getpid())
"""


def prove(what: str, cwd: Path, *arguments: str, steps: int = STEPS) -> Result:
    (cwd / "plant.py").write_text(PLANT)
    words = [*RUN, "--allow", "plant", f"--steps={steps}", *arguments]
    return llmexp("verify", what, *words, cwd=cwd)


def checks_of(result: Result) -> dict[str, dict[str, Any]]:
    return {check["what"]: check for check in result.json("verify.json")["checks"]}


def failed(found: list[Any]) -> dict[str, str]:
    return {check.what: check.note for check in found if check.passed is False}


@pytest.fixture(scope="module")
def proof(tmp_path_factory: pytest.TempPathFactory) -> Result:
    result = prove("resume", tmp_path_factory.mktemp("resume"), "hooks=[plant.slow_disk]")
    assert result.code == 0, result.out + result.err
    return result


def test_a_run_with_dropout_and_fp16_is_killed_and_ends_the_same(proof):
    found = checks_of(proof)
    assert proof.json("verify.json")["passed"]
    assert all(check["passed"] for check in found.values()), found
    assert found["killed with SIGKILL"]["found"] >= 3
    assert "in the save of step" in found["killed with SIGKILL"]["note"]
    resumed = found["resumed from its newest checkpoint, one after step 0"]
    assert re.search("step [1-9]", resumed["note"])
    # It has not only compared two runs that nobody touched: its worker came back, and recorded each
    # step once.
    assert "resumed from step_" in (proof.folder / "broken" / "train.log").read_text()
    for run in ("unbroken", "broken"):
        records = (proof.folder / run / "verify" / "rank-0.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in records] == [*range(STEPS + 1)]

    # Each quantity is compared in full.
    path = proof.folder / "broken" / "checkpoints" / f"step_{STEPS:08d}" / "state.pt"
    groups = torch.load(path, weights_only=True)["optimizers"][0]["groups"]
    parameters = sum(len(group["params"]) for group in groups)
    for what, count in {
        "parameters at the end": parameters,
        "parameters after each step, each rank": parameters * (STEPS + 1),
        "moments at the end": 3 * parameters,  # exp_avg, exp_avg_sq, step
        "moments after each step, each rank": 3 * parameters * STEPS,  # none before the first
        "RNG after each step, each rank": 3 * STEPS,  # torch, Python, NumPy
        "loss scaler: its state, and the scale in each row": 2 + STEPS,
        "schedule: the learning rate in each row": STEPS,
        "metrics rows: each step once": STEPS,
        "position: the data and the tokens of each row": 3 * STEPS,
    }.items():
        assert found[what]["found"].split()[2] == str(count), what


def test_the_same_run_twice_is_the_same(tmp_path):
    result = prove("determinism", tmp_path)
    assert result.code == 0, result.out + result.err
    found = checks_of(result)
    assert all(check["passed"] for check in found.values()), found
    assert f"0 of {3 * STEPS} differ" in found["RNG after each step, each rank"]["found"]
    assert determinism.NO_TWIN not in result.out


@pytest.fixture
def train_with(proof, tmp_path, monkeypatch):
    """Train the run in a folder, one that is there or a new one, with another of the hooks."""

    def train(path: Path, hook: str, plant: str = PLANT) -> None:
        (tmp_path / "plant.py").write_text(plant)
        config = build(rundir.read_config(proof.folder / "unbroken"))
        config = dataclasses.replace(config, hooks=[*config.hooks, f"plant.{hook}"])
        places = f"{ROOT}{os.pathsep}{tmp_path}"
        for name, value in environment(PYTHONPATH=places, LLMEXP_ALLOW="plant").items():
            monkeypatch.setenv(name, value)
        runs.train_recorded(path, config)

    return train


PARAMETERS = "parameters after each step, each rank"


@pytest.mark.parametrize("lost", ["rng", "moments"])
def test_what_a_resume_loses_is_found(proof, tmp_path, train_with, lost):
    unbroken = proof.folder / "unbroken"
    step = rundir.saved_steps(unbroken)[0]
    path = cut_after(Result(0, "", "", unbroken), tmp_path, step)
    train_with(path, lost)
    found = failed(resume.compare_ends(unbroken, path))
    first = f"first: step {step + 1}, rank 0"
    assert first in found[PARAMETERS], found
    assert {"parameters at the end", "metrics rows, but for times and memory"} <= found.keys()
    rng = found.get("RNG after each step, each rank", "")
    assert (f"{first}, torch" in rng, rng == "") == (lost == "rng", lost != "rng")
    others = ("schedule", "position", "loss scaler", "metrics rows: each step")
    assert not any(what.startswith(others) for what in found)


@pytest.mark.parametrize(
    ("hook", "blamed"),
    [
        ("noise", {"loss and gradient norm of each step": "3, ", PARAMETERS: "3, rank 0, "}),
        ("push", {PARAMETERS: "3, rank 0, "}),
        ("shuffled", {"the data of each step": "1, data_digest"}),
    ],
)
def test_what_another_run_does_otherwise_is_found_in_its_step(
    proof, tmp_path, train_with, hook, blamed
):
    train_with(tmp_path / "other", hook, ORDER + PLANT if hook == "shuffled" else PLANT)
    pair = Remains(proof.folder / "unbroken"), Remains(tmp_path / "other")
    found = failed(same_bits(determinism.COLUMNS, *pair))
    for what, first in blamed.items():
        assert found[what].startswith(f"first: step {first}")
    assert ("the data of each step" in found) == (hook == "shuffled")


def rescale(lines: list[str]) -> None:
    row = json.loads(lines[3])
    lines[3] = json.dumps({**row, "lr": row["lr"] * (1 + 2**-52)}) + "\n"


def flip(run: Path) -> None:
    file = run / "checkpoints" / f"step_{STEPS:08d}" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    # not damage: a run that has saved another number
    amend(file.parent / "manifest.json", files={file.name: hashes.fingerprint(file)})


@pytest.mark.parametrize(
    ("file", "change", "blamed"),
    [
        ("metrics.jsonl", lambda lines: lines.insert(3, lines[2]), "step 3: 2 rows"),
        ("metrics.jsonl", lambda lines: lines.pop(2), "step 3: 0 rows"),
        ("metrics.jsonl", lambda lines: lines.reverse(), "their order"),
        ("metrics.jsonl", rescale, "step 4, lr"),
        ("verify/rank-0.jsonl", lambda lines: lines.pop(), f"step {STEPS}, rank 0, "),
        (None, flip, "first: "),
        (None, lambda run: shutil.rmtree(run / "checkpoints"), "none was saved"),
    ],
)
def test_the_smallest_difference_between_two_folders_is_found(
    proof, tmp_path, file, change, blamed
):
    run = tmp_path / "run"
    shutil.copytree(proof.folder / "broken", run)
    if file is None:
        change(run)
    else:
        lines = (run / file).read_text().splitlines(keepends=True)
        change(lines)
        (run / file).write_text("".join(lines))
    found = failed(resume.compare_ends(proof.folder / "unbroken", run))
    assert any(blamed in note for note in found.values()), found


ROW = st.fixed_dictionaries(
    {"train/loss": st.floats(), "lr": st.floats(), "skipped": st.booleans()}
)


@given(st.lists(ROW, min_size=1, max_size=5), st.data())
def test_any_figure_that_is_changed_or_lost_is_named(rows, data):
    def found(*keys: str) -> tuple[Any, ...]:
        """What comparing the rows of a and b finds."""
        (check,) = same_bits([("rows", ("rows", *keys))], *runs)
        return check.passed, check.found, check.note

    a = [{"step": n, **row, "step_time": 1.0} for n, row in enumerate(rows, 1)]
    b = [{**row, "step_time": 2.0} for row in a]  # times are no difference
    runs = [object.__new__(Remains) for _ in range(2)]
    runs[0].read_rows, runs[1].read_rows = a, b
    count = 4 * len(rows)  # step and three figures a row
    assert found() == (True, f"0 of {count} differ", "")
    at = data.draw(st.sampled_from(range(len(rows))))
    key = data.draw(st.sampled_from(sorted(rows[0])))
    b[at][key] = "another"
    if data.draw(st.booleans()):
        del b[at][key]
    assert found() == (False, f"1 of {count} differ", f"first: step {at + 1}, {key}")
    assert found("none of these") == (False, "0 of 0 differ", "")


def test_a_digest_is_one_of_bits():
    def of_bits(bits: int) -> torch.Tensor:
        return torch.frombuffer(bytearray(struct.pack("<I", bits)), dtype=torch.float32)

    different = [
        torch.tensor([0.0]), torch.tensor([-0.0]), torch.tensor(0.0), torch.tensor([0]),
        torch.tensor([[0.0]]), of_bits(0x7FC00000), of_bits(0x7FC00001), torch.empty(0),
        torch.zeros(1, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.bfloat16),
    ]  # fmt: skip
    assert len({record.digest(value) for value in different}) == len(different)
    turned = torch.arange(12.0).reshape(3, 4).T  # strides are no bits
    assert record.digest(turned) == record.digest(turned.contiguous()) != record.digest(turned.T)


MISSED = Kill("save", 6, None, saved=3, starts=2)
FIRST = Kill("step", 1, None, starts=1)
RESUMED = Kill("step", 5, None, saved=3, starts=2)
LONE, BESIDE = (Kill("rank", 6, None, 1, alone=a, saved=3, starts=1) for a in (True, False))
ANEW = "resumed from its newest checkpoint, one after step 0"
OTHERS = "the other ranks end by themselves when one is killed"


@pytest.mark.parametrize(
    ("kills", "starts", "fails", "unseen"),
    [
        ([], [1], ["killed with SIGKILL"], ["step", "rank", "save"]),
        ([FIRST, Kill("save", 1, 1, starts=2)], [1, 1, 1], [ANEW], ["rank"]),
        ([FIRST, RESUMED], [1, 1, 4], [], ["rank", "save"]),
        # the checkpoint of step 3 was there, and was not taken
        *(
            ([FIRST, RESUMED], starts, [ANEW], ["rank", "save"])
            for starts in ([1, 1, 1], [1, 1, 3], [1, 1])
        ),
        # a kill that missed its save is no hit
        ([RESUMED, MISSED], [1, 1, 4], [], ["rank", "save"]),
        ([LONE], [1, 4], [], ["step", "save"]),
        ([LONE, BESIDE, RESUMED], [1, 4, 4], [OTHERS], ["save"]),
    ],
)
def test_without_a_kill_a_resume_or_the_end_of_the_others_it_fails(kills, starts, fails, unseen):
    """Runs that nobody touched, or that began anew each time, are equal whatever a resume loses."""
    found = resume.hits(kills, ("step", "rank", "save"), starts)
    assert [*failed(found)] == fails
    missing = [c.what for c in found if c.passed is None]
    assert missing == [f"no kill of this kind: {kind}" for kind in unseen]


def test_the_recorder_opens_nothing_else_to_a_config(tmp_path, monkeypatch):
    monkeypatch.delenv("LLMEXP_ALLOW", raising=False)
    for name, value in record.recorder_environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    assert locate("hooks", record.HOOK) is record.record
    others = {"hooks": "llmexp.verify.runs.train_folder", "model._target_": record.HOOK}
    for key, dotted in others.items():
        with pytest.raises(ConfigError, match="is outside the allowed packages"):
            locate(key, dotted)


def test_several_hosts_are_refused(proof):
    config = build(rundir.read_config(proof.folder / "unbroken"))
    with pytest.raises(ConfigError, match=r"^parallelism\.nnodes=2: .*=1$"):
        resume.plan_to_break(with_knobs(config, parallelism={"nnodes": 2}), 6, shrink=False)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_two_ranks_of_which_one_is_killed_alone(tmp_path, layout):
    result = prove("resume", tmp_path, f"parallelism={layout}", TWO, steps=16)
    assert result.code == 0, result.out + result.err
    found = checks_of(result)
    assert " only; the others ended by themselves)" in found["killed with SIGKILL"]["note"]
    assert found[OTHERS]["found"] == "1 of 1 times"
    assert f"of {3 * 2 * 16} differ" in found["RNG after each step, each rank"]["found"]


@pytest.mark.slow
def test_noise_fails_the_command_which_says_what_names_the_operation(tmp_path):
    result = prove("determinism", tmp_path, "hooks=[plant.noise]")
    assert result.code == 1, result.out + result.err
    assert determinism.NO_TWIN in result.out
    strict = ["train.deterministic=true", "hydra.run.dir=strict"]
    again = prove("determinism", tmp_path, "hooks=[plant.noise]", *strict)
    assert again.code == 2
    assert "put_" in again.err


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        ["parallelism=ddp", TWO],
        ["parallelism=fsdp", TWO, "parallelism.activation_checkpointing=full"],
        ["parallelism=tp", TWO, "precision=fp32"],
        ["train.compile=true"],
    ],
)
def test_any_layout_is_the_same_twice(tmp_path, layout):
    result = prove("determinism", tmp_path, *layout)
    assert result.code == 0, result.out + result.err
