"""Ranks as a user starts them: killed, hung, stopped, moved to another layout, and the same numbers
all along."""

import itertools
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from llmexp.folders import rundir
from llmexp.folders.rows import read_rows
from llmexp.mesh.groups import STARTED
from llmexp.modes import ranks
from llmexp.train import group, worker
from tests.conftest import HANG_S, ROOT, TINY, Result, environment, llmexp, start, train
from tests.tools import (
    SLOW_WRITES,
    alive,
    cut_after,
    exact,
    same_state,
    wait_for,
    weights,
)

# 50 sequences, 8 a step, 20 steps; rows at each, checkpoints at 5, 10, 15, 20.
SETTINGS = [
    "data=tokens", "data.val_ratio=0.1", "batch.real_batch_size=8", "train.max_steps=20",
    "train.log_every=1", "train.eval_every=10", "checkpoint.every=5", "checkpoint.keep=null",
    "optimizer.lr=0.01", "data.ignore_id=10", "train.data_digest=true",
]  # fmt: skip
TWO = ["parallelism=ddp", "parallelism.nproc_per_node=2"]
FOUR = [
    "parallelism=fsdp_tp", "parallelism.nproc_per_node=4", "parallelism.tensor_parallel_size=2",
]  # fmt: skip
# A signal has to find the run under way, however late it comes.
HELD = ["--allow", "own", "hooks=[own.faults.act]"]
HOLD = "step_start-8:hold go"


@pytest.fixture(scope="module")
def settings(tokens) -> list[str]:
    return [*SETTINGS, f"data.train_files=[{tokens}]"]


@pytest.fixture(scope="module")
def whole(settings, tmp_path_factory) -> Result:
    """Two ranks, undisturbed."""
    return train(tmp_path_factory.mktemp("whole"), "run", *settings, *TWO)


def rank_process(folder: Path, rank: int) -> int:
    for pid in alive(folder):
        if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            return pid
    raise AssertionError(f"no rank {rank} among {alive(folder)}")


def started(cwd: Path, settings: list[str], *more: str) -> tuple[subprocess.Popen[str], Result]:
    """A run of two ranks that has written 7 rows, and goes on when the file `go` is there or it is
    told to stop."""
    run = Result(0, "", "", cwd / "run")
    given = [*TINY, *settings, *TWO, *HELD, f"hydra.run.dir={run.folder}", *more]
    process = start("train", *given, cwd=cwd, FAULT_PLAN=HOLD)
    wait_for(lambda: len(read_rows(run.folder / "metrics.jsonl")) >= 7, process)
    return process, run


def test_a_killed_rank_restarts_the_group_from_the_newest_checkpoint(tmp_path, settings, whole):
    process, run = started(tmp_path, settings, "parallelism.max_restarts=1")
    os.kill(rank_process(run.folder, 1), signal.SIGKILL)
    (tmp_path / "go").touch()
    out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 0, err
    assert "a rank was lost; all start again" in err
    assert "resumed from step_000000" in out
    assert exact(run) == exact(whole)
    assert all(torch.equal(w, weights(run, 20)[name]) for name, w in weights(whole, 20).items())


def test_what_ranks_save_when_their_starter_is_killed_is_named(tmp_path, settings):
    process, run = started(tmp_path, settings)
    os.kill(run.json("status.json")["pid"], signal.SIGKILL)
    _, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 3
    assert "the worker was ended by signal 9" in run.json("status.json")["error"]
    assert run.json("status.json")["state"] == "failed"
    saved = rundir.newest_step(run.folder)
    assert saved is not None
    assert saved >= 7
    assert f"the last checkpoint is step_{saved:08d}; to continue: llmexp resume" in err


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_hung_rank_ends_the_run_and_is_named(tmp_path, settings, rank):
    process, run = started(tmp_path, settings, "parallelism.timeout_s=4")
    itself = tmp_path / f"go.{rank}"
    wait_for(lambda: itself.exists() and itself.read_text(), process)
    hung = int(itself.read_text())
    os.kill(hung, signal.SIGSTOP)
    (tmp_path / "go").touch()
    _, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 3
    assert f"rank {rank} did not arrive within 4 s" in err
    assert f"rank {rank} did not arrive within 4 s" in run.json("status.json")["error"]
    assert not Path(f"/proc/{hung}").exists()


def test_a_killed_parent_leaves_no_orphan_and_the_run_goes_on(tmp_path, settings, whole):
    process, run = started(tmp_path, settings)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=HANG_S)
    wait_for(lambda: not alive(run.folder))
    (tmp_path / "go").touch()
    again = llmexp("resume", str(run.folder), "--allow", "own", cwd=tmp_path)
    assert again.code == 0, again.err
    assert exact(run) == exact(whole)


def test_the_trace_of_the_rank_that_failed_first_comes_first(tmp_path, settings):
    (tmp_path / "faulty.py").write_text(
        "import os\n"
        "class Bad(BaseException): pass\n"
        "def hook(event, context):\n"
        "    group = os.path.exists('before') + 0\n"
        "    if (event, context.step, os.environ['RANK']) == ('step_start', 3 + group, '1'):\n"
        "        open('before', 'w')\n"
        "        raise Bad(f'broken on purpose by group {group}')\n"
    )
    hook = ["--allow", "faulty", "hooks=[faulty.hook]", "parallelism.max_restarts=1"]
    command = ["train", *TINY, *settings, *TWO, *hook, "hydra.run.dir=run"]
    result = llmexp(*command, cwd=tmp_path)
    assert result.code == 3
    # the one before it was made good by a restart
    first = result.err.index("Bad: broken on purpose by group 1")
    assert "Traceback" in result.err[:first]
    assert "Connection" not in result.err[:first]
    error = result.json("status.json")["error"]
    assert "Bad: broken on purpose by group 1" in error
    assert "(rank 1 on" in error


LAYOUTS = {
    "fsdp_tp": ["fsdp_tp", "nproc_per_node=4", "tensor_parallel_size=2"],
    "tp": ["tp", "nproc_per_node=2"],
    "single": ["single"],
}
# The clock of one rank jumps ahead of that of the other; in the end they fail to part.
CLOCK = """
import os, time, torch

ahead, real = 0, time.monotonic

def fail():
    raise RuntimeError("NCCL communicator was aborted")

def hook(event, context):
    global ahead
    if (event, os.environ["RANK"]) == ("step_start", "1") and context.step in (1, 6):
        ahead += 600
        time.monotonic = lambda: real() + ahead
    torch.distributed.destroy_process_group = fail
"""
GATHERED = """
import os, functools, torch
from llmexp.train import step

if os.environ["GATHER"] == "fp32":
    step.mesh.wrap = functools.partial(
        lambda wrap, *a, gather_dtype, **k: wrap(*a, **k), step.mesh.wrap
    )

def hook(event, context):
    if (event, context.step) == ("step_end", 1):
        policy = context.model.blocks[0]._get_fsdp_state()._mp_policy
        wanted = torch.bfloat16 if os.environ["GATHER"] == "bf16" else None
        assert policy.param_dtype is wanted, policy
"""


def test_gathering_in_bf16_changes_no_bit(tmp_path, settings):
    """Autocast multiplies with the same copies; norms are gathered in fp32."""
    (tmp_path / "gathered.py").write_text(GATHERED)
    more = ["parallelism=fsdp", "parallelism.nproc_per_node=2", "precision=bf16"]
    more += ["--allow", "gathered", "hooks=[gathered.hook]", "train.max_steps=3"]
    runs = [train(tmp_path, kind, *settings, *more, GATHER=kind) for kind in ("fp32", "bf16")]
    assert exact(runs[0]) == exact(runs[1])


def test_ranks_save_by_time_together_and_finish_though_they_fail_to_part(tmp_path, settings, whole):
    (tmp_path / "clock.py").write_text(CLOCK)
    more = ["checkpoint.every=null", "checkpoint.every_minutes=9"]
    more += ["--allow", "clock", "hooks=[clock.hook]"]
    run = train(tmp_path, "run", *settings, *more, *TWO)
    found = sorted(int(p.name[5:]) for p in (run.folder / "checkpoints").iterdir())
    assert found == [2, 7, 20]
    assert exact(run) == exact(whole)
    assert run.json("status.json")["state"] == "finished"
    text = "rank 1 left the others with an error: NCCL communicator was aborted"
    assert text in (run.folder / "logs" / "rank-1.log").read_text()


def test_a_run_that_ends_commits_the_checkpoint_on_its_way(tmp_path, settings):
    (tmp_path / "late.py").write_text(SLOW_WRITES + "def hook(event, context): pass\n")
    more = ["checkpoint.every=2", "checkpoint.last=false", "checkpoint.async=true"]
    more += ["--allow", "late", "--allow", "own", "hooks=[late.hook,own.faults.act]"]
    more += ["train.max_steps=3", "train.eval_every=null"]
    run = train(tmp_path, "run", *settings, *more, *TWO, FAULT_PLAN="saved-2:touch saved")
    assert [p.name for p in (run.folder / "checkpoints").iterdir()] == ["step_00000002"]
    assert (tmp_path / "saved").exists()


def test_a_run_moves_through_layouts(tmp_path, settings):
    """Of 4, 2 and 1 ranks, each resumed from a checkpoint that another layout has saved, for two
    steps: the same rows of data, losses, norms and parameters as the run that stayed where it was.
    tests/checkpoint/test_checkpoint.py reads what each layout saves in each other one."""
    last = 2 + 2 * len(LAYOUTS)
    settings = [
        *settings, "precision=fp64", f"train.max_steps={last}", "train.eval_every=2",
        "checkpoint.every=2", "checkpoint.async=true", "model.parametrization=mup",
        "model.base_width=4", "model.n_layers=1",
    ]  # fmt: skip
    stayed = train(tmp_path, "stayed", *settings)
    run = Result(0, "", "", cut_after(stayed, tmp_path, 2))
    for end, (name, (kind, *more)) in zip(range(4, last + 1, 2), LAYOUTS.items(), strict=True):
        overrides = [f"parallelism={kind}", *(f"parallelism.{m}" for m in more)]
        overrides.append(f"train.stop_step={end}")
        again = llmexp("resume", str(run.folder), *overrides, cwd=tmp_path)
        assert again.code == (75 if end < last else 0), again.err
        derived = run.json("run.json")
        assert derived["parallelism"] == name
        assert derived["real_batch_size"] == 8
        accumulated = derived["gradient_accumulation_steps"] * derived["micro_batch_size"]
        assert accumulated * derived["dp_size"] == 8
        assert len(run.rows()) == end
        for ours, theirs in zip(run.rows(), stayed.rows(), strict=False):
            assert ours["data_digest"] == theirs["data_digest"]
            # by other small batches, or not at all
            measured = {"noise_scale", "noise_scale_low", "noise_scale_high"}
            assert ours.keys() - measured == theirs.keys() - measured
            for key in {"train/loss", "grad_norm", "val/loss"} & ours.keys():
                assert ours[key] == pytest.approx(theirs[key], rel=1e-12)
        for key, value in weights(stayed, end).items():
            assert torch.allclose(weights(run, end)[key], value, rtol=0, atol=1e-11), key


@pytest.mark.parametrize(
    "more",
    [
        ["precision=fp16", "precision.init_scale=3e5", "clip=value", "clip.max_value=0.01",
         "optimizer=sgd"],
        ["optimizer=muon", "model=llama_100m", "model.n_heads=2", "model.n_kv_heads=2",
         "model.tied_head=false", "model.vocab_size=320", "train.max_steps=2"],
    ],
    ids=["fp16, sgd and value", "muon, llama"],
)  # fmt: skip
def test_every_part_works_on_split_models(tmp_path, settings, more):
    """Against the same run on one rank, within the rounding of the arithmetic (see
    test_invariance), with two micro-batches a rank."""
    settings = [*settings, "train.max_steps=4", "schedule=constant", *more]
    settings += ["batch.micro_batch_size=2", "model.n_layers=1"]
    run = train(tmp_path, "run", *settings, *FOUR)
    # Each rank's loss is scaled by dp_size too, as the gradients are averaged: its fp16 has as much
    # less room.
    settings = [s.replace("init_scale=3e5", "init_scale=6e5") for s in settings]
    alone = train(tmp_path, "alone", *settings)
    assert [r["skipped"] for r in run.rows()] == [r["skipped"] for r in alone.rows()]
    for ours, theirs in zip(run.rows(), alone.rows(), strict=True):
        assert ours["train/loss"] == pytest.approx(theirs["train/loss"], rel=0.02)
        if not ours["skipped"]:
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=0.05)
    if "precision=fp16" in more:
        assert {r["skipped"] for r in run.rows()} == {True, False}
        assert [2 * r["loss_scale"] for r in run.rows()] == [r["loss_scale"] for r in alone.rows()]


@pytest.mark.parametrize(
    "shared", [pytest.param("false", marks=pytest.mark.slow), "true"], ids=["heads", "tokens too"]
)
def test_dropout_masks_differ_between_sequences_and_agree_between_parts(tmp_path, settings, shared):
    """Also with sgd, no clipping and samples of text. Ranks that share the tokens have masks of
    their own."""
    (tmp_path / "masks.py").write_text(
        "import os, torch\n"
        "def keep(event, context):\n"
        "    if event == 'step_start' and context.step == 2:\n"
        "        context.model.dropout.register_forward_hook(save)\n"
        "def save(module, inputs, out):\n"
        "    if module.training:\n"
        "        torch.save(out == 0, f'masks{os.environ[\"RANK\"]}.pt')\n"
    )
    overrides = [
        "--allow", "masks", "hooks=[masks.keep]", "model.dropout=0.3", "optimizer=sgd",
        "clip=none", "train.sample_tokens=2", "train.sample_every=2", "train.max_steps=2",
        "train.eval_every=null", f"parallelism.sequence_parallel={shared}",
    ]  # fmt: skip
    run = train(tmp_path, "run", *settings, *overrides, "data.val_ratio=0", *FOUR)
    assert len(run.rows()) == 2
    masks = [torch.load(tmp_path / f"masks{rank}.pt") for rank in range(4)]
    assert 0.2 < masks[0].double().mean() < 0.4
    pairs = itertools.combinations(range(4), 2)
    same = [(a, b) for a, b in pairs if torch.equal(masks[a], masks[b])]
    assert same == ([(0, 1), (2, 3)] if shared == "false" else [])
    assert masks[0].shape[1] == (12 if shared == "false" else 6)


HEADS = [
    "model=qwen3_0_6b", "model.n_heads=4", "model.n_kv_heads=2", "model.head_dim=8",
    "model.tied_head=false", "model.vocab_size=320", "precision=fp64", *TINY[1:2], *TINY[3:-1],
    "train.max_steps=3", "train.sample_tokens=3", "model.parametrization=mup",
    "model.base_width=4",
]  # fmt: skip


def test_tensor_parallel_ranks_share_norms_of_heads_and_an_untied_output(tmp_path, settings):
    """Weights of norms act on the heads (or tokens) of every rank; from the second step on, a lost
    part of the gradient would show in the losses. The text that is sampled is that of one rank,
    too."""
    split = ["parallelism=tp", "parallelism.nproc_per_node=2"]
    split += ["parallelism.sequence_parallel=true"]
    settings = [*settings, "batch.document_mask=true", "model.norm=post"]
    settings += ["parallelism.activation_checkpointing=full"]
    rows, samples = [], []
    for name, more in (("one", ["parallelism=single"]), ("two", split)):
        run = llmexp("train", *HEADS, *settings, *more, f"hydra.run.dir={name}", cwd=tmp_path)
        assert run.code == 0, run.err
        rows.append(run.rows())
        samples.append([line for line in run.out.splitlines() if line.startswith("sample")])
    assert samples[0] == samples[1]
    assert len(samples[0]) == 1
    assert "none:" not in samples[0][0]
    for one, two in zip(*rows, strict=True):
        for key in {"train/loss", "grad_norm", "weight_norm"} & one.keys():
            # sums in another order, fp64
            assert two[key] == pytest.approx(one[key], rel=1e-12), key


def test_three_ranks_go_on_to_the_same_bits(tmp_path, settings):
    """How a sum over three ranks is rounded depends on where DDP has put a gradient."""
    three = [*settings, "parallelism=ddp", "parallelism.nproc_per_node=3",
             "batch.real_batch_size=6", "train.max_steps=8", "checkpoint.every=null"]  # fmt: skip
    whole = train(tmp_path, "whole", *three)
    stopped = ["train", *TINY, *three, "train.stop_step=4", "hydra.run.dir=part"]
    assert llmexp(*stopped, cwd=tmp_path).code == 75
    part = llmexp("resume", "part", "train.stop_step=null", cwd=tmp_path)
    assert part.code == 0, part.err
    part = Result(0, "", "", tmp_path / "part")
    same_state(*(run.folder / "checkpoints" / "step_00000008" for run in (whole, part)))


def test_offload_changes_no_bit_and_is_noted_on_a_cpu(tmp_path, settings):
    settings = [*settings, "model.dropout=0.1", "train.max_steps=3", "precision=fp32"]
    key = "parallelism.activation_checkpointing"
    runs = [train(tmp_path, kind, *settings, f"{key}={kind}") for kind in ("none", "offload")]
    assert exact(runs[1]) == exact(runs[0])
    noted = [f"{key}=offload saves nothing on a CPU" in run.out + run.err for run in runs]
    assert noted == [False, True]


@pytest.mark.slow
def test_compiled_parts_compute_the_same(tmp_path, settings):
    settings = [*settings, "train.max_steps=3", "precision=fp64", "train.eval_every=null"]
    settings += ["data.val_ratio=0"]
    alone = train(tmp_path, "alone", *settings)
    compiled = train(tmp_path, "compiled", *settings, *FOUR, "train.compile=true")
    for a, b in zip(alone.rows(), compiled.rows(), strict=True):
        assert a["train/loss"] == pytest.approx(b["train/loss"], rel=1e-12)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-12)


def test_a_start_too_many_that_is_stopped_leaves_the_run_alone(tmp_path, monkeypatch):
    """On several hosts, and where the lock is another's, what is interrupted before it begins is
    not the run."""
    for name in ("RANK", "WORLD_SIZE", STARTED):
        monkeypatch.delenv(name, raising=False)
    rundir.write_status(tmp_path, "running")
    before = (tmp_path / "status.json").read_bytes()

    def interrupted(*_: object) -> None:
        raise SystemExit(130)

    parts = SimpleNamespace(run=SimpleNamespace(layout=SimpleNamespace(nnodes=2)))
    monkeypatch.setattr(ranks, "watch", interrupted)
    monkeypatch.setattr(group, "join_ranks", interrupted)
    for start_of in (ranks.run, worker.work):
        assert start_of(tmp_path, parts, {}, False) == 130
        assert (tmp_path / "status.json").read_bytes() == before


@pytest.mark.skipif(not shutil.which("unshare"), reason="unshare is not there")
def test_without_a_loopback_interface_ranks_are_refused_at_once(tmp_path):
    """In a network of its own a process cannot reach even itself."""
    apart = ["unshare", "--map-root-user", "--net"]
    if subprocess.run([*apart, "true"], capture_output=True).returncode:
        pytest.skip("no network namespace may be made here")
    command = [*apart, sys.executable, "-m", "llmexp", "train", *TINY, *TWO, "data=synthetic"]
    command += ["data.n_tokens=5000", "hydra.run.dir=alone"]
    env = environment(PYTHONPATH=str(ROOT))
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 2
    assert "parallelism.nproc_per_node=2: " in done.stderr
    assert "loopback interface" in done.stderr
    assert not (tmp_path / "alone").exists()
