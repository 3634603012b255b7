"""Start-up: from the command to the first optimizer step, against a bare script; CPU time of the
light commands.

    python tests/benchmarks/bench_start.py [--rounds 5]

Runs are interleaved. Goals: first step at most bare + 1.0 s; of the light commands see below.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BARE = """
import time, sys
sys.path.insert(0, sys.argv[1])
import numpy as np, torch
import torch.nn.functional as F
from llmexp.models.gpt2 import GPT2
torch.manual_seed(0)
model = GPT2(320, 256, 4, 4, 128, 512)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
data = np.random.randint(0, 320, 100_000)
x, y = (torch.stack([torch.from_numpy(data[i + o:i + o + 128]) for i in range(8)]) for o in (0, 1))
F.cross_entropy(model(x).view(-1, 320), y.view(-1)).backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
print(time.time())
"""
# Commands, all of them seen before, and the seconds of CPU that each may take.
LIGHT = {"train --help": 0.6, "train --cfg job": 0.6, "prepare": 0.7, "plan": 1.0}
HOOK = """
import time
def mark(event, context):
    if event == "step_end" and context.step == 1:
        print("first step at", time.time(), flush=True)
"""


def cpu_seconds(command: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    root = Path(__file__).resolve().parents[2]
    llmexp = [sys.executable, "-m", "llmexp"]
    os.environ["PYTHONPATH"] = str(root)
    os.environ.setdefault("WANDB_MODE", "offline")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("marks.py").write_text(HOOK)
        Path("bare.py").write_text(BARE)
        run = [*llmexp, "train", "--allow", "marks", "hooks=[marks.mark]", "train.max_steps=2"]
        subprocess.run(run, check=True, stdout=subprocess.DEVNULL)  # prepares the data
        cpu_seconds([*llmexp, "plan"])  # is remembered
        bare_s, run_s = [], []
        for _ in range(rounds):
            start = time.time()
            out = subprocess.run(
                [sys.executable, "bare.py", str(root)], check=True, capture_output=True, text=True
            )
            bare_s.append(float(out.stdout) - start)
            start = time.time()
            out = subprocess.run(run, check=True, capture_output=True, text=True)
            line = next(x for x in out.stdout.splitlines() if x.startswith("first step at"))
            run_s.append(float(line.split()[-1]) - start)
        more = statistics.median(b - a for a, b in zip(bare_s, run_s, strict=True))
        print(f"first step: bare {statistics.median(bare_s):.2f} s, run "
              f"{statistics.median(run_s):.2f} s, more {more:+.2f} s (goal +1.00)")  # fmt: skip
        for command, goal in LIGHT.items():
            given = [*llmexp, *command.split()]
            cpu = statistics.median(cpu_seconds(given) for _ in range(rounds))
            print(f"llmexp {command}: {cpu:.2f} s of CPU (goal {goal:.2f})")


if __name__ == "__main__":
    main()
