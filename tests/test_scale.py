"""Past this machine: llama_1b on up to 1024 ranks, planned by one process with torch's fake process group.

The run's own functions compose, assemble, wrap and step, for one rank of the world; its tensors are fake (shapes
without memory) and its collectives do nothing but be counted. What the rank holds and moves has to be what formulas
over the sizes in conf/model/llama_1b.yaml say. That a plan counts what real ranks do is checked with two of them, over
gloo. The figures are those of docs/scale.md.

Bytes of a collective are those of the whole buffer: what an all_gather gives, what a reduce_scatter takes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import yaml
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.conftest import ROOT, environment, free_port

LLAMA_1B = yaml.safe_load((ROOT / "conf" / "model" / "llama_1b.yaml").read_text(encoding="utf-8"))
# Over two ranks some parts are smaller than others, and DDP (which closes its first bucket at 1 MiB) has two buckets.
SMALL = {"vocab_size": 1037, "n_layers": 1, "n_heads": 4, "n_kv_heads": 2, "d_model": 40, "d_ff": 4099}
EVEN = {**SMALL, "vocab_size": 1038, "d_ff": 4098}
FP32, FP64 = 4, 8  # bytes


@dataclass(frozen=True)
class Case:
    """One rank of a run, and how many micro-batches there are in each window that it steps through."""

    kind: str
    nnodes: int
    nproc_per_node: int
    windows: Sequence[int]
    rank: int = 0
    once: bool = False
    replicas: int = 1
    tp: int = 1
    length: int = 128  # tokens of a micro-batch, which is one sequence
    sizes: dict[str, int] | None = None  # of the model, where they are not those of llama_1b

    @property
    def world(self) -> int:
        return self.nnodes * self.nproc_per_node

    @property
    def overrides(self) -> list[str]:
        p: dict[str, Any] = {"nnodes": self.nnodes, "nproc_per_node": self.nproc_per_node}
        p |= {"fsdp_communication": "once"} if self.once else {}
        p |= {"replicate_size": self.replicas} if self.kind == "hsdp" else {}
        p |= {"tensor_parallel_size": self.tp} if self.tp > 1 else {}
        return [
            "model=llama_1b", *(f"model.{key}={value}" for key, value in (self.sizes or {}).items()),
            f"parallelism={self.kind}", *(f"parallelism.{key}={value}" for key, value in p.items()),
            "batch.micro_batch_size=1", "batch.gradient_accumulation_steps=1", f"batch.sequence_length={self.length}",
            "data=synthetic", "data.n_tokens=160000", "train.max_steps=1", "train.device=cpu", "precision=fp32",
            "tracker=none",
        ]  # fmt: skip


PLANNED = {
    "ddp 1024": Case("ddp", 128, 8, (1, 2)),
    "fsdp 1024": Case("fsdp", 128, 8, (1, 4)),
    "fsdp 1024, last rank": Case("fsdp", 128, 8, (1,), rank=1023),
    "fsdp 1024, once": Case("fsdp", 128, 8, (1, 4), once=True),
    "hsdp 128 x 8": Case("hsdp", 128, 8, (1,), replicas=128),
    "fsdp_tp 64 x 8": Case("fsdp_tp", 64, 8, (1,), tp=8),
    "tp 8": Case("tp", 1, 8, (1,), tp=8),
}
REAL = {
    "ddp": Case("ddp", 1, 2, (1, 2, 4), length=16, sizes=SMALL),
    "fsdp": Case("fsdp", 1, 2, (1, 2, 4), length=16, sizes=SMALL),
    "fsdp, once": Case("fsdp", 1, 2, (1, 2, 4), once=True, length=16, sizes=SMALL),
    "tp": Case("tp", 1, 2, (1, 2, 4), tp=2, length=16, sizes=EVEN),
}


# ---- What processes of their own do: `python -m tests.test_scale plan|run CASES FILE` ----


def main(how: str, cases: str, file: str) -> None:
    torch.set_num_threads(1)
    gc.disable()  # it would look through every fake tensor again and again
    found = {name: stepped(Case(**case), planned=how == "plan") for name, case in json.loads(cases).items()}
    if dist.is_initialized():
        dist.destroy_process_group()
    Path(file).write_text(json.dumps(found), encoding="utf-8")


def stepped(case: Case, *, planned: bool) -> dict[str, Any]:
    """What the rank holds and would save after the case's windows, and the collectives of each of them."""
    from llmexp import saving
    from llmexp.data.reader import Window
    from llmexp.train.step import set_up, train_step

    gc.collect()
    parts, joined = joined_parts(case, planned=planned)
    held: list[int] = []
    windows: list[dict[str, list[int]]] = []
    with contextlib.ExitStack() as stack:
        collectives = Plan() if planned else Collectives()
        if planned:
            parts = stack.enter_context(without_memory(parts, collectives))
        s = set_up(parts, joined)
        if planned and case.kind == "ddp":
            s.module.register_comm_hook(None, all_reduced)
        begun = itertools.count(1)

        def look(*_: Any) -> None:
            if next(begun) == sum(case.windows):
                held.append(fake_bytes())

        if planned and len(case.windows) > 1:  # or there would be no optimizer state yet
            s.module.register_forward_pre_hook(look, prepend=True)

        def step(number: int) -> None:
            ids_bt = torch.zeros(1, case.length, dtype=torch.int64)
            micro_batches = case.windows[number]
            window = Window(number, [(ids_bt, ids_bt)] * micro_batches, case.length * micro_batches, 0)
            train_step(s, window, lambda: 0)

        for number in range(len(case.windows)):
            collectives.seen.clear()
            with contextlib.nullcontext() if planned else collectives:
                step(number)
            windows.append(dict(collectives.seen))
        if not planned:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
                step(-1)
    states = [value for o in s.optimizers for state in o.state.values() for value in state.values()]
    files = saving.snapshot(s.model, s.optimizers, joined.rank, joined.world_size, copy=False).files
    if planned:
        dist.destroy_process_group()
    return {
        "parameters": storage_bytes(s.parameters),
        "gradients": storage_bytes([p.grad for p in s.parameters]),
        "optimizer": storage_bytes(states),
        "files": {name: sum(t.nbytes for t, _, _ in pieces.values()) for name, pieces in files.items()},
        "windows": windows,
        "held": held,  # when the last micro-batch begins
        "profiled": {} if planned else calls(profiler),  # in one more step like the last
    }


def joined_parts(case: Case, *, planned: bool) -> tuple[Any, Any]:
    """The parts of the run, and this rank's mesh."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from llmexp import launch, mesh
    from llmexp.assemble import assemble

    with launch.hydra_app(None) as hydra:
        config = launch.typed(launch.compose(hydra, case.overrides)[0])
    parts = assemble(config, write=False)
    if planned:
        os.environ |= {"RANK": str(case.rank), "WORLD_SIZE": str(case.world)}
        dist.init_process_group("fake", store=FakeStore(), rank=case.rank, world_size=case.world)
    at = parts.run.facts.layout
    sizes = at.replicate_size, at.shard_size, at.tensor_parallel_size
    return parts, mesh.join("cpu", case.kind, *sizes, once=case.once)


class Collectives(TorchDispatchMode):
    """Counts collectives, by kind and size of the group: [how many, bytes]."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, list[int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # it comes again, with what the rank has of it
        out = func(*args, **(kwargs or {}))
        count(self.seen, func, args, out)
        return out


class Plan(FakeTensorMode):
    """Fake tensors, counting collectives (in one mode, because each costs time with every operation).

    What the host reads is answered: any scalar is 1, and the int32 lists in which DDP's C++ code writes down its
    buckets do have memory.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.seen: dict[str, list[int]] = {}

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten, kwargs = torch.ops.aten, kwargs or {}
        if func is aten._local_scalar_dense.default:
            return 1
        if (func is aten.empty.memory_format and kwargs.get("dtype") == torch.int32) or (
            func is aten.copy_.default and args[0].dtype == torch.int32
        ):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        out = super().dispatch(func, types, args, kwargs)
        count(self.seen, func, args, out)
        return out


KINDS = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "broadcast_": "broadcast",
}


def count(seen: dict[str, list[int]], func: Any, args: Any, out: Any) -> None:
    if func.namespace not in ("c10d", "_c10d_functional") or not (ranks := group_size(args)):
        return
    name = func.overloadpacket.__name__
    row = seen.setdefault(f"{KINDS.get(name, name)} over {ranks}", [0, 0])
    row[0] += 1
    row[1] += max(t.nbytes for t in tree_leaves((args, out)) if isinstance(t, Tensor))


def group_size(args: Any) -> int:
    """Ranks of the group that is among an operation's arguments, as an object or by its name; 0 where there is none."""
    for value in args:
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return dist.ProcessGroup.unbox(value).size()
    names = [value for value in args[2:] if isinstance(value, str)]
    return dist.distributed_c10d._resolve_process_group(names[-1]).size() if names else 0


def calls(profiler: Any) -> dict[str, int]:
    """Collectives by kind, as torch's profiler has seen them."""
    names = [e.name().removeprefix("c10d::") for e in profiler.profiler.kineto_results.events()]
    return {kind: names.count(name) for name, kind in KINDS.items() if name in names}


def storage_bytes(tensors: Sequence[Any]) -> int:
    """Memory of this rank's parts; what several tensors share counts once."""
    parts = [t.to_local() if hasattr(t, "to_local") else t for t in tensors if isinstance(t, Tensor)]
    return sum({s._cdata: s.nbytes() for s in (part.untyped_storage() for part in parts)}.values())


def fake_bytes() -> int:
    gc.collect()
    return storage_bytes([t for t in gc.get_objects() if issubclass(type(t), FakeTensor)])


@contextlib.contextmanager
def without_memory(parts: Any, fake: FakeTensorMode) -> Iterator[Any]:
    """The parts of a run whose model is made on the meta device, and becomes fake when it is moved from there.

    (Fake from the start it would take minutes: fully_shard cuts each parameter into as many parts as there are ranks.)
    """
    from llmexp.models import loss

    build, sizes = parts.build_model, loss._chunk_sizes
    with contextlib.ExitStack() as stack:

        def build_model() -> nn.Module:
            with torch.device("meta"):
                model = build()

            def to(device: torch.device) -> None:
                if any(p.is_meta for p in model.parameters()):
                    stack.enter_context(fake)
                    model.to_empty(device=device)

            model.to = to
            return model

        # As on an accelerator: hundreds of small tiles of logits would only take time.
        stack.enter_context(mock.patch.object(loss, "_chunk_sizes", return_value=sizes(torch.device("cuda"))))
        # DDP compares the ranks' shapes, and a fake group brings none from the others.
        stack.enter_context(mock.patch("torch.nn.parallel.distributed._verify_param_shape_across_processes"))
        yield dataclasses.replace(parts, build_model=build_model)


def all_reduced(state, bucket):
    """What DDP does with a bucket, for a fake group, whose own futures hold no result. (DDP refuses annotations that
    are texts, as they are in this file.)
    """
    dist.all_reduce(bucket.buffer())
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


# ---- The tests ----


def processes(folder: Path, how: str, *each: tuple[dict[str, Case], dict[str, str]]) -> list[dict[str, Any]]:
    """What processes found that were started together, each with its cases and its environment."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        for n, (cases, env) in enumerate(each):
            text = json.dumps({name: dataclasses.asdict(case) for name, case in cases.items()})
            command = [sys.executable, "-m", "tests.test_scale", how, text, str(folder / f"{n}.json")]
            with open(folder / f"{n}.log", "wb") as log:
                started.append(
                    subprocess.Popen(command, cwd=ROOT, env=environment(**env), stdout=log, stderr=subprocess.STDOUT)
                )
        for n, process in enumerate(started):
            assert process.wait(timeout=600) == 0, (folder / f"{n}.log").read_text()
    finally:
        for process in started:
            process.kill()
            process.wait()
    return [json.loads((folder / f"{n}.json").read_text()) for n in range(len(each))]


@pytest.fixture(scope="module")
def planned(tmp_path_factory) -> dict[str, Any]:
    """The plans for llama_1b, and for the second of the real ranks (its second window; for DDP also the first).

    DTensor remembers a mesh with the rank that it first saw there, so no process plans for two ranks of one mesh.
    """
    second = {
        name: dataclasses.replace(case, rank=1, windows=case.windows[:2] if name == "ddp" else case.windows[1:2])
        for name, case in REAL.items()
    }
    first = {name: case for name, case in PLANNED.items() if case.world == 1024 and case.rank == 0}
    others = {name: case for name, case in PLANNED.items() if name not in first}
    found = processes(tmp_path_factory.mktemp("planned"), "plan", (first, {}), ({**others, **second}, {}))
    return found[0] | found[1]


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> list[dict[str, Any]]:
    """What each of two ranks found."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = [(REAL, {**address, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(2)]
    return processes(tmp_path_factory.mktemp("real"), "run", *ranks)


def units() -> list[list[tuple[tuple[int, ...], int | None]]]:
    """Shapes of llama_1b's parameters, and the dimension that tensor parallelism splits: embedding and final norm, then
    the blocks, which is how FSDP takes them together."""
    m = LLAMA_1B
    d, f, v = m["d_model"], m["d_ff"], m["vocab_size"]
    kv = d // m["n_heads"] * m["n_kv_heads"]
    attention = [((d,), None), ((d, d), 0), ((kv, d), 0), ((kv, d), 0), ((d, d), 1)]
    mlp = [((d,), None), ((f, d), 0), ((f, d), 0), ((d, f), 1)]
    assert m["tied_head"]
    return [[((v, d), 0), ((d,), None)], *[[*attention, *mlp]] * m["n_layers"]]


@dataclass(frozen=True)
class Share:
    """Elements of llama_1b per rank."""

    whole: int  # what a rank computes with: all, or its part under tensor parallelism
    padded: int  # of that, its part under FSDP, rounded up to equal numbers of rows
    own: int  # and without the rounding
    tensors: int


def share(case: Case) -> Share:
    shards = 1 if case.kind in ("ddp", "tp") else case.world // case.replicas // case.tp
    at = case.rank // case.tp % shards
    whole = padded = own = tensors = 0
    for shape, split in (parameter for unit in units() for parameter in unit):
        cut = [n // case.tp if dim == split else n for dim, n in enumerate(shape)]
        row, rows = math.prod(cut[1:]), -(-cut[0] // shards)
        whole += cut[0] * row
        padded += rows * row
        own += max(0, min(rows, cut[0] - rows * at)) * row
        tensors += 1
    return Share(whole, padded, own, tensors)


@pytest.mark.parametrize("name", PLANNED)
def test_what_a_rank_holds(planned, name):
    """fp32 parameters and gradients, two fp32 moments and a step count for each tensor."""
    case, found = PLANNED[name], planned[name]
    mine = share(case)
    assert found["parameters"] == FP32 * mine.padded
    assert found["gradients"] == FP32 * mine.own
    assert found["optimizer"] == FP32 * (2 * mine.own + mine.tensors)
    if len(case.windows) > 1:
        # When the last micro-batch begins nothing else is there but ids and scalars: no gathered parameters, no whole
        # gradients, unless FSDP communicates once a step.
        expected = found["parameters"] + found["gradients"] + found["optimizer"]
        if case.once:
            expected += FP32 * (case.world * mine.padded + mine.whole)
        assert 0 <= found["held"][0] - expected < 4096


def test_the_parts_of_all_ranks_are_the_model():
    case = PLANNED["fsdp 1024"]
    parts = [share(dataclasses.replace(case, rank=rank)).own for rank in range(case.world)]
    assert sum(parts) == share(PLANNED["ddp 1024"]).whole
    assert parts[0] > parts[-1] > 0  # the cut is uneven


def collectives(case: Case, step: int, micro_batches: int) -> dict[str, list[int]]:
    mine, blocks, width = share(case), LLAMA_1B["n_layers"], LLAMA_1B["d_model"]
    expected: dict[str, list[int]] = {}

    def add(kind: str, ranks: int, number: int, number_bytes: int) -> None:
        row = expected.setdefault(f"{kind} over {ranks}", [0, 0])
        row[0] += number
        row[1] += number_bytes

    dp = case.world // case.tp
    if dp > 1:
        add("all_reduce", dp, 2, FP64 + FP32)  # number of targets, loss
    if case.kind != "ddp":
        add("all_reduce", case.world, 1, FP64)  # norm
    if case.kind == "ddp":
        # One bucket in the first step. Then a bucket is closed at 25 MiB: by each of a block's three MLP matrices, by
        # its attention matrices together; the embedding comes last. Rank 0 tells its order to the others.
        buckets = 4 * blocks + 1 if step else 1
        add("all_reduce", case.world, buckets, FP32 * mine.whole)
        if step == 1:
            add("broadcast", case.world, 2, 4 * (mine.tensors + 1 + buckets))
    elif case.kind != "tp":
        shards = dp // case.replicas
        root = share_of_root(case, shards)
        turns = 1 if case.once else micro_batches
        again = 0 if case.once else 1  # blocks are gathered for the backward pass once more, the root is kept
        gathered = FP32 * shards * (mine.padded + again * (mine.padded - root))
        add("all_gather", shards, turns * (blocks + 1 + again * blocks), turns * gathered)
        add("reduce_scatter", shards, turns * (blocks + 1), turns * FP32 * shards * mine.padded)
        if case.replicas > 1:
            add("all_reduce", case.replicas, turns * (blocks + 1), turns * FP32 * mine.padded)
    if case.tp > 1:
        # Forward: the embedding, and what comes out of attention and MLP. Backward: what went into q, k, v, gate, up.
        activations = FP32 * case.length * width
        add("all_reduce", case.tp, micro_batches * (1 + 7 * blocks), micro_batches * (1 + 7 * blocks) * activations)
        # Loss: each row's maximum, three sums of it, and the gradient of what went in.
        add("all_reduce", case.tp, 3 * micro_batches, micro_batches * (4 * FP32 * case.length + activations))
    return expected


def share_of_root(case: Case, shards: int) -> int:
    (embedding, _), (norm, _) = units()[0]
    return -(-embedding[0] // case.tp // shards) * embedding[1] + -(-norm[0] // shards)


@pytest.mark.parametrize("name", PLANNED)
def test_what_a_step_moves(planned, name):
    case, found = PLANNED[name], planned[name]["windows"]
    assert found == [collectives(case, step, micro_batches) for step, micro_batches in enumerate(case.windows)]


@pytest.mark.parametrize("name", PLANNED)
def test_what_a_rank_saves(planned, name):
    """Its own elements, once; the step counts, which no one splits, are rank 0's."""
    case = PLANNED[name]
    mine = share(case)
    suffix = "" if case.kind == "ddp" else f"-{case.rank:05d}-of-{case.world:05d}"
    counts = mine.tensors if case.rank == 0 else 0
    assert planned[name]["files"] == {
        f"model{suffix}.safetensors": FP32 * mine.own,
        f"optimizer{suffix}.safetensors": FP32 * (2 * mine.own + counts),
    }


@pytest.mark.parametrize("name", REAL)
def test_real_ranks_do_what_their_plan_says(planned, real, name):
    plan, found = planned[name], real[1][name]
    for key in ("parameters", "gradients", "optimizer", "files"):
        assert found[key] == plan[key], key
    assert found["windows"][:2][-len(plan["windows"]) :] == plan["windows"]
    assert all(each[name]["windows"] == found["windows"] for each in real)


@pytest.mark.parametrize("name", REAL)
def test_the_profiler_sees_the_collectives_that_were_counted(real, name):
    numbers: dict[str, int] = {}
    for kind, (number, _) in real[0][name]["windows"][-1].items():
        numbers[kind.split()[0]] = numbers.get(kind.split()[0], 0) + number
    assert real[0][name]["profiled"] == numbers


@pytest.mark.parametrize("name", REAL)
def test_what_grows_with_the_accumulation(real, name):
    """Nothing for DDP and for FSDP that communicates once a step. Otherwise all but the scalars of a step, linearly."""
    one, two, four = ({k: v for k, v in w.items() if "broadcast" not in k} for w in real[0][name]["windows"])
    grows = {"fsdp": {"all_gather over 2", "reduce_scatter over 2"}, "tp": {"all_reduce over 2"}}.get(name, set())
    assert one.keys() == two.keys() == four.keys() >= grows
    for kind in one:
        (n1, bytes1), (n2, bytes2), (n4, bytes4) = one[kind], two[kind], four[kind]
        if kind in grows:
            assert n2 > n1
            assert (n4 - n2, bytes4 - bytes2) == (2 * (n2 - n1), 2 * (bytes2 - bytes1))
        else:
            assert bytes1 == bytes2 == bytes4
            assert n2 == n4
            assert n1 == n2 or name == "ddp"  # which finds its buckets in the first step


def test_the_figures_in_the_docs(planned):
    """Each is a row of docs/scale.md, so that the page cannot say anything else."""
    page = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    for row in rows(planned):
        assert row in page, row


def rows(planned: dict[str, Any]) -> Iterator[str]:
    for name in PLANNED:
        kinds = [planned[name][kind] for kind in ("parameters", "gradients", "optimizer")]
        yield f"| {name} | {' | '.join(map(size, kinds))} |"
    for name in PLANNED:
        for held in planned[name]["held"]:
            yield f"| {name} | {size(held)} |"
    for name, case in PLANNED.items():
        for micro_batches, window in zip(case.windows, planned[name]["windows"], strict=True):
            moved = "; ".join(f"{n} {kind}: {size(n_bytes)}" for kind, (n, n_bytes) in sorted(window.items()))
            yield f"| {name} | {micro_batches} | {moved} |"


def size(number_bytes: int) -> str:
    return f"{number_bytes} B" if number_bytes < 100_000 else f"{number_bytes / 1e6:,.1f} MB"


if __name__ == "__main__":
    main(*sys.argv[1:])
