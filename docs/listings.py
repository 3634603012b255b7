"""Write what commands print into the listings of README.md and docs/.

    python docs/listings.py           run all commands (some minutes)
    python docs/listings.py verify    only commands that begin with this word

tests/test_listings.py runs small versions of the same commands and compares what does not depend
on the machine.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = "100"


@dataclass(frozen=True)
class Listing:
    """A part of a block that begins with `$ llmexp COMMAND` or `$ python ...`, which may go on over
    lines.

    It shows the lines of the output that match a pattern of `keep`, with the lines indented below
    them; ... stands for the others.
    """

    file: str
    command: str
    keep: tuple[str, ...] = ("",)
    small: tuple[str, ...] = ()  # overrides that make the same lines in a few seconds
    code: int = 0  # exit code
    before: tuple[str, ...] = ()  # commands that run first, in the same folder

    @property
    def line(self) -> str:
        return self.command if self.command.startswith("python ") else f"llmexp {self.command}"


SMALL = (
    "model.n_layers=2", "model.n_heads=2", "model.d_model=16", "model.d_ff=16",
    "batch.sequence_length=16",
)  # fmt: skip
TRAINED = "train hydra.run.dir=run train.max_steps=200"
EXPORTED = "export run --to hf my-model"
TRUNK = (
    "train hydra.run.dir=trunk schedule=constant train.max_steps=200 checkpoint.keep_every=50 "
    "batch.sequence_length=64 batch.micro_batch_size=4 model.n_layers=2 model.d_model=64 "
    "precision=fp32"
)
LISTINGS = (
    Listing(
        "README.md",
        "train",
        (
            r"(data|train|validation|model|batch|budget|warm-up|FLOPs|device|precision|folder|start)  ",  # noqa: E501
            r"step +(50|300)/300",
            r"(result|tokens_seen|final (train|val)/loss|picture|folder|next)  ",
        ),
        (*SMALL, "train.eval_tokens=512"),
    ),
    Listing(
        "README.md",
        "train experiment=accumulation_scaling batch.gradient_accumulation_steps=1,2,4 "
        "train.seed=1,2,3 train.max_tokens=24576 train.eval_tokens=4096 batch.micro_batch_size=4 "
        "batch.sequence_length=64 model.n_layers=2 model.d_model=64 precision=fp32",
        (r"accum=1 is best", r"accum  ", r" +[124]  ", r"page  "),
        (*SMALL, "model.d_model=32", "train.max_tokens=6144", "train.eval_tokens=4096"),
    ),
    Listing("README.md", "evaluate run", ("(set|val) ",), before=(TRAINED,)),
    Listing("README.md", EXPORTED, before=(TRAINED,)),
    Listing(
        "README.md",
        "python -c 'from transformers import AutoModelForCausalLM, AutoTokenizer; "
        'ids = AutoTokenizer.from_pretrained("my-model")("import torch", return_tensors="pt")'
        ".input_ids; "
        'print(AutoModelForCausalLM.from_pretrained("my-model")(ids, labels=ids).loss)\'',
        before=(TRAINED, EXPORTED),
    ),
    Listing(
        "README.md",
        "train -m fork.run=trunk fork.step=50,100,200 schedule=cooldown hydra.sweep.dir=cooldowns",
        (r"No ranking", r"from  ", r" +\d+  ", r"page  "),
        before=(TRUNK,),
    ),
    Listing(
        "docs/knobs.md",
        "explain clip.max_norm experiment=shakespeare_nanogpt_cpu clip.max_norm=0.5",
    ),
    Listing("docs/knobs.md", "explain real_batch_size batch.gradient_accumulation_steps=4"),
    Listing("docs/knobs.md", "plan clip=none clip.max_norm=0.5", code=2),
    Listing(
        "docs/verify.md",
        "verify resume",
        (r"[vk]", "PASS", "-"),
        (*SMALL, "--steps=6"),
    ),
    Listing(
        "docs/verify.md",
        "verify geometry",
        (r"verify ", r"\d+ steps", "PASS  fp.*two ranks", "PASS: "),
        (*SMALL, "precision=fp32"),
    ),
)


def shown(output: str, keep: tuple[str, ...]) -> list[str]:
    """The lines of an output that a listing shows."""
    lines: list[str] = []
    kept = False
    output = re.sub(r"its\s+runs\s+are\s+in\s+\S+", "its runs are in ...", output)
    for line in re.sub(r"valid\s+in\s+a\s+sequence", "valid in a sequence", output).splitlines():
        kept = any(re.match(pattern, line) for pattern in keep) or (kept and line.startswith("  "))
        if kept:
            lines.append(line)
        elif not lines or lines[-1] != "...":
            lines.append("...")
    return lines[:-1] if lines[-1] == "..." else lines


def find(listing: Listing, text: str) -> re.Match[str]:
    """Find the command in its file, and its output up to the next command or the block's end."""
    words = r"(?:\s+|\s*\\\n\s*)".join(re.escape(word) for word in listing.line.split())
    found = re.search(rf"(\$ {words}(?: +#.*)?\n)(.*?)(?=```|\$ (?:llmexp|python))", text, re.S)
    assert found is not None, f"{listing.file} has no line $ {listing.line}"
    return found


def written(listing: Listing, folder: str) -> list[str]:
    """Run the command in `folder`, after those before it; return what it prints."""
    env = {**os.environ, "COLUMNS": COLUMNS, "PYTHONPATH": str(ROOT), "WANDB_MODE": "offline"}
    for command in (*listing.before, listing.command):
        done = subprocess.run(
            arguments(command), cwd=folder, env=env, capture_output=True, text=True
        )
        wanted = listing.code if command == listing.command else 0
        assert done.returncode == wanted, done.stderr
    return shown(done.stdout if listing.code == 0 else done.stderr, listing.keep)


def arguments(command: str) -> list[str]:
    """Return what a listed command runs."""
    words = shlex.split(command)
    own = words[0] == "python"
    return [sys.executable, *words[1:]] if own else [sys.executable, "-m", "llmexp", *words]


def main() -> None:
    for listing in LISTINGS:
        if not listing.command.startswith(tuple(sys.argv[1:]) or ""):
            continue
        print(f"llmexp {listing.command}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            lines = written(listing, folder)
        path = ROOT / listing.file
        text = path.read_text()
        block = find(listing, text)
        path.write_text(text[: block.start(2)] + "\n".join(lines) + "\n" + text[block.end(2) :])


if __name__ == "__main__":
    main()
