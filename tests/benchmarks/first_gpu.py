"""The first ten minutes on a CUDA device: is it correct, then how fast.

    python tests/benchmarks/first_gpu.py [--out DIR] [--minutes 9] [--only A,B] [--small]

Stages in order of need, each with the seconds that it may take: one that no longer fits before the
deadline is left out, one that fails ends none of the others. DIR/first_gpu.json is written after
each stage, kernel tables beside it. `--small` is a rehearsal with tiny sizes.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cuda_steps as steps
import torch
import torch.nn.functional as F
from torch import nn

from llmexp.models.loss import WindowLoss

ROOT = Path(__file__).resolve().parents[2]
V = 50257


class Sizes:
    """Of the device, or of a rehearsal."""

    def __init__(self, small: bool) -> None:
        self.small = small
        self.length = 128 if small else 1024
        self.gpt = (2, 2) if small else (32, 4)  # micro-batch, accumulation
        self.llama = (1, 1) if small else (16, 1)
        self.steps = 2 if small else 10
        self.more = ["model.n_layers=1"] if small else []


def facts(size: Sizes) -> dict[str, Any]:
    """Versions, and which attention kernel runs for which shape."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.sm,power.limit"]
    try:
        done = subprocess.run([*query, "--format=csv"], capture_output=True, text=True, timeout=20)
        smi = done.stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        smi = repr(error)
    found: dict[str, Any] = {"torch": torch.__version__, "smi": smi}
    found["cudnn"] = torch.backends.cudnn.version()
    bf16, t = torch.bfloat16, size.length
    shapes = {
        "gpt2": (4, 12, 12, t, 64, bf16, 0.0),
        "llama, grouped heads": (4, 32, 8, t, 64, bf16, 0.0),
        "grouped heads, fp32": (2, 32, 8, t, 64, torch.float32, 0.0),
        "toy": (4, 2, 2, 12, 8, torch.float16, 0.1),
    }
    for name, (b, h, g, t, d, dtype, dropout) in shapes.items():
        q, k, v = (
            torch.randn(b, n, t, d, device="cuda", dtype=dtype, requires_grad=True)
            for n in (h, g, g)
        )
        more = {"dropout_p": dropout, "is_causal": True, "enable_gqa": g < h}
        choice = torch._fused_sdp_choice(q, k, v, **more)  # 0 math, 1 flash, 2 efficient, 3 cuDNN
        try:
            F.scaled_dot_product_attention(q, k, v, **more).sum().backward()
            torch.cuda.synchronize()
            found[f"attention, {name}"] = f"backend {choice} runs"
        except RuntimeError as error:
            found[f"attention, {name}"] = f"backend {choice} fails: {str(error)[:200]}"
    return found


class Head(nn.Module):
    """A model that is nothing but embedding and head."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(rows, width, device="cuda"))
        self.head_weight = nn.Parameter(0.05 * torch.randn(V, width, device="cuda"))

    def features(self, tokens_bt: torch.Tensor) -> torch.Tensor:
        return self.table[tokens_bt]

    def forward(self, tokens_bt: torch.Tensor) -> torch.Tensor:
        return F.linear(self.features(tokens_bt), self.head_weight)


def loss_is_right(size: Sizes) -> dict[str, Any]:
    """The chunked loss and its gradients against float64: relative error of each."""
    found, rows = {}, 600 if size.small else 6000
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        model = Head(rows, 768)
        tokens = torch.arange(rows, device="cuda")[None]
        targets = torch.randint(0, V, (1, rows), device="cuda")
        targets[torch.rand(1, rows, device="cuda") < 0.05] = -100
        with torch.autocast("cuda", dtype=dtype, enabled=dtype != torch.float32):
            loss = WindowLoss(model, kernel="chunked")(tokens, targets)
        (loss * 1e-3).backward()
        exact = [
            p.detach().to(dtype).double().requires_grad_() for p in (model.table, model.head_weight)
        ]
        wanted = F.cross_entropy(exact[0] @ exact[1].T, targets[0], reduction="sum")
        (wanted * 1e-3).backward()
        pairs = {"loss": (loss, wanted), "d h": (model.table.grad, exact[0].grad)}
        pairs["d head"] = (model.head_weight.grad, exact[1].grad)
        found[str(dtype)] = {name: off(*pair) for name, pair in pairs.items()}
    return found


def off(value: Any, wanted: Any) -> float:
    difference = (value.detach().double() - wanted.detach()).norm()
    return float(difference / wanted.detach().norm().clamp(min=1e-30))


def step_is_right(size: Sizes) -> dict[str, Any]:
    """A float64 step on CPU and device; no wait of the host in a step; the same bits twice."""
    found: dict[str, Any] = {}
    shape = ["model.n_heads=2", "model.max_position_embeddings=128", "model.vocab_size=4096"]
    eager = [*shape, "train.compile=false"]
    figures = []
    for device in ("cpu", "cuda"):
        s = steps.made("gpt_tiny", 2, 2, 128, *eager, "precision=fp64", f"train.device={device}")
        torch.manual_seed(0)
        seen = steps.step_of(s, steps.windows(s)[0]).verdict.read()
        figures.append((seen.loss, seen.grad_norm))
    found["float64, loss and norm"] = [
        abs(a - b) / max(abs(a), 1e-30) for a, b in zip(*figures, strict=True)
    ]
    for kind, optimizer in (("bf16", "muon"), ("fp16", "adamw")):
        more = [f"precision={kind}", f"optimizer={optimizer}", "metrics.noise_scale_every=1"]
        s = steps.made("gpt_tiny", 2, 2, 128, *eager, *more)
        some = steps.windows(s)
        for window in some[:2]:
            steps.step_of(s, window)
        torch.cuda.set_sync_debug_mode("error")
        try:
            steps.step_of(s, some[2])
            found[f"waits in a step, {kind}"] = "none"
        except RuntimeError as error:
            found[f"waits in a step, {kind}"] = str(error)[:200]
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return found


def ceilings(size: Sizes) -> dict[str, str]:
    """Rates of products, attention and copies at the sizes of GPT-2: what a step could reach."""
    k, found = (8 if size.small else 1), {}

    def product(name: str, m: int, n: int, inner: int, **more: Any) -> None:
        a = torch.randn(m, inner, device="cuda", dtype=torch.bfloat16)
        b = torch.randn(n, inner, device="cuda", dtype=torch.bfloat16).T
        ms = steps.timed(lambda: torch.mm(a, b, **more))
        found[name] = f"{ms:.3f} ms, {2 * m * n * inner / ms / 1e9:.0f} TFLOP/s"

    rows = 32768 // k
    product("8192 cubed", 8192 // k, 8192 // k, 8192 // k)
    for n, inner in ((768, 768), (2304, 768), (3072, 768), (768, 3072)):
        product(f"{rows} x {inner} to {n}", rows, n, inner)
        product(f"the gradient of {inner} to {n}", inner, n, rows)
    for v in (V, 50304):
        product(f"head, {v}", 4096 // k, v, 768)
        product(f"head's gradient, {v}", v, 768, 4096 // k, out_dtype=torch.float32)
    from torch.nn.attention import SDPBackend, sdpa_kernel

    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        q, key, v, g = (
            torch.randn(32 // k, 12, size.length, 64, device="cuda", dtype=torch.bfloat16)
            for _ in range(4)
        )
        inputs = [x.requires_grad_() for x in (q, key, v)]

        def both(inputs: Any = inputs, g: Any = g) -> Any:
            y = F.scaled_dot_product_attention(*inputs, is_causal=True)
            return torch.autograd.grad(y, inputs, g)

        with sdpa_kernel(backend):
            try:
                found[f"attention, {backend.name}"] = f"{steps.timed(both):.3f} ms, both passes"
            except RuntimeError as error:
                found[f"attention, {backend.name}"] = str(error)[:150]
    big = torch.empty(2**29 // k, device="cuda")
    other = torch.empty_like(big)
    found["copy"] = f"{2 * big.nbytes / steps.timed(lambda: other.copy_(big)) / 1e9:.2f} TB/s"
    return found


def speed(
    size: Sizes, model: str, shape: tuple[int, int], *more: str, by_hand: bool = False,
    table: Path | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The rate of a model's steps, ours or by hand; with the kernels of one step in a file."""
    s = steps.made(model, *shape, size.length, *size.more, *more)
    step = steps.bare(s) if by_hand else steps.ours(s)
    found: dict[str, Any] = {"loss": s.parts.run.facts.loss_kernel, "first_s": steps.first(step)}
    for _ in range(2):
        step()
    found |= steps.rate(step, shape[0] * shape[1] * size.length, size.steps)
    if table is not None:
        lines = steps.kernels(step)
        table.write_text("\n".join(lines) + "\n")
        found["kernels"] = lines[:12]
    return found


def command(size: Sizes) -> dict[str, Any]:
    """The command of a user: rows, the share of time outside steps, a save in the background."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        micro, accumulation = size.gpt
        words = [
            sys.executable, "-m", "llmexp", "train", "model=gpt2_small", *steps.COMMON[:4],
            "tracker=none", "precision=bf16", "train.device=cuda", "train.sample_tokens=0",
            f"batch.sequence_length={size.length}", f"batch.micro_batch_size={micro}",
            f"batch.gradient_accumulation_steps={accumulation}", "train.max_steps=30",
            "train.log_every=5", "train.eval_every=null", "checkpoint.every=15",
            "train.eval_tokens=2048", f"hydra.run.dir={run}", *size.more,
        ]  # fmt: skip
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = os.environ | {"PYTHONPATH": path}
        done = subprocess.run(
            words, cwd=folder, env=environment, capture_output=True, text=True, timeout=170
        )
        found: dict[str, Any] = {"exit_code": done.returncode, "error": done.stderr[-1500:]}
        rows = run / "metrics.jsonl"
        if rows.exists():
            shown = ("step", "tokens_per_sec", "outside_share", "mfu", "peak_memory_gib")
            lines = [json.loads(line) for line in rows.read_text().splitlines()]
            found["rows"] = [{key: line.get(key) for key in shown} for line in lines]
        return found


def stages(size: Sizes, out: Path) -> list[tuple[str, float, Callable[[], Any]]]:
    """Name, seconds, work; correctness first, then the goals, then what explains them."""
    gpt, llama, eager = size.gpt, size.llama, "train.compile=false"
    v = f"model.vocab_size={V}"
    double = (2 * gpt[0], max(1, gpt[1] // 2))
    kernels = out / "kernels_gpt2.txt", out / "kernels_llama.txt"
    return [
        ("A facts", 15, lambda: facts(size)),
        ("B loss", 30, lambda: loss_is_right(size)),
        ("B step", 30, lambda: step_is_right(size)),
        ("C gpt2", 90, lambda: speed(size, "gpt2_small", gpt, v, table=kernels[0])),
        ("D gpt2 by hand", 90,
         lambda: speed(size, "gpt2_small", gpt, "model.vocab_size=50304", by_hand=True)),
        ("E llama", 110, lambda: speed(size, "llama_1b", llama, table=kernels[1])),
        ("F command", 120, lambda: command(size)),
        ("G ceilings", 60, lambda: ceilings(size)),
        ("H gpt2 eager", 30, lambda: speed(size, "gpt2_small", gpt, v, eager)),
        ("I gpt2, twice the micro-batch", 70, lambda: speed(size, "gpt2_small", double, v)),
        ("J llama by hand", 110, lambda: speed(size, "llama_1b", llama, by_hand=True)),
        ("K llama eager", 45, lambda: speed(size, "llama_1b", llama, eager)),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--only", default="", help="letters of stages, such as A,B")
    parser.add_argument("--small", action="store_true", help="a rehearsal")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("first_gpu: no CUDA device is visible; nothing was measured")
    deadline = time.monotonic() + 60 * args.minutes
    args.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    for name, seconds, work in stages(Sizes(args.small), args.out):
        if args.only and name[0] not in args.only.split(","):
            continue
        begun = time.monotonic()
        if deadline - begun < seconds:
            found[name] = f"left out: {deadline - begun:.0f} s are left, {seconds} may be needed"
        else:
            try:
                found[name] = work()
            except Exception:  # the others still run
                found[name] = {"error": traceback.format_exc()[-3000:]}
            gc.collect()
            torch.cuda.empty_cache()
        text = json.dumps(found[name], indent=1, default=str)
        print(f"== {name}: {time.monotonic() - begun:.1f} s\n{text[:3000]}", flush=True)
        (args.out / "first_gpu.json").write_text(json.dumps(found, indent=1, default=str))
    print("\n| stage | tokens/s | ms | peak GiB | first step s |\n|---|---|---|---|---|")
    for name, row in found.items():
        if isinstance(row, dict) and "tokens_per_sec" in row:
            print(
                f"| {name} | {row['tokens_per_sec']:,.0f} | {row['ms']:.1f} | "
                f"{row['peak_gib']:.1f} | {row['first_s']:.0f} |"
            )


if __name__ == "__main__":
    main()
