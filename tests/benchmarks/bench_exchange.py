"""Memory of an export and of an import beyond the model, and the start of an evaluation.

    python tests/benchmarks/bench_exchange.py

Goals: 1.2 of the largest tensor; 1 s of CPU beyond a script that loads the weights and scores as
many tokens.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

RUN = (
    "model=gpt2_small", "model.max_position_embeddings=64", "model.vocab_size=50304",
    "tokenizer=bytes", "data.max_tokens=20000", "batch.sequence_length=16", "precision=fp32",
    "batch.micro_batch_size=2", "batch.gradient_accumulation_steps=1", "train.max_steps=1",
    "train.sample_tokens=0", "tracker=none", "hydra.run.dir=run",
)  # fmt: skip
PLAIN = ("--keep-padding", "--no-check")
LARGEST = 50304 * 768 * 4
WATCHED = """
import re, sys, threading, time
def private():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
peak = 0
def watch():
    global peak
    while True:
        peak = max(peak, private())
        time.sleep(0.002)
import yaml
from llmexp.runs import rundir
from llmexp.__main__ import run
from llmexp.train.assembly import opening
from llmexp.exchange import export, reading
section = yaml.safe_load(open("run/config.yaml"))["model"]
model = opening.model_maker(section)() if sys.argv[1] != "export" else None
before = private()
threading.Thread(target=watch, daemon=True).start()
if model is None:
    run(sys.argv[1:])
else:
    source = reading.open_source(sys.argv[1])
    reading.check_values(source)
    reading.begin_with(model, source)
print((peak - before) / LARGEST)
""".replace("LARGEST", str(LARGEST))
BARE = """
import torch, yaml
from safetensors.torch import load_file
from llmexp.models.gpt2 import GPT2
section = yaml.safe_load(open("run/config.yaml"))["model"]
names = ("n_layers", "n_heads", "d_model", "d_ff", "vocab_size", "max_position_embeddings")
with torch.device("meta"):
    model = GPT2(dropout=0.0, **{name: section[name] for name in names})
weights = load_file("run/checkpoints/step_00000001/model.safetensors")
model.load_state_dict(weights, assign=True)
with torch.no_grad():
    logits = model(torch.randint(256, (2, 16)))
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.randint(256, (32,)))
"""


def cpu_s(*command: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def watched(*arguments: str) -> str:
    command = [sys.executable, "-c", WATCHED, *arguments]
    return subprocess.check_output(command, text=True).splitlines()[-1]


def main() -> None:
    os.environ |= {"PYTHONPATH": str(Path(__file__).resolve().parents[2]), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        cpu_s("-m", "llmexp", "train", *RUN)
        print("private memory beyond the model, of the largest tensor")
        print("export        ", watched("export", "run", "--to", "hf", "hf", *PLAIN))
        print(
            "export as bf16",
            watched("export", "run", "--to", "hf", "bf16", *PLAIN, "--dtype", "bf16"),
        )
        print("import of hf  ", watched("hf"))
        print("import of run ", watched("run"))
        ours = ("-m", "llmexp", "evaluate", "run", "--tokens", "32")
        times = [(cpu_s("-c", BARE), cpu_s(*ours)) for _ in range(5)]
        bare, evaluated = (sorted(column)[2] for column in zip(*times, strict=True))
        print(f"CPU s of a bare script {bare:.2f}, of llmexp evaluate {evaluated:.2f}")
        os.chdir("/")


if __name__ == "__main__":
    main()
