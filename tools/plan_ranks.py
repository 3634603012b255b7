"""Plan llama_1b on up to 1024 ranks, in one process with torch's fake process group.

    python -m tools.plan_ranks

The run's own functions compose, assemble, wrap and step, for one rank of the world; its tensors are
fake (shapes without memory) and its collectives do nothing but be counted. What the rank holds,
moves and saves has to be what formulas over the sizes of the model say, and what two real ranks
over gloo do has to be what their plan says. Prints the rows of benchmarks/results/ranks.md, and
exits with 1 where anything differs from a formula, from a real rank or from that page.

Bytes of a collective are those of the whole buffer: what an all_gather gives, what a reduce_scatter
takes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.tools import composed, option

ROOT = Path(__file__).resolve().parents[1]
LLAMA_1B = option("model/llama_1b")
# Over two ranks some parts are smaller than others, and DDP (which closes its first bucket at 1
# MiB) has two buckets.
SMALL = {
    "vocab_size": 1037,
    "n_layers": 1,
    "n_heads": 4,
    "n_kv_heads": 2,
    "d_model": 40,
    "d_ff": 4099,
}
EVEN = {**SMALL, "vocab_size": 1038, "d_ff": 4098}
FP32, FP64 = 4, 8  # bytes


@dataclass(frozen=True)
class Case:
    """One rank of a run, and how many micro-batches each window has that it steps through."""

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
    def model(self) -> dict[str, Any]:
        return {**LLAMA_1B, **(self.sizes or {})}

    @property
    def overrides(self) -> list[str]:
        p: dict[str, Any] = {"nnodes": self.nnodes, "nproc_per_node": self.nproc_per_node}
        p |= {"fsdp_communication": "once"} if self.once else {}
        p |= {"replicate_size": self.replicas} if self.kind == "hsdp" else {}
        p |= {"tensor_parallel_size": self.tp} if self.tp > 1 else {}
        return [
            "model=llama_1b", *(f"model.{key}={value}" for key,
            value in (self.sizes or {}).items()),
            f"parallelism={self.kind}", *(f"parallelism.{key}={value}" for key, value in p.items()),
            "batch.micro_batch_size=1", "batch.gradient_accumulation_steps=1",
            f"batch.sequence_length={self.length}",
            "data=synthetic", "data.n_tokens=160000", "train.max_steps=1", "train.device=cpu",
            "precision=fp32",
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


# ---- What processes of their own do: `plan_ranks plan|run CASES FILE` ----


def in_process(how: str, cases: str, file: str) -> None:
    torch.set_num_threads(1)
    gc.disable()  # it would look through every fake tensor again and again
    found = {
        name: stepped(Case(**case), planned=how == "plan")
        for name, case in json.loads(cases).items()
    }
    if dist.is_initialized():
        dist.destroy_process_group()
    Path(file).write_text(json.dumps(found), encoding="utf-8")


def stepped(case: Case, *, planned: bool) -> dict[str, Any]:
    """Return what the rank holds and would save, and the collectives of each window."""
    from llmexp import mesh
    from llmexp.checkpoint import saving
    from llmexp.data.window import Window
    from llmexp.forecast import dry_run
    from llmexp.mesh import fake_group
    from llmexp.models import chunked
    from llmexp.train.assembly.assemble import assemble
    from llmexp.train.set_up import set_up
    from llmexp.train.step import train_step

    gc.collect()
    parts = assemble(composed(*case.overrides))
    at, held, windows = parts.run.layout, list[int](), list[dict[str, list[int]]]()
    counting = Plan() if planned else Collectives()
    with contextlib.ExitStack() as stack:
        if planned:
            stack.enter_context(fake_group.pretended(case.world, case.rank))
        sizes = at.replicate_size, at.shard_size, at.tensor_parallel_size
        joined = mesh.join("cpu", case.kind, *sizes, reduces_once=case.once)
        modes = stack.enter_context(contextlib.ExitStack())
        if planned:
            # As on an accelerator: hundreds of small tiles of logits would only take time.
            whole = mock.patch.object(chunked, "chunk_sizes", return_value=(4096, 1 << 30))
            stack.enter_context(whole)
            both = counting, contextlib.nullcontext()  # it is fake and counts
            without = functools.partial(dry_run.without_memory, parts, modes, *both)
            parts = dataclasses.replace(
                parts,
                build_model=without,
                begin_model=lambda model, device, _: model.to(device),
            )
        s = set_up(parts, joined)
        if planned:
            fake_group.reduce_at_once(s.module)
        begun = itertools.count(1)

        def look(*_: Any) -> None:
            if next(begun) == sum(case.windows):
                held.append(fake_bytes())

        if planned and len(case.windows) > 1:  # or there would be no optimizer state yet
            s.module.register_forward_pre_hook(look, prepend=True)
        for number, micro_batches in enumerate(case.windows):
            counting.seen.clear()
            ids_bt = torch.zeros(1, case.length, dtype=torch.int64)
            tokens = case.length * micro_batches
            window = Window(number, [(ids_bt, ids_bt)] * micro_batches, tokens, 0)
            with contextlib.nullcontext() if planned else counting:
                train_step(s, window, lambda: 0)
            windows.append(dict(counting.seen))
        modes.close()
        states = [v for o in s.optimizers for state in o.state.values() for v in state.values()]
        files = saving.snapshot(s.model, s.optimizers, joined.rank, joined.world_size, False).files
    return {
        "parameters": storage_bytes(s.parameters),
        "gradients": storage_bytes([p.grad for p in s.parameters]),
        "optimizer": storage_bytes(states),
        "files": {name: sum(p.local.nbytes for p in own.values()) for name, own in files.items()},
        "windows": windows,
        "held": held,  # when the last micro-batch begins
    }


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
    """Fake tensors and the counting of collectives, in one mode: a mode costs each operation time.

    What the host reads is answered: any scalar is 1, and the int32 lists in which DDP's C++ code
    writes down its buckets do have memory.
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
    """Return the size of the group among an operation's arguments (or of its name); 0 without."""
    for value in args:
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return dist.ProcessGroup.unbox(value).size()
    names = [value for value in args[2:] if isinstance(value, str)]
    return dist.distributed_c10d._resolve_process_group(names[-1]).size() if names else 0


def storage_bytes(tensors: Sequence[Any]) -> int:
    """Memory of this rank's parts; what several tensors share counts once."""
    parts = [
        t.to_local() if hasattr(t, "to_local") else t for t in tensors if isinstance(t, Tensor)
    ]
    return sum({s._cdata: s.nbytes() for s in (part.untyped_storage() for part in parts)}.values())


def fake_bytes() -> int:
    gc.collect()
    return storage_bytes([t for t in gc.get_objects() if issubclass(type(t), FakeTensor)])


# ---- What starts them ----


def processes(how: str, *each: tuple[dict[str, Case], dict[str, str]]) -> list[dict[str, Any]]:
    """Return what processes found, started together, each with its cases and environment."""
    started: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for n, (cases, more) in enumerate(each):
                text = json.dumps({name: dataclasses.asdict(case) for name, case in cases.items()})
                command = [
                    sys.executable,
                    "-m",
                    "tools.plan_ranks",
                    how,
                    text,
                    f"{folder}/{n}.json",
                ]
                env = os.environ | {"OMP_NUM_THREADS": "1"} | more
                started.append(subprocess.Popen(command, cwd=ROOT, env=env))
            if any(process.wait() for process in started):
                raise RuntimeError(
                    f"a process that should {how} its cases failed; its error is above"
                )
        finally:
            for process in started:
                process.kill()
                process.wait()
        return [json.loads(Path(folder, f"{n}.json").read_text()) for n in range(len(each))]


def real_ranks() -> list[dict[str, Any]]:
    """Return what each of two ranks found."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    return processes(
        "run", *((REAL, {**address, "RANK": str(r), "LOCAL_RANK": str(r)}) for r in range(2))
    )


# ---- The formulas ----


def units(m: dict[str, Any]) -> list[list[tuple[tuple[int, ...], int | None]]]:
    """Return shapes of a Llama's parameters, and the dimension that tensor parallelism splits.

    Embedding and final norm, then the blocks, which is how FSDP takes them together."""
    d, f, v = m["d_model"], m["d_ff"], m["vocab_size"]
    kv = d // m["n_heads"] * m["n_kv_heads"]
    attention = [((d,), None), ((d, d), 0), ((kv, d), 0), ((kv, d), 0), ((d, d), 1)]
    mlp = [((d,), None), ((f, d), 0), ((f, d), 0), ((d, f), 1)]
    assert m["tied_head"]
    return [[((v, d), 0), ((d,), None)], *[[*attention, *mlp]] * m["n_layers"]]


@dataclass(frozen=True)
class Share:
    """Elements of the model per rank."""

    whole: int  # what a rank computes with: all, or its part under tensor parallelism
    padded: int  # of that, its part under FSDP, rounded up to equal numbers of rows
    own: int  # and without the rounding
    tensors: int


def share(case: Case) -> Share:
    shards = 1 if case.kind in ("ddp", "tp") else case.world // case.replicas // case.tp
    at = case.rank // case.tp % shards
    whole = padded = own = tensors = 0
    for shape, split in (parameter for unit in units(case.model) for parameter in unit):
        cut = [n // case.tp if dim == split else n for dim, n in enumerate(shape)]
        row, rows = math.prod(cut[1:]), -(-cut[0] // shards)
        whole += cut[0] * row
        padded += rows * row
        own += max(0, min(rows, cut[0] - rows * at)) * row
        tensors += 1
    return Share(whole, padded, own, tensors)


def collectives(case: Case, step: int, micro_batches: int) -> dict[str, list[int]]:
    mine, blocks, width = share(case), case.model["n_layers"], case.model["d_model"]
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
        # One bucket in the first step. Then a bucket is closed at 25 MiB: by each of a block's
        # three MLP matrices, by its attention matrices together; the embedding comes last. Rank 0
        # tells its order to the others.
        buckets = 4 * blocks + 1 if step else 1
        add("all_reduce", case.world, buckets, FP32 * mine.whole)
        if step == 1:
            add("broadcast", case.world, 2, 4 * (mine.tensors + 1 + buckets))
    elif case.kind != "tp":
        shards = dp // case.replicas
        root = share_of_root(case, shards)
        turns = 1 if case.once else micro_batches
        again = (
            0 if case.once else 1
        )  # blocks are gathered for the backward pass once more, the root is kept
        gathered = FP32 * shards * (mine.padded + again * (mine.padded - root))
        add("all_gather", shards, turns * (blocks + 1 + again * blocks), turns * gathered)
        add("reduce_scatter", shards, turns * (blocks + 1), turns * FP32 * shards * mine.padded)
        if case.replicas > 1:
            add("all_reduce", case.replicas, turns * (blocks + 1), turns * FP32 * mine.padded)
    if case.tp > 1:
        # Forward: the embedding, and what comes out of attention and MLP. Backward: what went into
        # q, k, v, gate, up.
        activations = FP32 * case.length * width
        add(
            "all_reduce",
            case.tp,
            micro_batches * (1 + 7 * blocks),
            micro_batches * (1 + 7 * blocks) * activations,
        )
        # Loss: each row's maximum, three sums of it, and the gradient of what went in.
        add(
            "all_reduce",
            case.tp,
            3 * micro_batches,
            micro_batches * (4 * FP32 * case.length + activations),
        )
    return expected


def share_of_root(case: Case, shards: int) -> int:
    (embedding, _), (norm, _) = units(case.model)[0]
    return -(-embedding[0] // case.tp // shards) * embedding[1] + -(-norm[0] // shards)


def differences(case: Case, found: dict[str, Any]) -> list[str]:
    """Name what a plan has that the formulas do not say.

    They are of fp32 parameters, gradients, two moments and a step count a tensor; of collectives;
    of a rank's own elements in its files, with the step counts, which no one splits, in those of
    rank 0."""
    mine = share(case)
    suffix = "" if case.kind == "ddp" else f"-{case.rank:05d}-of-{case.world:05d}"
    counts = mine.tensors if case.rank == 0 else 0
    windows = [
        collectives(case, step, micro_batches) for step, micro_batches in enumerate(case.windows)
    ]
    expected = {
        "parameters": FP32 * mine.padded,
        "gradients": FP32 * mine.own,
        "optimizer": FP32 * (2 * mine.own + mine.tensors),
        "files": {
            f"model{suffix}.safetensors": FP32 * mine.own,
            f"optimizer{suffix}.safetensors": FP32 * (2 * mine.own + counts),
        },
        "windows": windows,
    }
    wrong = [
        f"{key}: {found[key]}, not {value}"
        for key, value in expected.items()
        if found[key] != value
    ]
    if len(case.windows) > 1:
        # When the last micro-batch begins nothing else is there but ids and scalars: no gathered
        # parameters, no whole gradients, unless FSDP communicates once a step.
        held = FP32 * (mine.padded + 3 * mine.own + mine.tensors)
        held += FP32 * (case.world * mine.padded + mine.whole) if case.once else 0
        if not 0 <= found["held"][0] - held < 4096:
            wrong.append(f"held: {found['held'][0]}, not {held}")
    return wrong


def rows(planned: dict[str, Any]) -> Iterator[str]:
    for name in PLANNED:
        kinds = [planned[name][kind] for kind in ("parameters", "gradients", "optimizer")]
        yield f"| {name} | {' | '.join(map(size, kinds))} |"
    for name in PLANNED:
        for held in planned[name]["held"]:
            yield f"| {name} | {size(held)} |"
    for name, case in PLANNED.items():
        for micro_batches, window in zip(case.windows, planned[name]["windows"], strict=True):
            moved = "; ".join(
                f"{n} {kind}: {size(n_bytes)}" for kind, (n, n_bytes) in sorted(window.items())
            )
            yield f"| {name} | {micro_batches} | {moved} |"


def size(number_bytes: int) -> str:
    return f"{number_bytes} B" if number_bytes < 100_000 else f"{number_bytes / 1e6:,.1f} MB"


def main() -> int:
    """Plan in several processes: DTensor keeps a mesh with the rank that it first saw there."""
    second = {  # the second of the real ranks, in its second window; for DDP also in the first
        name: dataclasses.replace(
            case, rank=1, windows=case.windows[:2] if name == "ddp" else case.windows[1:2]
        )
        for name, case in REAL.items()
    }
    first = {name: case for name, case in PLANNED.items() if case.world == 1024 and case.rank == 0}
    others = {name: case for name, case in PLANNED.items() if name not in first}
    one, two = processes("plan", (first, {}), ({**others, **second}, {}))
    planned, real = one | two, real_ranks()
    wrong = [
        f"{name}: {text}"
        for name, case in PLANNED.items()
        for text in differences(case, planned[name])
    ]
    for name in REAL:
        plan, found = planned[name], real[1][name]
        keys = ("parameters", "gradients", "optimizer", "files")
        wrong += [
            f"{name}, two ranks: {key}: {found[key]}, not {plan[key]}"
            for key in keys
            if found[key] != plan[key]
        ]
        if found["windows"][:2][-len(plan["windows"]) :] != plan["windows"]:
            wrong.append(f"{name}, two ranks: {found['windows']}, not {plan['windows']}")
    page = (ROOT / "benchmarks/results/ranks.md").read_text(encoding="utf-8")
    for row in rows(planned):
        print(row)
        if row not in page:
            wrong.append(f"not in benchmarks/results/ranks.md: {row}")
    print(
        "\n".join(["", *wrong])
        if wrong
        else "\nas the formulas, two real ranks and benchmarks/results/ranks.md say"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    if sys.argv[1:]:
        in_process(*sys.argv[1:])
    else:
        sys.exit(main())
