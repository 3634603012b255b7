"""On a CUDA device: speed and memory of gpt2_small and llama_1b at length 1024 in bf16, in turns
with a loop written by hand.

    python benchmarks/gpu.py [--out DIR] [--minutes 9] [--model gpt2_small] [--all]
    [--small] [--costs [--only REGEX]] [OVERRIDE ...]

Both make steps of the same model, batch and arithmetic in this process, the one by hand compiled as
a whole, in turns of 5 steps, so that both see the same clocks. The goals come first; `--all` adds
runs without torch.compile and with recomputation. Before each case the rate of the device in plain
bf16 matrix products is measured. A case that no longer fits before the deadline is left out.
DIR/cuda.json is written after each case, kernel tables beside it; nothing is saved at the end of
training. `--costs` measures instead what options add to a step of gpt2_small without accumulation,
each in turns with the plain step: figures layer by layer, rules of clipping, optimizers. `--small`
is a rehearsal with tiny sizes. Goals on one H200: 55 % of the measured matrix
rate, 0.98 of the loop by hand. Where there is no CUDA device it says so and measures nothing.

A machine whose Python has torch only needs the wheels of hydra-core, omegaconf and
antlr4-python3-runtime: `pip wheel --wheel-dir wheels hydra-core omegaconf` where there is a
network, there `pip install --no-index --find-links wheels hydra-core`.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import re
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gpu_steps as steps
import torch

MODELS = {"gpt2_small": (32, 4), "llama_1b": (8, 4)}  # micro-batch, accumulation
SECONDS = 150  # that a case may need, two compilations included
LIMITS = "[{match: '*.attention.*', max_norm: 1.0}, {match: '*', max_norm: 1.0}]"
COSTS = {
    "plain, once more": [],
    "layers, each step": ["metrics.layers_every=1"],
    "noise scale, each step": ["metrics.noise_scale_every=1"],
    "average of the weights": ["train.ema=0.999"],
    "clip=value": ["clip=value"],
    "clip=adaptive": ["clip=adaptive"],
    "clip=zscore": ["clip=zscore", "clip.warmup_steps=2"],
    "clip=quantile": ["clip=quantile", "clip.warmup_steps=2"],
    "clip=per_group": ["clip=per_group", f"clip.limits={LIMITS}"],
    "clip=update": ["clip=update"],
    "clip.qk_limit=100": ["clip.qk_limit=100"],
    "optimizer=lion": ["optimizer=lion"],
    "optimizer=muon": ["optimizer=muon"],
    "optimizer=adafactor": ["optimizer=adafactor"],
    "optimizer=schedule_free": ["optimizer=schedule_free"],
    "optimizer=adamw_8bit": ["optimizer=adamw_8bit"],
    "optimizer=soap": ["optimizer=soap"],
}


@dataclass(frozen=True)
class Case:
    model: str
    compiled: bool = True
    recompute: str = "none"

    @property
    def name(self) -> str:
        return f"{self.model}, {'compiled' if self.compiled else 'eager'}, {self.recompute}"


def cases(model: str | None, everything: bool) -> list[Case]:
    found = [Case(m) for m in MODELS if model in (None, m)]
    if everything:
        found += [Case(c.model, compiled=False) for c in found]
        found += [Case(c.model, c.compiled, "full") for c in found]
    return found


def measured(case: Case, small: bool, rounds: int, out: Path, more: list[str]) -> dict[str, Any]:
    """Rates of both loops in turns, their ratio, compile time, and the kernels of a step of
    each."""
    micro, accumulation = (2, 2) if small else MODELS[case.model]
    length = 128 if small else 1024
    overrides = [
        f"train.compile={case.compiled}",
        f"parallelism.activation_checkpointing={case.recompute}", *more,
    ]  # fmt: skip
    if small:
        overrides.append("model.n_layers=1")
    matrix = steps.matrix_rate(1024 if small else 8192)
    parts, s = steps.made(case.model, micro, accumulation, length, *overrides)
    loops = {"ours": steps.ours(parts, s), "bare": steps.bare(parts, s, case.compiled)}
    first = {name: steps.first(step) for name, step in loops.items()}
    for step in loops.values():
        step()
        step()
    tokens = micro * accumulation * length
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in loops}
    for _ in range(rounds):
        for name, step in loops.items():
            turns[name].append(steps.rate(step, tokens, 2 if small else 5))
    tables = {name: steps.kernels(step) for name, step in loops.items()}
    for name, lines in tables.items():
        text = "\n".join(lines) + "\n"
        (out / f"kernels_{case.model}_{case.recompute}_{name}.txt").write_text(text)
    pairs = zip(turns["ours"], turns["bare"], strict=True)
    rate = statistics.median(turn["tokens_per_sec"] for turn in turns["ours"])
    return {
        "batch": f"{micro} x {accumulation} x {length}",
        "loss": parts.run.loss_kernel,
        "tokens_per_sec": rate,
        "bare_tokens_per_sec": statistics.median(t["tokens_per_sec"] for t in turns["bare"]),
        "ratio": statistics.median(a["tokens_per_sec"] / b["tokens_per_sec"] for a, b in pairs),
        "of_matrix_rate": (parts.run.flops_per_token or 0) * rate / matrix,
        "matrix_flops_per_sec": matrix,
        "peak_gib_of_both": max(t["peak_gib"] for ts in turns.values() for t in ts),
        "first_step_s": first,
        "turns": turns,
        "kernels": tables["ours"][:12],
    }


def costs(only: str, small: bool, rounds: int, deadline: float) -> dict[str, Any]:
    """Milliseconds that each option adds to a plain step, and the memory beside the plain one's."""
    # each case compiles the same code for a model of its own
    torch._dynamo.config.recompile_limit = 64
    micro, length, count = (2, 128, 2) if small else (32, 1024, 5)
    one_layer = ["model.n_layers=1"] if small else []

    def step_of(more: list[str]) -> Callable[[], None]:
        made = steps.made("gpt2_small", micro, 1, length, "train.compile=true", *one_layer, *more)
        step = steps.ours(*made)
        for _ in range(4):
            step()
        return step

    plain, found = step_of([]), dict[str, Any]()
    for name, more in COSTS.items():
        if not re.search(only, name):
            continue
        if time.monotonic() > deadline - 30:
            found[name] = "left out: no time is left"
            continue
        try:
            step, turns = step_of(more), []
            for _ in range(rounds):
                turns.append([steps.rate(s, micro * length, count) for s in (plain, step)])
            added = [b["ms"] - a["ms"] for a, b in turns]
            found[name] = {
                "added_ms": statistics.median(added),
                "spread_ms": max(added) - min(added),
                "plain_ms": statistics.median(a["ms"] for a, _ in turns),
                "host_ms": min(b["host_ms_least"] for _, b in turns),
            }
            f = found[name]
            share = f["added_ms"] / f["plain_ms"]
            print(f"| {name} | {f['plain_ms']:.2f} | {f['added_ms']:+.2f} | {share:+.1%} | "
                  f"{f['spread_ms']:.2f} |", flush=True)  # fmt: skip
        except Exception:  # the others still run
            found[name] = traceback.format_exc()[-3000:]
            print(f"| {name} | failed: {found[name].strip().splitlines()[-1][:150]} |", flush=True)
        step = None
        gc.collect()
        torch.cuda.empty_cache()
    return found


def line(case: Case, f: dict[str, Any]) -> str:
    """Return a row of the table."""
    if "tokens_per_sec" not in f:
        text = str(f.get("error", f))
        short = "out of memory" if "out of memory" in text else text.strip().splitlines()[-1][:100]
        return f"| {case.name} | {short} | | | | | |"
    first = f["first_step_s"]
    return (
        f"| {case.name} | {f['batch']} | {f['tokens_per_sec']:,.0f} | "
        f"{f['bare_tokens_per_sec']:,.0f} | {f['ratio']:.3f} | {f['of_matrix_rate']:.1%} | "
        f"{first['ours']:.0f} / {first['bare']:.0f} s |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--model", choices=MODELS, help="only this one")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--all", action="store_true", help="also eager and recomputed")
    parser.add_argument("--costs", action="store_true", help="what options add to a step")
    parser.add_argument("--only", default="", help="regular expression of names for --costs")
    parser.add_argument("--small", action="store_true", help="a rehearsal")
    parser.add_argument("override", nargs="*", help="for all cases: model.vocab_size=50304")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/gpu.py: no CUDA device is visible; nothing was measured")
        return
    deadline = time.monotonic() + 60 * args.minutes
    args.out.mkdir(parents=True, exist_ok=True)
    about = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__,
        "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(),
        "python": sys.version.split()[0], "date": datetime.date.today().isoformat(),
    }  # fmt: skip
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    if args.costs:
        print("\n| option | plain step, ms | added ms | share | spread of the added |")
        print("|---|---|---|---|---|")
        found = costs(args.only, args.small, args.rounds, deadline)
        text = json.dumps({**about, "costs": found}, indent=1)
        (args.out / "costs.json").write_text(text + "\n")
        return
    print(
        "\n| case | micro-batch x accumulation x length | tokens/s | by hand | ratio | of the "
        "matrix rate | first step, ours / by hand |\n|---|---|---|---|---|---|---|"
    )
    done: list[dict[str, Any]] = []
    for case in cases(args.model, args.all):
        left = deadline - time.monotonic()
        if left < SECONDS:
            found: dict[str, Any] = {"error": f"left out: {left:.0f} s are left"}
        else:
            try:
                found = measured(case, args.small, args.rounds, args.out, args.override)
            except Exception:  # the others still run
                found = {"error": traceback.format_exc()[-3000:]}
            gc.collect()
            torch.cuda.empty_cache()
        done.append(asdict(case) | found)
        print(line(case, found), flush=True)
        text = json.dumps({**about, "cases": done}, indent=1)
        (args.out / "cuda.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
