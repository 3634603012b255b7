"""Values that are not finite, planted where they hurt: all ranks stop in one step, and the right
layer is named."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch

from llmexp import mesh
from llmexp.modes.diagnosis import NOTHING, first_bad
from llmexp.optim.precision import settings_kept
from llmexp.train.assembly.assemble import Parts, assemble
from llmexp.train.set_up import set_up
from llmexp.train.windows import read_ahead
from tests.conftest import TINY, llmexp
from tests.faults import bombs
from tests.faults.helpers import assert_says, assert_status, without_scale
from tests.tools import composed

LAYER = "blocks.1.mlp.up_proj"
TWO = ["parallelism.nproc_per_node=2", "batch.gradient_accumulation_steps=1"]
BOMBS = ["--allow", "bombs", "hooks=[bombs.hook]", "hydra.run.dir=run"]


def parts_of(tokens: Path, *overrides: str) -> Parts:
    data = ["data=tokens", "data.val_ratio=0", f"data.train_files=[{tokens}]"]
    base = [*TINY, *data, "batch.micro_batch_size=2"]
    return assemble(composed(*base, *overrides))


def said_of(parts: Parts, kind: str, after_call: int = 0) -> str:
    """The diagnosis of a step into whose model a bomb was laid, in this process."""
    with settings_kept():
        s = set_up(parts, mesh.join("cpu", "single", 1, 1, 1))
        s.model.train()
        bombs.lay(kind, s.model.get_submodule(LAYER), after_call)
        return first_bad(s, next(read_ahead(parts, s.mesh, 0)))


@pytest.mark.parametrize(
    ("recompute", "precision"), [("none", "fp32"), ("full", "fp16"), ("selective", "bf16")]
)
def test_the_first_bad_layer_is_named(tokens, recompute, precision):
    how = [f"parallelism.activation_checkpointing={recompute}", f"precision={precision}"]
    how.append("model.dropout=0.1")
    parts = parts_of(tokens, *how)
    for kind, found in (
        ("weight", f"parameter {LAYER}.weight is not finite"),
        ("output", f"the output of {LAYER} (Linear), whose input is finite"),
        ("gradient", f"the gradient of {LAYER}."),  # weight or bias: both are
    ):
        said = said_of(parts, kind)
        assert said.startswith("the first thing to go wrong: "), said
        # A gradient may be met on its way out of the layer before that of its weight is.
        assert found in said or (
            kind == "gradient" and f"the gradient that {LAYER} (Linear) returns" in said
        ), said


def test_of_the_second_micro_batch_too_and_nothing_where_nothing_is(tokens):
    parts = parts_of(tokens, "batch.gradient_accumulation_steps=3", "precision=fp32")
    assert f"the output of {LAYER} (Linear)" in said_of(parts, "output", after_call=1)
    assert LAYER in said_of(parts, "gradient", after_call=1)
    assert said_of(parts, "output", after_call=3) == NOTHING


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "bombs.py").write_text(Path(bombs.__file__).read_text())
    return tmp_path


@pytest.mark.parametrize(
    ("kind", "bomb", "what", "rank", "more"),
    [
        ("ddp", "gradient", LAYER, 1, []),
        ("tp", "output", f"the output of {LAYER} (Linear), whose input is finite", 1, []),
        ("fsdp", "weight", f"parameter {LAYER}.weight is not finite", 1, []),
        pytest.param("ddp", "output", f"the output of {LAYER} (Linear)", 1, ["train.compile=true"],
                     marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_on_one_of_two_ranks(here, settings, kind, bomb, what, rank, more):
    """Both ranks stop in the step in which one of them goes wrong, and nothing is saved after
    it."""
    two = ["precision=fp32", f"parallelism={kind}", *TWO, *more]
    given = [*without_scale(settings), *two, *BOMBS]
    failed = llmexp("train", *given, cwd=here, FAULT_BOMB=f"{bomb} 7 1")
    assert failed.code == 3, failed.err
    line = assert_says(
        failed.err, what=what, where="step 7 has a ", intact="the last checkpoint is step_00000006",
        command="llmexp train fork.run=run optimizer.lr=",  # resumed, it would fail again
    )  # fmt: skip
    assert "the update was not applied" in line
    assert f"(rank {rank})" in line
    assert_status(failed, "failed", 3, what)
    for log in (failed.folder / "logs" / f"rank-{r}.json" for r in (0, 1)):
        account = json.loads(log.read_text())["text"]
        assert "step 7 has a " in account
        assert what in account
    assert [row["step"] for row in failed.rows()] == list(range(1, 7))
    assert max(int(p.name[5:]) for p in (failed.folder / "checkpoints").iterdir()) == 6


def test_a_scale_below_one_stops_and_names_the_layer(here, settings):
    """Gradients that overflow at any scale: each step is skipped, bit for bit, until the scale is
    hopeless."""
    more = ["train.eval_every=1", "precision.init_scale=4"]
    more.append("parallelism.activation_checkpointing=full")
    failed = llmexp("train", *settings, *more, *BOMBS, cwd=here, FAULT_BOMB="gradient 4 0")
    assert failed.code == 3, failed.err
    line = assert_says(
        failed.err, what="the fp16 loss scale fell below 1", where="at step ",
        intact="the last checkpoint is step_0",
        command="llmexp train fork.run=run optimizer.lr=",  # resumed, it would fail again
    )  # fmt: skip
    assert LAYER in line
    assert_status(failed, "failed", 3, LAYER)
    skipped = [row for row in failed.rows() if row["skipped"]]
    assert len(skipped) >= 2
    assert {row["weight_norm"] for row in skipped} == {failed.rows()[2]["weight_norm"]}
    assert len({row["lr"] for row in skipped}) == 1
    assert torch.isfinite(torch.tensor([row["train/loss"] for row in skipped])).all()


def test_a_norm_that_overflows_is_named_and_not_laid_to_the_machine(here):
    """Every gradient is finite; a resumed run would compute the same, a fork at the rate that is
    named goes on."""
    run = [*TINY, "data=synthetic", "data.n_tokens=5000", "train.max_steps=9"]
    run += ["optimizer.lr=0.02", "checkpoint.every=1"]
    failed = llmexp("train", *run, *BOMBS, cwd=here, FAULT_BOMB="large 3 0")
    assert failed.code == 3, failed.err
    assert "the norm of all gradients: every entry is finite" in failed.err
    assert "does not come from the config" not in failed.err
    assert "to continue: llmexp resume" not in failed.err
    command = re.search("settings: (llmexp train fork.run=run optimizer.lr=0.002) ", failed.err)
    assert command, failed.err
    done = llmexp(*shlex.split(command[1])[1:], "train.max_steps=4", "--allow", "bombs", cwd=here)
    assert done.code == 0, done.err
