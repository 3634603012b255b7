"""Values that are not finite, planted where they hurt: all ranks stop in one step, and the right
layer is named."""

import math
import re
import shlex
from pathlib import Path

import pytest
from own import bombs
from own.bombs import LAYER

from llmexp import mesh
from llmexp.modes.diagnosis import NOTHING, first_bad
from llmexp.optim.precision import settings_kept
from llmexp.train.assembly.assemble import Parts, assemble
from llmexp.train.set_up import set_up
from llmexp.train.windows import read_ahead
from tests.conftest import TINY, llmexp
from tests.faults.helpers import AGAIN, TWO, fails, without_scale
from tests.tools import composed

BOMBS = ["--allow", "own", "hooks=[own.bombs.hook]", "hydra.run.dir=run"]
OUTPUT = f"the output of {LAYER} (Linear), whose input is finite"


def parts_of(tokens: Path, *overrides: str) -> Parts:
    data = ["data=tokens", "data.val_ratio=0", f"data.train_files=[{tokens}]"]
    return assemble(composed(*TINY, *data, "batch.micro_batch_size=2", *overrides))


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
    parts = parts_of(tokens, *how, "model.dropout=0.1")
    # A gradient may be met on its way out of the layer before that of weight or bias is.
    gradient = rf"the gradient (of {LAYER}\.|that {LAYER} \(Linear\) returns)"
    for kind, found in (
        ("weight", f"parameter {LAYER}.weight is not finite"),
        ("output", re.escape(OUTPUT)),
        ("gradient", gradient),
    ):
        said = said_of(parts, kind)
        assert re.match(f"the first thing to go wrong: .*{found}", said), said


def test_of_the_second_micro_batch_too_and_nothing_where_nothing_is(tokens):
    parts = parts_of(tokens, "batch.gradient_accumulation_steps=3", "precision=fp32")
    assert f"the output of {LAYER} (Linear)" in said_of(parts, "output", after_call=1)
    assert LAYER in said_of(parts, "gradient", after_call=1)
    assert said_of(parts, "output", after_call=3) == NOTHING


@pytest.mark.parametrize(
    ("kind", "bomb", "what", "more"),
    [
        ("ddp", "gradient", LAYER, []),
        ("tp", "output", OUTPUT, []),
        ("fsdp", "weight", f"parameter {LAYER}.weight is not finite", []),
        pytest.param("ddp", "output", f"the output of {LAYER} (Linear)", ["train.compile=true"],
                     marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_on_one_of_two_ranks(tmp_path, settings, kind, bomb, what, more):
    """Both ranks stop in the step in which one of them goes wrong, and nothing is saved after
    it. Resumed, the run would fail again."""
    two = ["precision=fp32", f"parallelism={kind}", *TWO, *more]
    says = [what, "step 7 has a ", "the update was not applied", "(rank 1)"]
    failed = fails(
        tmp_path, "train", *without_scale(settings), *two, *BOMBS, FAULT_BOMB=f"{bomb} 7 1",
        says=says, step=6, then=AGAIN,
    )  # fmt: skip
    for rank in (0, 1):
        account = failed.json(f"logs/rank-{rank}.json")["text"]
        assert "step 7 has a " in account
        assert what in account
    assert [row["step"] for row in failed.rows()] == list(range(1, 7))
    assert max(int(p.name[5:]) for p in (failed.folder / "checkpoints").iterdir()) == 6


def test_a_scale_below_one_stops_and_names_the_layer(tmp_path, settings):
    """Gradients that overflow at any scale: each step is skipped, bit for bit, until the scale is
    hopeless."""
    more = ["train.eval_every=1", "precision.init_scale=4"]
    more.append("parallelism.activation_checkpointing=full")
    failed = fails(
        tmp_path, "train", *settings, *more, *BOMBS, FAULT_BOMB="gradient 4 0",
        says=["the fp16 loss scale fell below 1", "at step ", LAYER], step=None, then=AGAIN,
    )  # fmt: skip
    rows = failed.rows()
    skipped = [row for row in rows if row["skipped"]]
    assert len(skipped) >= 2
    assert {row["weight_norm"] for row in skipped} == {rows[2]["weight_norm"]}
    assert len({row["lr"] for row in skipped}) == 1
    assert all(math.isfinite(row["train/loss"]) for row in skipped)


def test_a_norm_that_overflows_is_named_and_not_laid_to_the_machine(tmp_path):
    """Every gradient is finite; a resumed run would compute the same, a fork at the rate that is
    named goes on."""
    run = [*TINY, "data=synthetic", "data.n_tokens=5000", "train.max_steps=9"]
    run += ["optimizer.lr=0.02", "checkpoint.every=1"]
    failed = fails(
        tmp_path, "train", *run, *BOMBS, FAULT_BOMB="large 3 0",
        says=["the norm of all gradients: every entry is finite"], step=2, then=AGAIN,
    )  # fmt: skip
    assert "does not come from the config" not in failed.err
    command = re.search("settings: (llmexp train fork.run=run optimizer.lr=0.002) ", failed.err)
    assert command, failed.err
    again = [*shlex.split(command[1])[1:], "train.max_steps=4", "--allow", "own"]
    done = llmexp(*again, cwd=tmp_path)
    assert done.code == 0, done.err
