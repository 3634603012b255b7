"""What a model of the user's keeps beside its parameters (modes, buffers of any type, random
numbers): the same whoever looks, in resumed runs and forks, and where ranks differ in it."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from llmexp import mesh
from llmexp.checkpoint import loading, saving
from llmexp.models.loss import evaluation_mode
from llmexp.optim.precision import settings_kept
from llmexp.train.assembly.assemble import assemble
from llmexp.train.assembly.building import left_in_evaluation
from llmexp.train.assembly.opening import open_run
from llmexp.train.evaluation import validate
from llmexp.train.sampling import sample
from llmexp.train.set_up import set_up
from llmexp.train.windows import read_ahead
from tests.conftest import Result
from tests.tools import composed, exact
from tests.train.resumed import ends, goes_on_from

SMALL = [
    "--allow=own", "batch.sequence_length=12", "tracker=none", "train.sample_tokens=0",
    "metrics.picture=false", "data=synthetic", "data.n_tokens=3000", "train.log_every=1",
]  # fmt: skip
TWO = "parallelism.nproc_per_node=2"
LAYOUTS = {"single": (), "ddp": (TWO,), "fsdp": (TWO,)}


def model(name: str, width: int = 8, **more: Any) -> list[str]:
    arguments = {"_target_": f"own.kept.{name}", "vocab_size": "null", "width": width} | more
    given = ", ".join(f"{key}: {value}" for key, value in arguments.items())
    return ["~model", f"+model={{{given}}}"]


RESTLESS = [*model("Restless", looked="true"), "train.max_steps=5", "precision=fp64"]
KEPT = [*model("Kept", theta=2), "train.max_steps=4", "precision=fp32", "checkpoint.every=2"]


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("own")


@pytest.fixture
def here(own, monkeypatch) -> Path:
    monkeypatch.chdir(own)
    monkeypatch.setenv("LLMEXP_ALLOW", "own")
    return own


def trained(own: Path, name: str, *overrides: str) -> Result:
    return ends(own, "train", *SMALL, *overrides, f"hydra.run.dir={name}")


def evaluated(own: Path, run: str) -> float:
    done = ends(own, "evaluate", run, "--allow=own", "--json")
    return json.loads(done.out)["sets"][0]["loss"]


LONG = "batch.sequence_length=64"


@pytest.fixture(scope="module")
def unseen(own) -> Result:
    """A run at which nobody looks before its end."""
    return trained(own, "unseen", *RESTLESS, "train.eval_every=null", LONG)


def test_a_run_does_not_depend_on_who_looks(own, unseen):
    """test_nothing_that_is_looked_at_changes has each looker alone."""
    looks = [
        "train.eval_every=1", "train.ema=0.5", "train.tasks=[tiny_facts]", "train.tasks_every=2",
        "train.sample_every=1", "train.sample_tokens=3", "checkpoint.every=1",
        "metrics.layers_every=2", "metrics.spikes=true", "metrics.noise_scale_every=1",
    ]  # fmt: skip
    seen = trained(own, "seen", *RESTLESS, LONG, *looks)
    keys = ("train/loss", "grad_norm", "step")
    rows = [[[row[key] for key in keys] for row in run.rows()] for run in (seen, unseen)]
    assert rows[0] == rows[1]
    assert seen.rows()[-1]["val/loss"] == unseen.rows()[-1]["val/loss"]


def test_evaluate_and_opening_find_all_that_the_run_had(here, unseen, parts):
    """Drawn numbers and moved buffers included; float64 sums in another order. Modules stay in the
    mode that their code chose."""
    assert evaluated(here, "unseen") == pytest.approx(unseen.rows()[-1]["val/loss"], rel=1e-12)
    out = " ".join(unseen.out.split())
    assert "model: off, still stay in evaluation, as its code demands" in out
    assert "dropout 0.2 in training" in out
    opened, fresh = open_run(unseen.folder, 5).model, parts.new_model()
    types = [{n: b.dtype for n, b in m.named_buffers() if n != "cache"} for m in (opened, fresh)]
    assert types[0] == types[1]
    assert opened.count > 0
    assert opened.short.tolist() == [5] * 5
    assert opened.wide.tolist() == [1j**5]
    assert "mean" not in opened.state_dict()


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_resumed_run_has_the_buffers_of_an_unbroken_one(own, tmp_path, kind):
    """On several ranks those of rank 0, in the next step, in evaluations and in checkpoints."""
    run = trained(
        own, f"buffers_{kind}", *model("Restless", looked="false"), "precision=fp64",
        "train.max_steps=4", "train.eval_every=2", "checkpoint.every=2", f"parallelism={kind}",
        "batch.gradient_accumulation_steps=2", *LAYOUTS[kind],
    )  # fmt: skip
    assert evaluated(own, run.folder.name) == pytest.approx(run.rows()[-1]["val/loss"], rel=1e-12)
    goes_on_from(2, run, tmp_path, "--allow=own")


@pytest.fixture
def parts(here):
    return assemble(composed(*SMALL[1:], *RESTLESS, LONG, "train.tasks=[tiny_facts]"))


def random_states() -> list[str]:
    return [repr(f()) for f in (torch.get_rng_state, np.random.get_state, random.getstate)]


def state_of(model: nn.Module) -> dict[str, object]:
    found: dict[str, object] = {f"{n} mode": m.training for n, m in model.named_modules()}
    found |= {f"{n} hooks": len(m._forward_hooks) for n, m in model.named_modules()}
    named = dict([*model.named_parameters(), *model.named_buffers()])
    named.pop("cache", None)  # it goes by the length of the last tokens, and stays
    for name, t in named.items():
        shown = t if t.dtype != torch.uint16 else t.int()
        grad = None if t.grad is None else t.grad.tolist()
        found[name] = (str(t.dtype), shown.tolist(), grad, t.requires_grad)
    return found


@settings_kept()
def test_nothing_that_is_looked_at_changes(parts):
    """Each looker alone, at a model in the middle of training."""
    setup = set_up(parts, mesh.join("cpu", "single", 1, 1, 1))
    window = next(read_ahead(parts, setup.mesh, 0))
    setup.module(*window.micro_batches[0]).backward()
    assert not setup.model.still.training
    for look in (
        lambda: validate(parts, setup),
        *(measure(1, True) for measure in setup.features.on("measure")),
        lambda: sample(parts.tokenizer, setup.model, 64, "fp64", "a", 3),
        parts.new_model,
        lambda: assemble(parts.config),
    ):
        before = state_of(setup.model), random_states()
        look()
        after = state_of(setup.model), random_states()
        assert [k for k in before[0] if before[0][k] != after[0][k]] == []
        assert after[1] == before[1]


def test_the_first_weights_and_types_of_a_model_are_those_of_its_seed(parts):
    """Also where its code draws from numpy and Python; complex numbers stay complex."""
    one = state_of(parts.new_model())
    np.random.rand(), random.random()
    model = parts.new_model()
    assert state_of(model) == one
    assert (model.turn.dtype, model.wide.dtype) == (torch.complex64, torch.complex128)
    assert model.mean.dtype == torch.float64


def test_a_cache_that_grew_while_somebody_looked_stays():
    model = nn.Linear(1, 1)
    model.register_buffer("cache", torch.zeros(2))
    model.register_buffer("later", None)
    with evaluation_mode(model):
        model.cache, model.later = torch.ones(3), torch.ones(1)
    assert (len(model.cache), len(model.later)) == (3, 1)


def test_ranks_need_not_use_the_same_parameters(own):
    """An expert without a sequence on a rank, and one that nobody uses: as on one rank."""
    size = ["batch.micro_batch_size=1", "batch.real_batch_size=4", "train.max_steps=4"]
    mixture = [*model("Mixture", 200), "precision=fp64", "train.eval_every=1", *size]
    rows = {
        kind: trained(own, f"mixture-{kind}", *mixture, f"parallelism={kind}", *two).rows()
        for kind, two in LAYOUTS.items()
    }
    for kind in ("ddp", "fsdp"):
        for key in ("train/loss", "grad_norm", "weight_norm", "val/loss"):
            found = [row[key] for row in rows[kind]]
            assert found == pytest.approx([row[key] for row in rows["single"]], rel=1e-11), key


@pytest.mark.parametrize("since", [0, 2])
def test_ranks_that_share_a_model_run_the_same_blocks(own, since):
    """A block that one of them drops ends the run in words, at once; replicas may."""
    shared = [*model("Dropped", since=since), "train.max_steps=4", TWO]
    split = [*SMALL, *shared, "parallelism=fsdp", f"name=fsdp{since}"]
    done = ends(own, "train", *split, code=3)
    assert "the same blocks in the same order on all ranks" in done.err
    assert "Traceback" not in done.err
    trained(own, f"dropped_{since}", *shared, "parallelism=ddp")


@pytest.fixture(scope="module")
def kept(own) -> Result:
    return trained(own, "kept", *KEPT)


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_a_block_that_runs_again_moves_its_buffers_once(here, kept, kind):
    again = trained(here, f"kept_{kind}", *KEPT, f"parallelism.activation_checkpointing={kind}")
    assert exact(again) == exact(kept)
    two = [open_run(run.folder, None).model for run in (kept, again)]
    assert two[0].blocks[0].count > 4
    assert all(map(torch.equal, two[0].buffers(), two[1].buffers()))


def test_other_names_of_a_buffer_are_restored_too(here, kept, tmp_path):
    goes_on_from(2, kept, tmp_path, "--allow=own")
    model = open_run(kept.folder, None).model
    assert model.original_x is model.x
    assert model.x > 1
    assert model.blocks[0].shared is model.blocks[1].shared
    assert "steps" in model.state_dict()


def test_names_that_parted_stay_apart(tmp_path):
    """And names of one tensor have one again, though each was another at first."""
    models = []
    for _ in range(2):
        model = nn.ModuleDict({name: nn.Linear(1, 1) for name in "abcd"})
        shared = torch.zeros(1)
        for name in "abcd":
            start = shared if name in "ab" else torch.zeros(1)
            model[name].register_buffer("x", start, persistent=False)
        models.append(model)
    saved, model = models
    saved["b"].x = torch.ones(1)
    saved["c"].x = saved["d"].x = torch.full((2,), 2.0)
    pieces = saving.snapshot(saved, [], 0, 1, False)
    saving.write_pieces(tmp_path, 1, pieces)
    path = saving.commit_checkpoint(tmp_path, 1, pieces, {}, {}, None)
    loading.restore_model(loading.read_checkpoint(path), model)
    assert [model[name].x.tolist() for name in "abcd"] == [[0], [1], [2, 2], [2, 2]]
    assert model["c"].x is model["d"].x


@pytest.mark.parametrize("theta", [2, 99])
def test_a_fork_with_another_model_section_computes_its_own_buffers(here, kept, theta):
    given = ["fork.run=kept", "fork.step=2", f"model.theta={theta}", "--allow=own"]
    fork = ends(here, "train", *given, f"hydra.run.dir=fork_{theta}")
    model = open_run(fork.folder, None).model
    assert model.freq.tolist() == [theta] * 8
    assert model.steps.int() == open_run(kept.folder, None).model.steps.int()
    assert (model.x > 1) == (theta == 2)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_cache_that_differs_between_ranks_is_not_shared(own, kind):
    grown = [*model("Grown", old="false"), "train.max_steps=3", f"parallelism={kind}", TWO]
    assert [row["step"] for row in trained(own, f"grown_{kind}", *grown).rows()] == [1, 2, 3]


def test_torch_that_mixes_gradients_of_unused_parameters_is_refused(own):
    old = [*model("Grown", old="true"), "train.max_steps=2", TWO, "parallelism=fsdp"]
    done = ends(own, "train", *SMALL, *old, "hydra.run.dir=old", code=2)
    assert "install torch 2.13" in done.err
    assert "Traceback" not in done.err


def test_a_model_that_is_in_evaluation_as_a_whole_is_named_once():
    (said,) = left_in_evaluation(nn.Sequential(nn.Dropout(), nn.Linear(1, 1)).eval())
    assert said.startswith("model: all of it stays in evaluation, as its code demands")
