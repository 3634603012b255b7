"""`llmexp verify resume`: it passes on runs that are really killed, and finds what a resume has
lost."""

import dataclasses
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
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
from llmexp.verify import record, resume, runs
from llmexp.verify.determinism import Remains, same_bits
from llmexp.verify.resume import Kill
from tests.conftest import ROOT, TINY, Result, environment, llmexp
from tests.tools import amend

STEPS = 6
RUN = [
    *TINY, "data=synthetic", "data.n_tokens=5000", "train.eval_tokens=100", "precision=fp16",
    "batch.micro_batch_size=4", "batch.gradient_accumulation_steps=2", "model.dropout=0.1",
    "hydra.run.dir=proof", f"--steps={STEPS}",
]  # fmt: skip

# A disk so slow that a save can be met, and what a resume may lose: hooks that are honest until
# their process starts in the middle of the run.
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
"""


def prove(cwd: Path, *arguments: str, **env: str) -> Result:
    (cwd / "plant.py").write_text(PLANT)
    return llmexp("verify", "resume", *RUN, *arguments, cwd=cwd, **env)


def checks(result: Result) -> dict[str, dict[str, Any]]:
    return {check["what"]: check for check in result.json("verify.json")["checks"]}


@pytest.fixture(scope="module")
def proof(tmp_path_factory: pytest.TempPathFactory) -> Result:
    result = prove(tmp_path_factory.mktemp("resume"), "--allow", "plant", "hooks=[plant.slow_disk]")
    assert result.code == 0, result.out + result.err
    return result


def steps_of(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_run_with_dropout_and_fp16_is_killed_and_ends_the_same(proof):
    found = checks(proof)
    assert all(check["passed"] for check in found.values()), found
    assert found["killed with SIGKILL"]["found"] >= 3
    resumed = found["resumed from its newest checkpoint, one after step 0"]
    assert re.search("step [1-9]", resumed["note"])
    assert "in the save of step" in found["killed with SIGKILL"]["note"]
    assert proof.json("verify.json")["passed"]
    # It has not only compared two runs that nobody touched: its worker came back, and recorded each
    # step once.
    assert "resumed from step_" in (proof.folder / "broken" / "train.log").read_text()
    for run in ("unbroken", "broken"):
        assert steps_of(proof.folder / run / "verify" / "rank-0.jsonl") == [*range(STEPS + 1)]


def test_each_quantity_is_compared_in_full(proof):
    path = proof.folder / "broken" / "checkpoints" / f"step_{STEPS:08d}" / "state.pt"
    groups = torch.load(path, weights_only=True)["optimizers"][0]["groups"]
    parameters = sum(len(group["params"]) for group in groups)
    figures = {what: check["found"] for what, check in checks(proof).items()}
    of = {what: int(found.split()[2]) for what, found in figures.items() if isinstance(found, str)}
    wanted = {
        "parameters at the end": parameters,
        "parameters after each step, each rank": parameters * (STEPS + 1),
        "moments at the end": 3 * parameters,  # exp_avg, exp_avg_sq, step
        # there are none before the first update
        "moments after each step, each rank": 3 * parameters * STEPS,
        "RNG after each step, each rank": 3 * STEPS,  # torch, Python, NumPy
        "loss scaler: its state, and the scale in each row": 2 + STEPS,
        "schedule: the learning rate in each row": STEPS,
        "metrics rows: each step once": STEPS,
        "position: the data and the tokens of each row": 3 * STEPS,
    }
    assert wanted.items() <= of.items()


def cut_copy(proof: Result, tmp_path: Path) -> Path:
    """The unbroken run as a kill after its first checkpoint would have left it."""
    path = tmp_path / "cut"
    shutil.copytree(proof.folder / "unbroken", path)
    for later in sorted((path / "checkpoints").glob("step_*"))[1:]:
        shutil.rmtree(later)
    rundir.write_status(path, "running")
    return path


def failed(found: list[Any]) -> dict[str, str]:
    return {check.what: check.note for check in found if check.passed is False}


@pytest.mark.parametrize("lost", ["rng", "moments"])
def test_what_a_resume_loses_is_found(proof, tmp_path, monkeypatch, lost):
    path = cut_copy(proof, tmp_path)
    (saved,) = (path / "checkpoints").glob("step_*")
    first = f"first: step {int(saved.name[5:]) + 1}, rank 0"  # the first step after the resume
    (tmp_path / "plant.py").write_text(PLANT)
    config = build(rundir.read_config(path))
    config = dataclasses.replace(config, hooks=[f"plant.{lost}", *config.hooks])
    places = f"{ROOT}{os.pathsep}{tmp_path}"
    for name, value in environment(PYTHONPATH=places, LLMEXP_ALLOW="plant").items():
        monkeypatch.setenv(name, value)
    runs.train_recorded(path, config)
    found = failed(resume.compare_ends(proof.folder / "unbroken", path))
    assert first in found["parameters after each step, each rank"], found
    assert {"parameters at the end", "metrics rows, but for times and memory"} <= found.keys()
    rng = found.get("RNG after each step, each rank", "")
    assert (f"{first}, torch" in rng, rng == "") == (lost == "rng", lost != "rng")
    others = ("schedule", "position", "loss scaler", "metrics rows: each step")
    assert not any(what.startswith(others) for what in found)


def rows(change: Callable[[list[str]], Any], name: str = "metrics.jsonl") -> Callable[[Path], None]:
    def tamper(run: Path) -> None:
        lines = (run / name).read_text().splitlines(keepends=True)
        change(lines)
        (run / name).write_text("".join(lines))

    return tamper


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
    ("tamper", "blamed"),
    [
        (rows(lambda lines: lines.insert(3, lines[2])), "step 3: 2 rows"),
        (rows(lambda lines: lines.pop(2)), "step 3: 0 rows"),
        (rows(lambda lines: lines.reverse()), "their order"),
        (rows(rescale), "step 4, lr"),
        (flip, "first: "),
        (rows(lambda lines: lines.pop(), "verify/rank-0.jsonl"), f"step {STEPS}, rank 0, "),
        (lambda run: shutil.rmtree(run / "checkpoints"), "none was saved"),
    ],
    ids=["row-twice", "row-lost", "order", "lr", "bit", "record-lost", "no-checkpoint"],
)
def test_the_smallest_difference_between_two_folders_is_found(proof, tmp_path, tamper, blamed):
    run = tmp_path / "run"
    shutil.copytree(proof.folder / "broken", run)
    assert failed(resume.compare_ends(proof.folder / "unbroken", run)) == {}
    tamper(run)
    found = failed(resume.compare_ends(proof.folder / "unbroken", run))
    assert any(blamed in note for note in found.values()), found


FIGURES = {"train/loss": st.floats(), "lr": st.floats(), "skipped": st.booleans()}
ROW = st.fixed_dictionaries(FIGURES)


def found_of(one: list[dict], other: list[dict], *keys: str) -> tuple[Any, ...]:
    """What comparing rows finds."""
    runs = []
    for rows in (one, other):
        runs.append(object.__new__(Remains))
        runs[-1].read_rows = rows
    (check,) = same_bits([("rows", ("rows", *keys))], *runs)
    return check.passed, check.found, check.note


@given(st.lists(ROW, min_size=1, max_size=5), st.data())
def test_any_figure_that_is_changed_or_lost_is_named(rows, data):
    a = [{"step": n, **row, "step_time": 1.0} for n, row in enumerate(rows, 1)]
    b = [{**row, "step_time": 2.0} for row in a]  # times are no difference
    count = 4 * len(rows)  # step and three figures a row
    assert found_of(a, b) == (True, f"0 of {count} differ", "")
    at = data.draw(st.sampled_from(range(len(rows))))
    key = data.draw(st.sampled_from(sorted(rows[0])))
    b[at][key] = "another"
    if data.draw(st.booleans()):
        del b[at][key]
    first = f"first: step {at + 1}, {key}"
    assert found_of(a, b) == (False, f"1 of {count} differ", first)
    assert found_of(a, b, "none of these") == (False, "0 of 0 differ", "")


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


MISSED, HIT, STEP = Kill("save", 4, None), Kill("save", 4, 3), Kill("step", 2, None)


@pytest.mark.parametrize(
    ("kills", "wanted", "unseen"),
    [
        ([MISSED, STEP], ["step", "save"], ["save"]),
        ([HIT, STEP], ["step", "save"], []),
        ([], ["step", "save"], ["step", "save"]),
        ([HIT, STEP], ["step", "rank", "save"], ["rank"]),
    ],
)
def test_a_kill_that_missed_its_save_is_no_hit(kills, wanted, unseen):
    found = [c.what for c in resume.hits(kills, tuple(wanted), []) if c.passed is None]
    assert found == [f"no kill of this kind: {kind}" for kind in unseen]
    assert (MISSED.hit, HIT.hit, STEP.hit) == (False, True, True)


FIRST = Kill("step", 1, None, starts=1)
RESUMED = Kill("step", 5, None, saved=3, starts=2)
LONE, BESIDE = (Kill("rank", 6, None, 1, alone=a, saved=3, starts=1) for a in (True, False))
ANEW = "resumed from its newest checkpoint, one after step 0"


@pytest.mark.parametrize(
    ("kills", "starts", "fails"),
    [
        ([], [1], "killed with SIGKILL"),
        ([FIRST, Kill("save", 1, 1, starts=2)], [1, 1, 1], ANEW),
        ([FIRST, RESUMED], [1, 1, 4], None),
        # the checkpoint of step 3 was there, and was not taken
        *(([FIRST, RESUMED], starts, ANEW) for starts in ([1, 1, 1], [1, 1, 3], [1, 1])),
        ([LONE], [1, 4], None),
        (
            [LONE, BESIDE, RESUMED],
            [1, 4, 4],
            "the other ranks end by themselves when one is killed",
        ),
    ],
)
def test_without_a_kill_a_resume_or_the_end_of_the_others_it_fails(kills, starts, fails):
    """Runs that nobody touched, or that began anew each time, are equal whatever a resume loses."""
    found = failed(resume.hits(kills, ("step", "rank", "save"), starts))
    assert [*found] == ([] if fails is None else [fails])


def test_ctrl_c_is_not_lost_in_a_kill(tmp_path):
    """The worker is killed as planned, and the verification ends all the same."""
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    process = subprocess.Popen(command, process_group=0, text=True)

    def strike() -> None:
        with runs.ended_with_us(process):
            os.kill(os.getpid(), signal.SIGINT)
            resume._kill_all(process, [process.pid])

    with pytest.raises(KeyboardInterrupt):
        strike()
    assert process.poll() is not None


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
    result = prove(tmp_path, f"parallelism={layout}", "parallelism.nproc_per_node=2", "--steps=16")
    assert result.code == 0, result.out + result.err
    found = checks(result)
    assert " only; the others ended by themselves)" in found["killed with SIGKILL"]["note"]
    assert found["the other ranks end by themselves when one is killed"]["found"] == "1 of 1 times"
    assert f"of {3 * 2 * 16} differ" in found["RNG after each step, each rank"]["found"]
