"""`llmexp verify determinism`: it passes where the same run twice is the same, and says
where it is not."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from llmexp.config.convert import build
from llmexp.folders import rundir
from llmexp.verify import determinism, runs
from llmexp.verify.determinism import Remains, same_bits
from tests.conftest import ROOT, TINY, Result, environment, llmexp

STEPS = 4
TWO = ["parallelism.nproc_per_node=2"]
RUN = [
    *TINY, "data=synthetic", "data.n_tokens=5000", "train.eval_tokens=100", "precision=fp16",
    "batch.micro_batch_size=4", "batch.gradient_accumulation_steps=2", "model.dropout=0.1",
    f"--steps={STEPS}",
]  # fmt: skip

PLANT = """
import os
import torch


def noise(event, context):
    # From the third step on a module adds noise that no seed fixes, by an operation that torch has no other kernel for.
    if event == "step_start" and context.step == 3:
        mlp = context.model.blocks[1].mlp
        quiet = mlp.forward

        def forward(h_btd):
            offset = torch.zeros(2).put_(torch.tensor([1]), torch.tensor([float.fromhex("0x" + os.urandom(2).hex())]))
            return quiet(h_btd) * (1 + offset.sum())

        mlp.forward = forward


def push(event, context):
    if (event, context.step) == ("step_start", 3):
        with torch.no_grad():
            context.model.blocks[1].mlp.down_proj.weight[0, 0] += 0.5


def shuffled(event, context):
    pass
"""  # noqa: E501

# In place as soon as the worker looks up its hooks, before the first window is read.
ORDER = """
import dataclasses, os
from llmexp.train import windows

sampler_of = windows.sampler_of
windows.sampler_of = lambda *given: dataclasses.replace(sampler_of(*given), seed=os.getpid())
"""


def prove(cwd: Path, *arguments: str) -> Result:
    (cwd / "plant.py").write_text(PLANT)
    return llmexp("verify", "determinism", *RUN, "hydra.run.dir=proof", *arguments, cwd=cwd)


def failed(found: list[Any]) -> dict[str, str]:
    return {check.what: check.note for check in found if check.passed is False}


@pytest.fixture(scope="module")
def proof(tmp_path_factory: pytest.TempPathFactory) -> Result:
    result = prove(tmp_path_factory.mktemp("determinism"))
    assert result.code == 0, result.out + result.err
    return result


def test_the_same_run_twice_is_the_same(proof):
    found = {check["what"]: check for check in proof.json("verify.json")["checks"]}
    assert all(check["passed"] for check in found.values()), found
    # torch, Python, NumPy in 4 steps
    assert "0 of 12 differ" in found["RNG after each step, each rank"]["found"]
    assert determinism.NO_TWIN not in proof.out


PARAMETERS = "parameters after each step, each rank"


@pytest.mark.parametrize(
    ("hook", "blamed"),
    [
        ("noise", {"loss and gradient norm of each step": "3, ", PARAMETERS: "3, rank 0, "}),
        ("push", {PARAMETERS: "3, rank 0, "}),
        ("shuffled", {"the data of each step": "1, data_digest"}),
    ],
)
def test_what_another_run_does_otherwise_is_found_in_its_step(
    proof, tmp_path, monkeypatch, hook, blamed
):
    """A third run of the same config, with a planted hook, beside the first."""
    (tmp_path / "plant.py").write_text(ORDER + PLANT if hook == "shuffled" else PLANT)
    config = build(rundir.read_config(proof.folder / "first"))
    config = dataclasses.replace(config, hooks=[*config.hooks, f"plant.{hook}"])
    path = f"{ROOT}{os.pathsep}{tmp_path}"
    for name, value in environment(PYTHONPATH=path, LLMEXP_ALLOW="plant").items():
        monkeypatch.setenv(name, value)
    runs.train_recorded(tmp_path / "other", config)
    pair = Remains(proof.folder / "first"), Remains(tmp_path / "other")
    found = failed(same_bits(determinism.COLUMNS, *pair))
    for what, first in blamed.items():
        assert found[what].startswith(f"first: step {first}")
    assert ("the data of each step" in found) == (hook == "shuffled")


@pytest.mark.slow
def test_noise_fails_the_command_which_says_what_names_the_operation(tmp_path):
    noisy = ["--allow", "plant", "hooks=[plant.noise]"]
    result = prove(tmp_path, *noisy)
    assert result.code == 1, result.out + result.err
    assert determinism.NO_TWIN in result.out
    strict = ["train.deterministic=true", "hydra.run.dir=strict"]
    again = prove(tmp_path, *noisy, *strict)
    assert again.code == 2
    assert "put_" in again.err


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        ["parallelism=ddp", *TWO],
        ["parallelism=fsdp", *TWO, "parallelism.activation_checkpointing=full"],
        ["parallelism=tp", *TWO, "precision=fp32"],
        ["train.compile=true"],
    ],
    ids=["ddp", "fsdp", "tp", "compile"],
)
def test_any_layout_is_the_same_twice(tmp_path, layout):
    result = prove(tmp_path, *layout)
    assert result.code == 0, result.out + result.err
