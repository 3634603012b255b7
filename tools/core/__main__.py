"""List the functions that plain runs call, with lines and tokens: `make core`.

The runs: one rank, and two ranks under ddp, each stopped in the middle and resumed. Imports are not
calls: what a module does when it is imported is counted for no function.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from tools.size import tokens

ROOT = Path(__file__).resolve().parents[2]
TINY = [
    "model=gpt_tiny", "model.n_layers=2", "model.d_model=32", "batch.sequence_length=32",
    "batch.micro_batch_size=2", "batch.gradient_accumulation_steps=2", "data=synthetic",
    "tracker=none", "precision=fp32", "train.max_steps=8", "train.log_every=2",
    "train.eval_every=4", "checkpoint.every=2", "metrics.noise_scale_every=null",
    "metrics.outlier_sigma=null", "metrics.picture=false", "train.sample_tokens=0",
]  # fmt: skip
WAYS = {"one": [], "ddp": ["parallelism=ddp", "parallelism.nproc_per_node=2"]}


def called(folder: Path) -> dict[str, set[int]]:
    """Run llmexp; return the first lines of the functions that were called, by file."""
    trace = folder / "trace"
    trace.mkdir()
    path = os.pathsep.join([str(Path(__file__).parent), str(ROOT)])
    known = {"PYTHONPATH": path, "CORE_TRACE": str(trace), "OMP_NUM_THREADS": "1"}
    for name, way in WAYS.items():
        train = ["train", *TINY, *way, "train.stop_step=4", f"hydra.run.dir={name}"]
        for words in (train, ["resume", name, "train.stop_step=null"]):
            command = [sys.executable, "-m", "llmexp", *words]
            done = subprocess.run(command, cwd=folder, env=os.environ | known, capture_output=True)
            if done.returncode not in (0, 75):
                sys.exit(done.stderr.decode())
    found = defaultdict[str, set[int]](set)
    for file in trace.iterdir():
        for line in file.read_text().splitlines():
            name, _, number = line.rpartition(" ")
            found[name].add(int(number))
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = called(Path(folder))
    total = [0, 0, 0]
    for name in sorted(found):
        text = (ROOT / "llmexp" / name).read_text(encoding="utf-8")
        lines, shown, last = text.splitlines(keepends=True), [], 0
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            if first in found[name]:
                body = "".join(lines[first - 1 : node.end_lineno])
                shown.append((first, node.name, body.count("\n"), tokens(body)))
        for first, function, count, lexical in sorted(shown):
            print(f"  {name}:{function:<40}{count:>6}{lexical:>8}")
            if first > last:  # not inside of one that is counted
                total = [a + b for a, b in zip(total, (1, count, lexical), strict=True)]
                last = first + count - 1
    print(f"{total[0]:,} functions, {total[1]:,} lines, {total[2]:,} tokens")


if __name__ == "__main__":
    main()
