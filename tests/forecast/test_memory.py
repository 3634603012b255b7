"""A plan's memory is what torch allocates, for every layout; what it says would fit, fits."""

import dataclasses
import functools
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from llmexp import mesh
from llmexp.__main__ import run
from llmexp.checkpoint.stored import READ_BYTES
from llmexp.config.convert import with_knobs
from llmexp.data.window import Window
from llmexp.forecast import memory
from llmexp.forecast.counting import Counting
from llmexp.forecast.dry_run import KINDS, Cut, cut_of, rehearse
from llmexp.forecast.host import HostNeed, host_need, host_rows, host_ways
from llmexp.models.initial import BLOCK
from llmexp.optim.precision import settings_kept
from llmexp.system.devices import device_named
from llmexp.train.assembly.assemble import Parts, assemble
from llmexp.train.set_up import set_up
from llmexp.train.step import train_step
from tests.conftest import TINY, environment
from tests.tools import composed

SMALL = [
    "tracker=none", "data=synthetic", "data.n_tokens=20000", "train.device=cpu", "precision=fp32",
    "model.n_layers=2", "model.n_heads=4", "model.d_model=64", "model.d_ff=256",
    "model.max_position_embeddings=128", "batch.sequence_length=128", "train.max_steps=2",
    "tokenizer=bytes",
]  # fmt: skip
GPT, LLAMA = ["model=gpt_tiny"], ["model=llama_100m", "model.n_kv_heads=2"]
MOE = ["model=moe_tiny", "model.experts_per_token=4", "model.d_expert=64"]
LARGE = "model.vocab_size=4096"  # its loss is taken in chunks
FULL = "parallelism.activation_checkpointing=full"


def parts_of(*overrides: str) -> Parts:
    return assemble(composed(*SMALL, *overrides))


def allocated(parts: Parts) -> int:
    """The peak of what torch's allocator has given out in three steps of a real run."""
    device_memory = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    )
    ids_bt = torch.zeros(parts.run.micro_batch_size, parts.run.sequence_length, dtype=torch.int64)
    micro_batches = [(ids_bt, ids_bt)] * parts.run.gradient_accumulation_steps
    with device_memory, settings_kept():
        setup = set_up(parts, mesh.join("cpu", "single", 1, 1, 1))
        for number in range(3):
            window = Window(number, micro_batches, parts.run.tokens_per_step, 0)
            train_step(setup, window, lambda: 0)
    now = peak = 0
    events = device_memory.profiler.kineto_results.events()
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


EIGHT, FOUR = "batch.micro_batch_size=8", "batch.micro_batch_size=4"


@pytest.mark.parametrize(
    "overrides",
    [
        [*GPT, EIGHT, "model.dropout=0.1"],
        pytest.param([*GPT, EIGHT, FULL], marks=pytest.mark.slow),
        [*GPT, FOUR, LARGE, "batch.gradient_accumulation_steps=2", "optimizer=lion"],
        [*LLAMA, FOUR, LARGE, "optimizer=muon", "train.ema=0.9"],
        pytest.param([*LLAMA, EIGHT, "precision=bf16"], marks=pytest.mark.slow),
        [*LLAMA, EIGHT, "precision=bf16", FULL],
        [*MOE, EIGHT, "parallelism.activation_checkpointing=selective"],
        pytest.param([*MOE, EIGHT, "precision=bf16"], marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_what_is_counted_is_what_torch_allocates(overrides):
    parts = parts_of(*overrides)
    rehearsed = sum(rehearse(parts, cut_of(parts), parts.precision, None).values())
    assert rehearsed == pytest.approx(allocated(parts), rel=0.1)


def counted(*overrides: str, precision: str = "fp32", **cut: Any) -> int:
    parts = parts_of(*overrides)
    changed = dataclasses.replace(cut_of(parts), **cut)
    return sum(rehearse(parts, changed, precision, None).values())


def test_a_step_is_counted_in_which_features_hold_most():
    """One that is measured layer by layer, whether each is or few are; also for another micro-batch
    than the run's, where a feature keeps something for each."""
    every = "metrics.noise_scale_every=10"
    held = [counted(*GPT, every, *more) for more in
            ([], ["metrics.layers_every=7"], ["metrics.spikes=true"])]  # fmt: skip
    assert held[0] < held[1] == held[2]
    assert counted(*GPT, EIGHT, "clip.qk_limit=100", micro=4)


@pytest.mark.fresh
def test_a_plan_of_a_cpu_is_near_the_rows(tmp_path, capfd, monkeypatch):
    """Also where the process that starts the run holds more than the run; the C library gives back
    what is freed."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(2**16))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    asked = [*SMALL, *GPT, "batch.micro_batch_size=8", "train.eval_tokens=1024"]
    ballast = b"x" * 2**29
    assert run(["train", *asked, "hydra.run.dir=run"]) == 0
    del ballast
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    capfd.readouterr()
    assert run(["plan", "--json", *asked, "plan.device=cpu"]) == 0
    planned = json.loads(capfd.readouterr().out)["memory_bytes"]["peak"]
    # benchmarks/results/memory.md; the ballast would double the rows
    assert planned / 2**30 == pytest.approx(json.loads(rows[-1])["peak_memory_gib"], rel=0.1)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("layout", "ranks", "share", "device"),
    [("ddp", 2, 1, "cpu"), pytest.param("fsdp", 4, 4, "h200", marks=SLOW),
     pytest.param("tp", 2, 2, "h200", marks=SLOW), ("fsdp_tp", 4, 4, "h200")],
)  # fmt: skip
def test_every_layout_is_rehearsed(layout, ranks, share, device):
    """All sizes split evenly but the vectors, which tensor parallelism leaves whole."""
    more = ["parallelism.tensor_parallel_size=2"] if layout == "fsdp_tp" else []
    chosen = [f"parallelism={layout}", f"parallelism.nproc_per_node={ranks}", *more]
    parts = parts_of(*GPT, LARGE, "model.n_layers=1", "batch.micro_batch_size=4", *chosen)
    held = rehearse(parts, cut_of(parts), "bf16", device_named(device))
    assert set(held) == set(KINDS)
    part = 4 * parts.run.parameters / share
    rounding = 512 * 24  # a block for each tensor
    assert held["parameters"] == pytest.approx(part, rel=0.06, abs=rounding)
    assert held["moments"] == pytest.approx(2 * part, rel=0.06, abs=3 * rounding)
    assert held["gradients"] + held["buffers"] > 0.98 * part
    assert held["activations"] > 0
    assert held["loss"] > 0


def test_the_loss_of_a_compiled_run_is_counted():
    """Whole logits in 16 bits, in whose place their gradient comes, up to a tenth of the device,
    beside the copies of the operands; chunks beyond."""
    h200 = device_named("h200")
    parts = parts_of(*GPT, "model.vocab_size=50304", "batch.micro_batch_size=8")
    cut, rows = dataclasses.replace(cut_of(parts), micro=512), 512 * 128  # logits of 6.1 GiB
    held = {c: rehearse(parts, cut, "bf16", h200, c)["loss"] for c in (False, True)}
    by_hand = 2 * rows * 50304 + 2 * 64 * (rows + 50304)
    assert held[True] == pytest.approx(by_hand, rel=0.02)
    assert held[False] < by_hand
    more = dataclasses.replace(cut, micro=2048)
    eager, compiled = (rehearse(parts, more, "bf16", h200, c)["loss"] for c in (False, True))
    assert compiled == pytest.approx(eager, rel=0.02)


def test_the_kernel_of_the_loss_is_that_of_the_planned_device(capsys):
    asked = ["--json", *SMALL, *GPT, LARGE, "plan.device=h200", "train.device=auto"]
    for compiled, kernel in (
        ("auto", "plain, compiled with the model"),
        ("false", "chunked(rows=16384, vocab=4096)"),
    ):
        assert run(["plan", *asked, f"train.compile={compiled}"]) == 0
        assert json.loads(capsys.readouterr().out)["loss_kernel"] == kernel


def test_activations_grow_with_the_batch_and_shrink_with_recomputation():
    def activations(*overrides: str) -> int:
        parts = parts_of(*GPT, *overrides)
        return rehearse(parts, cut_of(parts), "fp32", None)["activations"]

    two = activations(EIGHT)
    assert two == pytest.approx(2 * activations(FOUR), rel=0.02)
    assert activations(EIGHT, FULL) < two / 3


def test_what_is_offloaded_is_counted_on_the_host():
    """What blocks no longer hold on the device, of one micro-batch; it moves there and back."""
    held = {}
    for kind, layers in (("full", 1), ("none", 8), ("offload", 8)):
        more = [f"model.n_layers={layers}", FOUR, "batch.gradient_accumulation_steps=2"]
        parts = parts_of(*LLAMA, *more, f"parallelism.activation_checkpointing={kind}")
        held[kind] = rehearse(parts, cut_of(parts), "bf16", device_named("h200"))
    assert set(held["full"]) == set(KINDS)
    there, left = held["none"]["activations"], held["offload"]["activations"]
    sent = held["offload"]["offloaded"]
    # weights' copies for autocast stay, and the last block's are back while it is gone through
    assert there - left == pytest.approx(sent, rel=0.25)
    assert left < there / 2
    assert 2 * sent <= held["offload"]["moved"] < 3 * sent
    need = host_need(parts, cut_of(parts), held["offload"], 10.0, on_cpu=False, behind=True)
    assert need.stages["step"] == 10 + sent
    assert need.stages["save"] == 10 + sent + held["none"]["parameters"] + held["none"]["moments"]


@pytest.mark.parametrize("model", [pytest.param(GPT, marks=SLOW), LLAMA])
def test_ranks_that_share_the_tokens_share_the_activations(model):
    """Nothing in a block is whole on a rank; outside are the embedded tokens and the last ones."""

    def activations(layers: int, *ranks: str) -> int:
        parts = parts_of(*model, f"model.n_layers={layers}", "batch.micro_batch_size=4", *ranks)
        return rehearse(parts, cut_of(parts), "bf16", device_named("h200"))["activations"]

    four = ["parallelism=tp", "parallelism.nproc_per_node=4"]
    heads = ["model.n_kv_heads=4"] if model is LLAMA else []

    def a_block(*ranks: str) -> int:
        return activations(2, *heads, *ranks) - activations(1, *heads, *ranks)

    alone, shared = a_block(), a_block(*four, "parallelism.sequence_parallel=true")
    # or less: the tokens are rounded to bf16 once for all products
    assert 0.85 * alone / 4 < shared < 1.01 * alone / 4
    assert a_block(*four) > 1.3 * shared


def test_what_would_fit_is_tried_only_where_it_can_and_as_it_would_run(monkeypatch):
    """What is offloaded is not compiled, nor by the command that is proposed. What is held between
    steps is known of the run's own cut: 12 GiB, over the ranks of FSDP."""

    def would_fit(parts: Parts, usable: float, takes: Callable[[Cut], dict[str, float]]) -> Any:
        """What is said, and the cuts that were tried."""
        tried = []

        def taken(parts: Parts, cut: Cut, precision: str, device: Any, compiled: bool) -> Any:
            kind = cut.parallelism.activation_checkpointing
            tried.append((cut.layout.shard_size, cut.micro, kind, compiled))
            held = {name: gib * memory.GIB for name, gib in takes(cut).items()}
            return dict.fromkeys(KINDS, 0) | held

        monkeypatch.setattr(memory, "rehearse", taken)
        there = memory.Room(device_named("h200"), "h200", usable * memory.GIB, usable * memory.GIB)
        rows = dict(memory.memory_sections(memory.Forecast(parts, "bf16", there, True)))
        return rows["would fit"], tried

    def by_blocks(cut: Cut) -> dict[str, float]:
        return {"activations": 9 * (cut.parallelism.activation_checkpointing != "offload")}

    def between_steps(cut: Cut) -> dict[str, float]:
        return dict.fromkeys(("parameters", "gradients", "moments"), 4 / cut.layout.shard_size)

    parts = parts_of(*LLAMA, "batch.micro_batch_size=1")
    parts = dataclasses.replace(parts, config=with_knobs(parts.config, train={"compile": True}))
    said, tried = would_fit(parts, 1, by_blocks)
    assert said.startswith("parallelism.activation_checkpointing=offload train.compile=false")
    tried = {(kind, compiled) for *_, kind, compiled in tried}
    assert {("none", True), ("full", True), ("offload", False)} <= tried
    assert ("offload", True) not in tried
    parts = parts_of(*LLAMA, EIGHT)
    for usable, ranks in ((1.7, 8), (3.2, 4), (1.5, None)):
        said, tried = would_fit(parts, usable, between_steps)
        way = f"parallelism=fsdp parallelism.nproc_per_node={ranks} (" if ranks else "nothing that"
        assert said.startswith(way)
        assert tried == [(n, 8, "none", True) for n in (1, ranks) if n]


def test_experts_of_a_plan_are_not_gone_through_one_by_one(monkeypatch):
    """As many operations for 4 as for 32, on a CPU with Muon, where a run goes through them."""
    count, dispatch = Counter[int](), Counting.__torch_dispatch__

    def counted(self: Any, *call: Any) -> Any:
        count[experts] += 1
        return dispatch(self, *call)

    monkeypatch.setattr(Counting, "__torch_dispatch__", counted)
    for experts in (4, 32):
        parts = parts_of(*MOE, "model.n_layers=1", f"model.n_experts={experts}", "optimizer=muon")
        rehearse(parts, cut_of(parts), "fp32", None)
    assert 0 < count[4] == count[32]


def planned(capsys, *overrides: str) -> str:
    assert run(["plan", *overrides]) == 0
    return " ".join(capsys.readouterr().out.split())


@pytest.fixture
def scratch(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(memory, "process_bytes", lambda threads: 0)


LIMITED = [
    *SMALL, *GPT, "plan.device=cpu", "model.n_layers=1", "model.d_model=32", "model.d_ff=64",
    "batch.sequence_length=64",
]  # fmt: skip


@pytest.mark.slow
def test_what_would_fit_is_reported_and_fits(scratch, capsys):
    cut = ["batch.micro_batch_size=4", "batch.gradient_accumulation_steps=1"]
    limited = [*LIMITED, "model.n_layers=3", "plan.memory_gib=0.002"]
    out = planned(capsys, *limited, *cut)
    assert re.search(r"fits no: [\d.]+ GiB more than the 0.002 GiB that may be used", out)
    said = out.partition("would fit ")[2].partition(" host ")[0]
    smaller, recomputed = (text.rpartition(" (")[0].strip() for text in said.split(";"))
    assert smaller.startswith("batch.micro_batch_size=")
    assert recomputed.startswith("parallelism.activation_checkpointing=")
    for change in (smaller, " ".join([*cut, recomputed])):
        assert "fits yes" in planned(capsys, *limited, *change.split())


def test_the_largest_micro_batch_that_fits_is_reported(monkeypatch):
    parts = parts_of(*LIMITED, "batch.micro_batch_size=1", "batch.real_batch_size=4")
    cut = cut_of(parts)
    monkeypatch.setattr(memory, "process_bytes", lambda threads: 0)
    once = {n: rehearse(parts, memory.cut_to(cut, n), "fp32", None) for n in (1, 2, 4)}
    needed = {n: sum(held.values()) for n, held in once.items()}
    monkeypatch.setattr(memory, "rehearse", lambda _, cut, *more: once[cut.micro])
    assert needed[1] < needed[2] < needed[4]
    for usable, expected in ((needed[1] - 1, None), (needed[2], 2), (needed[4] - 1, 2)):
        room = memory.Room(None, "cpu", usable, usable)
        found = memory.Forecast(parts, "fp32", room, False).largest(cut, 4)
        assert (None if found is None else found.micro) == expected
    rows = dict(memory.memory_sections(memory.Forecast(parts, "fp32", room, False)))
    assert rows["fits"].startswith("yes")
    assert rows["hint"].startswith("batch.micro_batch_size=2 with gradient_accumulation_steps 2 ")


def test_memory_is_planned_where_a_device_is_named(scratch, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("LLMEXP_CACHE_DIR", str(tmp_path))  # nothing was measured before
    tiny = [*TINY, "data=synthetic", "data.n_tokens=5000", "model.n_layers=1"]
    unplanned = planned(capsys, *tiny)
    assert unplanned.count("memory not planned; add plan.device=h200 (or another device)") == 1
    out = planned(capsys, *tiny, "plan.device=l4")
    assert "device l4, planned for" in out
    assert "libraries" in out
    assert "measured before" not in out


def test_what_ranks_take_of_their_host_is_planned(scratch, capsys):
    """By closed forms: beside an accelerator it is the copy that a save in the background makes."""
    sharded = [*LIMITED, "parallelism=fsdp", "parallelism.nproc_per_node=2"]
    sharded += ["model.d_model=256", "model.d_ff=1024", "batch.micro_batch_size=1", "train.ema=0.9"]
    parts = parts_of(*sharded)
    size = 4 * parts.run.parameters

    def of_host(*more: str) -> dict[str, float]:
        assert run(["plan", "--json", *sharded, *more]) == 0
        return json.loads(capsys.readouterr().out)

    near = functools.partial(pytest.approx, rel=0.02)  # rows of FSDP are rounded up
    on_cpu = of_host()["host_bytes"]
    # parameters, average and gradients; with AdamW's moments
    assert (on_cpu["start"], on_cpu["save"]) == (near(3 * size / 2), near(5 * size / 2))
    assert on_cpu["load"] == on_cpu["save"] + READ_BYTES
    assert on_cpu["of_a_host"] == 2 * on_cpu["load"]
    assert of_host("checkpoint.async=true")["host_bytes"]["save"] == near(9 * size / 2)
    found = of_host("plan.device=l4", "plan.host_gib=0.00001")
    host = found["host_bytes"]
    assert (host["start"], host["load"]) == (4 * BLOCK, READ_BYTES)
    assert host["save"] == near(4 * size / 2)
    assert not found["fits"]
    # the room to read with is each rank's, whatever the hosts
    assert "host_would_fit" not in found
    wide = ["model.d_model=512", "model.d_ff=2048"]
    small = of_host(*wide, "plan.device=l4", "plan.memory_gib=0.01", "plan.host_gib=0.045")
    assert "checkpoint.async=false" in small["host_would_fit"]
    assert "checkpoint" not in small.get("would_fit", "")  # what the device takes
    needed = HostNeed({"save": 1.0, "load": 3.0}, {"save": 12.0, "load": 0.0}, 2)
    assert (needed.total, needed.hosts(6), needed.hosts(10), needed.hosts(26)) == (26, None, 3, 1)
    assert of_host("plan.device=l4", "plan.host_gib=1")["fits"]
    out = " ".join(planned(capsys, *sharded, "plan.device=l4").split())
    assert "; give plan.host_gib=2000 to see whether that fits" in out
    assert "this host" not in out


def test_what_would_fit_names_checkpoints_that_steps_wait_for():
    behind = HostNeed({"save": 1.0}, {"save": 12.0}, 2)
    waiting = HostNeed({"save": 2}, {"save": 0}, 2)
    hosts = "2 times as many hosts (parallelism.nnodes)"
    assert host_ways(behind, waiting, 20.0, True) == ["checkpoint.async=false", hosts]
    assert host_ways(behind, waiting, 20.0, False) == ["checkpoint.async=false"]
    assert host_ways(behind, waiting, 3.0, False) == []
    assert host_ways(behind, behind, 20.0, True) == [hosts]
    rows = dict(host_rows(behind, 20.0, "plan.host_gib", ["checkpoint.async=false", hosts]))
    assert rows["would fit"] == f"checkpoint.async=false, or {hosts}"


def test_a_model_that_has_to_see_its_values_is_not_counted(scratch, capsys):
    own = ["--allow", "own", "~model", "+model={_target_: own.models.Stubborn, vocab_size: 320}"]
    data = ["data=synthetic", "data.n_tokens=5000", "batch.sequence_length=12"]
    out = planned(capsys, *TINY[7:], "model=gpt_tiny", *own, *data, "plan.device=cpu")
    assert "memory not known: the model does not run without memory" in out


def test_the_process_that_is_measured_is_quiet_where_its_plan_was_stopped():
    command, pipe = [sys.executable, "-m", "llmexp.forecast.process", "1"], subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, env=environment()) as left:
        assert left.stdout is not None
        left.stdout.close()
        assert left.stderr is not None
        assert left.stderr.read() == b""
