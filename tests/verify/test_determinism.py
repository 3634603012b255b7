"""`llmexp verify determinism`: it passes where the same run twice is the same, and says where it is not."""  # noqa: E501

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmexp.runs import rundir
from llmexp.settings.convert import build
from llmexp.verify import determinism, record, runs
from llmexp.verify.pair import Pair
from tests.conftest import ROOT, TINY, Result, environment, llmexp

STEPS = 4
RUN = [*TINY, "data=synthetic", "data.n_tokens=5000", "train.eval_tokens=100", "batch.micro_batch_size=4",  # noqa: E501
       "batch.gradient_accumulation_steps=2", "model.dropout=0.1", "precision=fp16", f"--steps={STEPS}"]  # fmt: skip  # noqa: E501

PLANT = """
import os
import torch


def noise(event, context):
    # From the third step on a module adds noise that no seed fixes, by an operation that torch has no other kernel for.
    if event == "step_start" and context.step == (1 if "LLMEXP_RECORD_WARNINGS" in os.environ else 3):
        mlp = context.model.blocks[1].mlp
        quiet = mlp.forward

        def forward(h_btd):
            offset = torch.zeros(2).put_(torch.tensor([1]), torch.tensor([float.fromhex("0x" + os.urandom(2).hex())]))
            return quiet(h_btd) * (1 + offset.sum())

        mlp.forward = forward
"""  # noqa: E501

PUSH = """
import torch


def push(event, context):
    if (event, context.step) == ("step_start", 3):
        with torch.no_grad():
            context.model.blocks[1].mlp.down_proj.weight[0, 0] += 0.5
"""

# In place as soon as the worker looks up its hooks, before the first window is read.
ORDER = """
import dataclasses, os
from llmexp.train import windows

order_of = windows.order_of
windows.order_of = lambda parts: dataclasses.replace(order_of(parts), seed=os.getpid())


def shuffled(event, context):
    pass
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
    # 4 steps x 2 micro-batches, an input and an output each: the model, 2 embeddings, its dropout, its last norm, and  # noqa: E501
    # in each of 2 blocks itself, 2 norms, attention with 4 projections, the MLP with 2, and the dropout twice.  # noqa: E501
    calls = 1 + 2 + 1 + 1 + 2 * (1 + 2 + 5 + 3 + 2)
    assert (
        found["inputs and outputs of each module, each rank"]["found"]
        == f"0 of {4 * 2 * 2 * calls} differ"
    )
    assert (
        "0 of 12 differ" in found["RNG after each step, each rank"]["found"]
    )  # torch, Python, NumPy in 4 steps


def again(
    proof: Result,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: str,
    code: str,
    hook: str,
) -> str:
    """A third run of the same config, with a planted hook: how it differs from the first, in the proof's words."""  # noqa: E501
    (tmp_path / f"{module}.py").write_text(code)
    config = build(rundir.read_config(proof.folder / "first"))
    config = dataclasses.replace(
        config, hooks=[*config.hooks[:-1], f"{module}.{hook}", config.hooks[-1]]
    )
    for name, value in environment(
        PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}", LLMEXP_ALLOW=module
    ).items():
        monkeypatch.setenv(name, value)
    first, other = proof.folder / "first", tmp_path / "other"
    runs.train_recorded(other, config, modules=True)
    pair = Pair.of(first, other)
    assert failed(determinism.compare(pair))
    return determinism.first_difference(pair)


def test_a_module_with_noise_is_named_with_its_step(proof, tmp_path, monkeypatch):
    said = again(proof, tmp_path, monkeypatch, "plant", PLANT, "noise")
    assert said == (
        "step 3, rank 0: an operation in blocks.1.mlp (MLP) itself, after blocks.1.mlp.down_proj (Linear)"  # noqa: E501
    )


def test_a_parameter_that_a_hook_changed_is_named(proof, tmp_path, monkeypatch):
    said = again(proof, tmp_path, monkeypatch, "push", PUSH, "push")
    assert (
        said
        == "step 3, rank 0: something between the steps, such as a hook, changed blocks.1.mlp.down_proj.weight"  # noqa: E501
    )


def test_another_order_of_the_data_is_named_as_such(proof, tmp_path, monkeypatch):
    said = again(proof, tmp_path, monkeypatch, "order", ORDER, "shuffled")
    assert said == "step 1, rank 0: the data: the window holds other tokens"


def changed(proof: Result, tmp_path: Path, change) -> tuple[list[Any], str]:
    """What is said of two recorded runs when what the second one recorded is changed."""
    first, other = proof.folder / "first", tmp_path / "other"
    shutil.copytree(proof.folder / "second", other)
    a, b = record.read(first), record.read(other)
    change(b[0])
    rows = runs.rows(first)
    pair = Pair((a, b), (rows, rows))
    counts = [pair.differences(part) for part in ("reduced", "parameters", "optimizer", "rng")]
    return counts, determinism.first_difference(pair)


@pytest.mark.parametrize("kept", [0, 1])
def test_a_backward_pass_with_fewer_gradients_is_reported(proof, tmp_path, kept):
    """As of a model that takes another path at random."""
    _, said = changed(
        proof, tmp_path, lambda by_step: by_step[2].update(gradients=by_step[2]["gradients"][:kept])
    )
    assert said.startswith("step 2, rank 0: the gradient of ")


def test_a_compiled_run_is_not_looked_into_and_does_not_fail(proof):
    pair = Pair.of(proof.folder / "first", proof.folder / "second")
    for records in pair.records:
        for row in records[0].values():
            row.pop("events", None)
            row.pop("reduced", None)
    found = determinism.compare(pair)
    assert [check.passed for check in found] == [True, None, None, True, True, True, True]


WEIGHT = "blocks.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda by_step: by_step[0]["parameters"].update({WEIGHT: "?"}),
         f"before the first step, rank 0: it starts with another {WEIGHT}"),
        (lambda by_step: by_step[2]["parameters"].update({WEIGHT: "?"}),
         f"step 2, rank 0: optimizer update (AdamW, fused) of {WEIGHT}"),
        (lambda by_step: by_step[2]["optimizer"].update({f"0/{WEIGHT}/exp_avg": "?"}),
         f"step 2, rank 0: optimizer update (AdamW, fused) of 0/{WEIGHT}/exp_avg"),
        (lambda by_step: by_step[2]["reduced"].update({WEIGHT: "?"}),
         f"step 2, rank 0: the gradient of {WEIGHT}, reduced over ranks, unscaled and clipped"),
        (lambda by_step: by_step[2]["rng"].update({"numpy": "?"}),
         "step 2, rank 0: the RNG of numpy: another number of random numbers was drawn"),
        (lambda by_step: next(e for e in by_step[3]["gradients"] if e[0] == WEIGHT).__setitem__(1, "?"),  # noqa: E501
         f"step 3, rank 0: the gradient of {WEIGHT}, in the backward pass of blocks.0.mlp.up_proj (Linear)"),  # noqa: E501
        (lambda by_step: by_step.pop(4), "step 4, rank 0: only one of the runs came here"),
        (lambda by_step: by_step[1]["events"][0].__setitem__(2, "?"),
         "step 1, rank 0: the data: the input of the model (GPT2)"),
    ],
)  # fmt: skip
def test_each_stage_of_a_step_has_its_words(proof, tmp_path, change, said):
    _, found = changed(proof, tmp_path, change)
    assert found == said


def test_the_earliest_step_and_stage_are_named(proof, tmp_path):
    def change(by_step):
        by_step[3]["rng"]["torch"] = by_step[2]["parameters"][WEIGHT] = by_step[2]["reduced"][
            WEIGHT
        ] = "?"

    counts, said = changed(proof, tmp_path, change)
    assert said.startswith(f"step 2, rank 0: the gradient of {WEIGHT}, reduced")
    assert [names for names, _ in counts] == [
        [f"step 2, rank 0, {WEIGHT}"], [f"step 2, rank 0, {WEIGHT}"], [], ["step 3, rank 0, torch"]
    ]  # fmt: skip


CLASSES = {"": "Net", "a": "Block", "a.x": "Linear", "b": "Dropout"}
CALLS = [["", "in", "0"], ["a", "in", "0"], ["a.x", "in", "1"], ["a.x", "out", "2"], ["a", "out", "3"],  # noqa: E501
         ["b", "in", "3"], ["b", "out", "4"], ["", "out", "5"]]  # fmt: skip
WORDS = [
    "the data: the input of the model (Net)",
    "an operation in the model (Net) itself, between the model (Net) and a (Block)",
    "an operation in a (Block) itself, between a (Block) and a.x (Linear)",
    "the output of a.x (Linear), from an equal input and parameters equal after the step before",
    "an operation in a (Block) itself, after a.x (Linear)",
    "an operation in the model (Net) itself, between a (Block) and b (Dropout)",
    "the output of b (Dropout), from an equal input and parameters equal after the step before",
    "an operation in the model (Net) itself, after b (Dropout)",
]


@given(st.data())
def test_the_first_difference_decides_which_module_is_named(data):
    different = data.draw(st.sets(st.sampled_from(range(len(CALLS)))))
    other = [[*call[:2], "?"] if at in different else call for at, call in enumerate(CALLS)]
    said = determinism.where_forward(CALLS, other, CLASSES)
    assert said == (WORDS[min(different)] if different else "")
    cut = data.draw(st.integers(1, len(CALLS) - 1))
    if not any(at < cut for at in different):
        last = determinism.label(CALLS[cut - 1][0], CLASSES)
        assert (
            determinism.where_forward(CALLS, other[:cut], CLASSES)
            == f"other modules are called after {last}"
        )


@pytest.mark.slow
def test_noise_fails_the_command_which_names_what_torch_knows_of_it(tmp_path):
    result = prove(tmp_path, "--allow", "plant", "hooks=[plant.noise]")
    assert result.code == 1, result.out + result.err
    last = result.json("verify.json")["checks"][-1]
    assert last["what"] == "the first difference"
    assert last["note"].startswith("step 3, rank 0: an operation in blocks.1.mlp (MLP) itself")
    assert last["note"].endswith(
        "without a deterministic implementation, by torch's own account: put_"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        ["parallelism=ddp", "parallelism.nproc_per_node=2"],
        [
            "parallelism=fsdp",
            "parallelism.nproc_per_node=2",
            "parallelism.activation_checkpointing=full",
        ],
        ["parallelism=tp", "parallelism.nproc_per_node=2", "precision=fp32"],
        ["train.compile=true"],
    ],
    ids=["ddp", "fsdp", "tp", "compile"],
)
def test_any_layout_is_looked_into(tmp_path, layout):
    result = prove(tmp_path, *layout)
    assert result.code == 0, result.out + result.err
    found = {check["what"]: check for check in result.json("verify.json")["checks"]}
    assert all(check["passed"] is not False for check in found.values())
    assert ("inputs and outputs of each module, each rank" in found) == (
        "train.compile=true" not in layout
    )
