"""What `llmexp plan` counts against what torch's allocator gives out, on a CUDA device or an
emulated one whose allocator is torch's own.

    python tests/benchmarks/bench_plan.py            # as a table, with the worst error

Each case is a real step in a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

FULL, SELECTIVE = "full", "selective"
CASES = [  # model, precision, micro-batch, length, recomputation, layout
    ("gpt2_small", "bf16", 1, 1024, "none", "single"),
    ("gpt2_small", "bf16", 8, 1024, "none", "single"),
    ("gpt2_small", "bf16", 32, 1024, "none", "single"),
    ("gpt2_small", "bf16", 32, 256, "none", "single"),
    ("gpt2_small", "bf16", 8, 1024, SELECTIVE, "single"),
    ("gpt2_small", "bf16", 8, 1024, FULL, "single"),
    ("gpt2_small", "fp32", 8, 1024, "none", "single"),
    ("gpt2_small", "fp16", 8, 1024, "none", "single"),
    ("gpt2_small", "bf16", 8, 1024, "none", "ddp"),
    ("gpt2_small", "bf16", 8, 1024, "none", "fsdp"),
    ("gpt2_small", "bf16", 8, 1024, FULL, "fsdp"),
    ("gpt2_medium", "bf16", 8, 1024, "none", "single"),
    ("llama_100m", "bf16", 8, 1024, "none", "single"),
    ("llama_100m", "bf16", 32, 512, FULL, "single"),
    ("llama_1b", "bf16", 4, 1024, "none", "single"),
    ("llama_1b", "bf16", 4, 2048, FULL, "fsdp"),
]
RANKS = 4


def overrides(case: tuple) -> list[str]:
    model, precision, micro, length, recomputation, layout = case
    ranks = [] if layout == "single" else [f"parallelism.nproc_per_node={RANKS}"]
    return [
        f"model={model}", "model.vocab_size=50304", "tokenizer=bytes", f"precision={precision}",
        f"batch.micro_batch_size={micro}", f"batch.sequence_length={length}",
        f"parallelism={layout}", *ranks, f"parallelism.activation_checkpointing={recomputation}",
        "data=synthetic", "data.n_tokens=300000", "tracker=none",
        "batch.gradient_accumulation_steps=1",
    ]  # fmt: skip


def measured(case: tuple) -> dict[str, float]:
    """The peak of a real step by torch's allocator and what a plan counts, made on tensors of the
    same device and of a CPU; MiB."""
    import torch

    from llmexp import mesh
    from llmexp.compose import app
    from llmexp.data.reader import Window
    from llmexp.forecast import memory
    from llmexp.forecast.planning import placeable
    from llmexp.forecast.rehearsal import cut_of, rehearse
    from llmexp.mesh import pretend
    from llmexp.metrics.devices import device_named
    from llmexp.train.assembly.assemble import assemble
    from llmexp.train.step import set_up, train_step

    with app.hydra_app(None) as hydra:
        config = app.typed(app.compose(hydra, overrides(case))[0])
    parts = assemble(placeable(config), write=False)
    cut, h200, there = cut_of(parts), device_named("h200"), torch.cuda.is_available
    counted = rehearse(parts, cut, case[1], h200).peak
    torch.cuda.is_available = lambda: False
    elsewhere = rehearse(parts, cut, case[1], h200).peak
    torch.cuda.is_available = there
    import dataclasses

    parts = dataclasses.replace(parts, device=torch.device("cuda"), precision=case[1])
    at = cut.layout
    with pretend.pretended(at.world_size):
        sizes = at.replicate_size, at.shard_size, at.tensor_parallel_size
        setup = set_up(parts, mesh.join("cuda", case[5], *sizes))
        pretend.reduce_at_once(setup.module)
        ids_bt = torch.zeros(case[2], case[3], dtype=torch.int64)
        for number in range(2):
            torch.cuda.reset_peak_memory_stats()
            train_step(setup, Window(number, [(ids_bt, ids_bt)], ids_bt.numel(), 0), lambda: 0)
    libraries = memory.WORKSPACES["h"]
    return {
        "allocated": torch.cuda.max_memory_allocated() / 2**20,
        "reserved": torch.cuda.max_memory_reserved() / 2**20,
        "planned": (counted + libraries) / 2**20,
        "planned without CUDA": (elsewhere + libraries) / 2**20,
    }


def main() -> int:
    heads = ("model", "precision", "micro-batch", "length", "recomputation", "layout")
    columns = ("allocated", "reserved", "planned", "planned without CUDA")
    print("| " + " | ".join((*heads, *columns, "error")) + " |")
    print("|" + "---|" * (len(heads) + len(columns) + 1))
    worst = 0.0
    for number, case in enumerate(CASES):
        command = [sys.executable, __file__, str(number)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(f"| {' | '.join(map(str, case))} | failed: {done.stderr.strip()[-300:]} |")
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        errors = [found[name] / found["allocated"] - 1 for name in columns[2:]]
        worst = max([worst, *map(abs, errors)])
        shown = [*map(str, case), *(f"{found[name]:,.0f}" for name in columns)]
        text = ", ".join(f"{e:+.1%}" for e in errors)
        print("| " + " | ".join([*shown, text]) + " |", flush=True)
    print(f"\nworst error {worst:.1%}")
    return int(worst > 0.1)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measured(CASES[int(sys.argv[1])])))
    else:
        sys.exit(main())
