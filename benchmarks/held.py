"""Resident memory of the ranks of a sharded run at its start, at a save and at a load.

    python benchmarks/held.py [--ranks 4] [--kind fsdp] [--layers 28] [--width 1024] [--json FILE]
    python benchmarks/held.py --alone cpu        # or cuda: the start of one of 8 ranks of llama3_8b

The ranks are processes of this host that talk over gloo. Each does what a run does, in three stages
whose peaks the kernel takes one by one (VmHWM, set back before each): it builds its parts of a
GPT-2 (404 M parameters by default) with gradients and optimizer; it saves a checkpoint with
AdamW's moments; it forgets all and loads that. A tiny model gives the baseline of each stage.

Share: what a rank has to hold, bytes of the model / ranks: parameters and gradients at the start,
and the two moments at save and load. The bound is baseline + 1.3 x share + the largest slice.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STAGES = {"start": 2, "save": 4, "load": 4}  # tensors of the size of the model
GIB = 2**30
HERE = str(Path(__file__).resolve())


def overrides(args: argparse.Namespace, layers: int, width: int, vocabulary: int) -> list[str]:
    return [
        "model=gpt2_small", f"model.n_layers={layers}", f"model.d_model={width}",
        f"model.d_ff={4 * width}", f"model.n_heads={max(1, width // 64)}",
        f"model.vocab_size={vocabulary}", "data=synthetic", "data.n_tokens=5000",
        "precision=fp32", "train.device=cpu", "batch.micro_batch_size=1",
        "batch.sequence_length=8", f"parallelism={args.kind}",
        f"parallelism.nproc_per_node={args.ranks}", "train.compile=false",
    ]  # fmt: skip


class Peak:
    """The peak of this process since the last stage, in bytes."""

    def __init__(self) -> None:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        self._begin = time.monotonic()

    def taken(self) -> tuple[float, float]:
        line = next(
            one for one in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in one
        )
        return int(line.split()[1]) * 1024, time.monotonic() - self._begin


def rank(job: dict[str, Any]) -> None:
    """Go through the stages as one rank, and write what they took."""
    import torch
    import torch.distributed as dist

    from llmexp import mesh
    from llmexp.checkpoint import loading, saving
    from llmexp.compose import app
    from llmexp.train.assembly.assemble import assemble
    from llmexp.train.set_up import set_up

    torch.set_num_threads(1)
    with app.hydra_app(None) as hydra:
        parts = assemble(app.typed_config(app.compose(hydra, job["overrides"])[0]))
    at = parts.run.layout
    sizes = at.replicate_size, at.shard_size, at.tensor_parallel_size
    joined = mesh.join("cpu", parts.config.parallelism.kind, *sizes)
    root, found = Path(job["folder"]) / "checkpoints", {}
    dist.barrier()

    peak = Peak()
    setup = set_up(parts, joined)
    found["start"] = peak.taken()
    for optimizer in setup.optimizers:
        optimizer.step()
    dist.barrier()

    peak = Peak()
    pieces = saving.snapshot(
        setup.model, setup.optimizers, joined.rank, joined.world_size, copy=False
    )
    saving.write_pieces(root, 1, pieces)
    dist.barrier()
    if joined.rank == 0:
        saving.commit_checkpoint(root, 1, pieces, {}, {}, None)
    dist.barrier()
    found["save"] = peak.taken()
    del setup, pieces, optimizer
    gc.collect()

    peak = Peak()
    loaded = loading.newest_whole(root, print, joined)
    assert loaded is not None
    setup = set_up(parts, joined, fresh=False)
    loading.restore_model(loaded, setup.model)
    loading.restore_optimizers(loaded, setup.model, setup.optimizers)
    found["load"] = peak.taken()
    held = [mesh.local_part(p).nbytes for p in setup.model.parameters()]
    found["share"], found["slice"] = sum(held), max(held)
    (Path(job["folder"]) / f"{joined.rank}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)


def alone(device: str, number: int = 1) -> int:
    """Set up one of 8 ranks of llama3_8b, whose collectives do nothing, and print what it takes."""
    import torch

    from llmexp import mesh
    from llmexp.compose import app
    from llmexp.mesh.fake_group import pretended
    from llmexp.train.assembly.assemble import assemble
    from llmexp.train.set_up import set_up

    torch.set_num_threads(1)
    wanted = ["model=llama3_8b", "data=synthetic", "data.n_tokens=400000", f"train.device={device}"]
    wanted += ["parallelism=fsdp", "parallelism.nproc_per_node=8", "batch.micro_batch_size=1"]
    wanted += [f"precision={'fp32' if device == 'cpu' else 'bf16'}", "train.compile=false"]
    with app.hydra_app(None) as hydra:
        parts = assemble(app.typed_config(app.compose(hydra, wanted)[0]))
    with pretended(8, number):
        joined = mesh.join(device, "fsdp", *parts.run.layout.sizes)
        torch.zeros(1, device=joined.device)  # makes CUDA's context
        peak, since = Peak(), time.process_time()
        before, _ = peak.taken()
        setup = set_up(parts, joined)
        found = {"process": before, "peak": peak.taken()[0]}
        found["parameters"] = sum(mesh.local_part(p).nbytes for p in setup.model.parameters())
        if device == "cuda":
            found["device"] = torch.cuda.max_memory_allocated()
        print("GiB: " + ", ".join(f"{key} {size / GIB:.2f}" for key, size in found.items()))
        print(f"{time.process_time() - since:.1f} s of a core")
        sys.stdout.flush()
        os._exit(0)


def measure(args: argparse.Namespace, wanted: list[str]) -> list[dict[str, Any]]:
    """Return what each rank found with a model."""
    with tempfile.TemporaryDirectory(prefix="llmexp-held-", dir=args.folder) as folder:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        job = json.dumps({"overrides": wanted, "folder": folder})
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        meeting |= {"WORLD_SIZE": str(args.ranks), "LOCAL_WORLD_SIZE": str(args.ranks)}
        ranks = [
            subprocess.Popen(
                [sys.executable, HERE, "--job", job],
                env=os.environ | meeting | {"RANK": str(n), "LOCAL_RANK": str(n)},
            )
            for n in range(args.ranks)
        ]
        codes = [one.wait() for one in ranks]
        if any(codes):
            raise SystemExit("a rank failed")
        return [json.loads((Path(folder) / f"{n}.json").read_text()) for n in range(args.ranks)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--kind", default="fsdp")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=50304)
    parser.add_argument("--folder", help="where checkpoints are written")
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--alone", choices=("cpu", "cuda"))
    args = parser.parse_args()
    if args.alone:
        return alone(args.alone)
    if args.job:
        rank(json.loads(args.job))
    base = measure(args, overrides(args, 1, 64, 320))
    full = measure(args, overrides(args, args.layers, args.width, args.vocabulary))
    rows, within = [], True
    for stage, tensors in STAGES.items():
        for number, (small, large) in enumerate(zip(base, full, strict=True)):
            share = tensors * large["share"]
            bound = small[stage][0] + 1.3 * share + large["slice"]
            row = {"stage": stage, "rank": number, "baseline": small[stage][0], "share": share}
            row |= {"slice": large["slice"], "peak": large[stage][0], "bound": bound}
            rows.append(row | {"seconds": large[stage][1]})
            within = within and large[stage][0] <= bound
    keys = ("baseline", "share", "slice", "peak", "bound")
    print(f"{'GiB a rank':<12}" + "".join(f"{key:>10}" for key in (*keys, "seconds")))
    for row in rows:
        figures = "".join(f"{row[key] / GIB:10.2f}" for key in keys)
        print(f"{row['stage']:<7} {row['rank']:<4}{figures}{row['seconds']:10.1f}")
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=2) + "\n")
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
