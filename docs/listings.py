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
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = "100"
NARROW = "64"  # without what only this machine has: how fast it was, and for how long


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
    corpus: bool = False  # the folder holds the files that its page makes
    columns: str = COLUMNS

    @property
    def line(self) -> str:
        return self.command if self.command.startswith("python ") else f"llmexp {self.command}"


SMALL = (
    "model.n_layers=2", "model.n_heads=2", "model.d_model=16", "model.d_ff=16",
    "batch.sequence_length=16",
)  # fmt: skip
TRAINED = "train hydra.run.dir=run train.max_steps=200"
EXPORTED = "export run --to hf my-model"
LONG = "train hydra.run.dir=trunk schedule=constant train.max_steps=200"
AVERAGED = (
    "train hydra.run.dir=outputs/trunk schedule=constant train.ema=0.98 train.max_steps=300 "
    "checkpoint.every=20 checkpoint.keep=null"
)
AVERAGE = "average outputs/trunk --last 5"
FITTING = "batch.micro_batch_size=auto batch.real_batch_size=32 batch.memory_gib=0.55"
TOKENIZER = (
    "tokenizer --vocab-size 4096 data=corpus data.sources.code.files=code.jsonl.zst "
    "data.sources.prose.files=prose.jsonl.zst"
)
PLAN = "tracker=none precision=bf16 model.vocab_size=50257"
TRUNK = (
    "train hydra.run.dir=trunk schedule=constant train.max_steps=200 checkpoint.keep_every=50 "
    "batch.sequence_length=64 batch.micro_batch_size=4 model.n_layers=2 model.d_model=64 "
    "model.d_ff=512 precision=fp32"
)
RATES = "train -m optimizer.lr=3e-4,1e-3,3e-3 train.seed=1,2,3 train.max_steps=100"
TUTORIAL = f"{RATES} tracker=none hydra.sweep.dir=outputs/rates"
ANSWER = ("Best: ", "seeds", " *lr  ", r" *[\d.]+  +(best|worse)  ")
LISTINGS = (
    Listing(
        "docs/start.md",
        "train",
        (
            r"(data|train|validation|model|batch|budget|warm-up|FLOPs|device|precision|folder|start)  ",  # noqa: E501
            r"step +(50|300)/300",
            r"(result|final|picture|folder|next)  ",
        ),
        (*SMALL, "train.eval_tokens=512"),
    ),
    Listing("README.md", RATES, ANSWER, (*SMALL, "train.max_steps=30"), columns=NARROW),
    Listing("docs/start.md", "compare outputs/rates", ANSWER, before=(TUTORIAL,), columns=NARROW),
    Listing("docs/huggingface.md", "evaluate run", ("(set|val) ",), before=(TRAINED,)),
    Listing(
        "docs/huggingface.md",
        "python -c 'from transformers import AutoModelForCausalLM, AutoTokenizer; "
        'ids = AutoTokenizer.from_pretrained("my-model")("import torch", return_tensors="pt")'
        ".input_ids; "
        'print(AutoModelForCausalLM.from_pretrained("my-model")(ids, labels=ids).loss)\'',
        before=(TRAINED, EXPORTED),
    ),
    Listing(
        "docs/forks.md",
        "train -m fork.run=trunk fork.step=50,100,200 schedule=cooldown hydra.sweep.dir=cooldowns",
        (r"No ranking", r"from  ", r" +\d+  ", r"page  "),
        before=(TRUNK,),
    ),
    Listing(
        "docs/plan.md",
        "plan plan.device=l4 model=gpt2_small tokenizer=bytes batch.sequence_length=1024 "
        f"batch.micro_batch_size=64 {PLAN}",
        (r"(device|precision|folder|memory|fits|would fit)  ",),
        ("tracker=none",),
    ),
    Listing(
        "docs/clipping.md",
        "train clip=update clip.threshold=0.5 hydra.run.dir=run train.max_steps=100",
        (r"tensors  ",),
        (*SMALL, "train.max_steps=10", "train.eval_tokens=512"),
    ),
    Listing(
        "docs/forks.md",
        "resume trunk train.max_steps=400",
        (r"the warm-up stays",),
        before=(LONG,),
    ),
    Listing(
        "docs/forks.md",
        "resume short train.max_steps=20",
        code=2,
        before=(
            "train hydra.run.dir=short schedule=wsd train.max_steps=16 checkpoint.every=4 "
            "checkpoint.keep=null",
        ),
    ),
    Listing(
        "docs/averages.md",
        "evaluate outputs/trunk --weights ema",
        ("run ", "(set|val) "),
        before=(AVERAGED,),
    ),
    Listing("docs/averages.md", AVERAGE, before=(AVERAGED,)),
    Listing(
        "docs/averages.md",
        "evaluate outputs/trunk/averages/220-300",
        ("val ",),
        before=(AVERAGED, AVERAGE),
    ),
    Listing(
        "docs/averages.md",
        "average outputs/trunk@300 outputs/trunk@310",
        code=2,
        before=(AVERAGED,),
    ),
    Listing("docs/huggingface.md", EXPORTED, before=(TRAINED,)),
    Listing(
        "docs/huggingface.md",
        "plan model.init_from=my-model model.d_ff=256 model.vocab_size=384",
        code=2,
        before=(TRAINED, EXPORTED),
    ),
    Listing(
        "docs/plan.md",
        "plan -m --measure tracker=none precision=fp32 batch.micro_batch_size=2,4 "
        "train.max_tokens=300000",
        small=(*SMALL, "train.max_tokens=6000"),
    ),
    Listing(
        "docs/plan.md",
        "plan plan.device=h200 plan.price_per_gpu_hour=3 model=gpt2_small tokenizer=bytes "
        "model.vocab_size=50257",
        (r"(fits|speed|time|cost)  ",),
        ("tracker=none",),
    ),
    Listing(
        "docs/plan.md",
        f"train {FITTING} precision=fp32 tracker=none",
        (r"batch\.micro_batch_size=auto", r"batch  "),
        (*SMALL, "batch.memory_gib=8"),
    ),
    Listing(
        "docs/hyperparameter-transfer.md",
        "plan optimizer.rule=step_law train.tokens_per_parameter=20 precision=fp32 tracker=none",
        ("rule  ",),
    ),
    Listing("docs/corpus.md", TOKENIZER, corpus=True),
    Listing(
        "docs/corpus.md",
        "prepare --config-dir mine experiment=mix",
        (r"(corpus|source|code|prose|train) ",),
        before=(TOKENIZER,),
        corpus=True,
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
        (r"[vk]", r"PASS  (killed|resumed|parameters after|moments after)", "PASS: "),
        (*SMALL, "--steps=6"),
    ),
    Listing(
        "docs/verify.md",
        "verify geometry precision=fp32",
        (r"verify ", r"\d+ steps", "PASS  fp64.*two ranks", "PASS: "),
        SMALL,
    ),
)

# Blocks whose lines depend on more than their command: who runs the command sees others.
BY_HAND = {
    "docs/verify.md": ("verify transfer",),  # two minutes; tests/verify/test_transfer.py
    "docs/clipping.md": ("experiment=clip_rules",),  # 16 runs; tests/compare/test_output.py
    "docs/averages.md": ("train.ema=0.98",),  # a part of a row; tests/features/ema/test_averages.py
    # three runs of half a minute
    "docs/corpus.md": ("experiment=mix tracker=none", "compare mixed"),
    "docs/evaluation.md": ("--lm-eval facts",),  # needs lm-eval; tests/tasks/test_tasks.py
    "docs/moe.md": ("experiment=moe_balance",),  # nine runs; tests/features/moe/test_load.py
    "docs/compare.md": ("compare log.csv",),  # tests/compare/test_tables.py
    "docs/gallery.md": ("llmexp compare",),  # tests/compare/test_tables.py
    "docs/diagnostics.md": ("llmexp replay",),  # a spike of a run; tests/verify/test_replay.py
    "docs/scaling-laws.md": ("llmexp fit outputs/",),  # minutes; tests/train/test_ladder.py
    "docs/sweeps.md": ("sweep.decide=true",),  # what the looks find; tests/sweep/test_deciding.py
}


def shown(output: str, keep: tuple[str, ...]) -> list[str]:
    """The lines of an output that a listing shows."""
    lines: list[str] = []
    kept = False
    output = re.sub(r"its\s+runs\s+are\s+in\s+\S+", "its runs are in ...", output)
    for line in re.sub(r"valid\s+in\s+a\s+sequence", "valid in a sequence", output).splitlines():
        kept = any(re.match(pattern, line) for pattern in keep) or (kept and line.startswith("  "))
        if kept:
            lines.append(line.rstrip())
        elif not lines or lines[-1] != "...":
            lines.append("...")
    return lines[:-1] if lines[-1] == "..." else lines


def find(listing: Listing, text: str) -> re.Match[str]:
    """Find the command in its file, and its output up to the next command or the block's end."""
    words = r"(?:\s+|\s*\\\n\s*)".join(re.escape(word) for word in listing.line.split())
    end = r"(?<=\n)(?=```|\n?\$ (?:llmexp|python))"
    found = re.search(rf"(\$ {words}(?: +#.*)?\n)(.*?){end}", text, re.S)
    assert found is not None, f"{listing.file} has no line $ {listing.line}"
    return found


def lay_out(listing: Listing, folder: Path) -> None:
    """Make the files that the page of a listing makes, if it needs them."""
    if not listing.corpus:
        return
    pages = {"python": listing.file, "yaml": "docs/corpus.md"}
    code, mix = (
        re.search(rf"```{kind}\n(.*?)```", (ROOT / page).read_text(), re.S)
        for kind, page in pages.items()
    )
    assert code is not None
    assert mix is not None
    subprocess.run([sys.executable, "-c", code[1]], cwd=folder, check=True)
    (folder / "mine" / "experiment").mkdir(parents=True)
    (folder / "mine" / "experiment" / "mix.yaml").write_text(mix[1])


def written(listing: Listing, folder: str) -> list[str]:
    """Run the command in `folder`, after those before it; return what it prints."""
    env = {
        **os.environ,
        "COLUMNS": listing.columns,
        "PYTHONPATH": str(ROOT),
        "WANDB_MODE": "offline",
    }
    lay_out(listing, Path(folder))
    for command in (*listing.before, listing.command):
        done = subprocess.run(
            arguments(command), cwd=folder, env=env, capture_output=True, text=True
        )
        wanted = listing.code if command == listing.command else 0
        assert done.returncode == wanted, done.stderr
    return shown(printed(listing, done.stdout, done.stderr), listing.keep)


def printed(listing: Listing, out: str, err: str) -> str:
    """Return what a listing shows of: the output, before it what `auto` prints; or the refusal."""
    if listing.code:
        return textwrap.fill(err, int(COLUMNS), break_long_words=False, break_on_hyphens=False)
    return (err if FITTING in listing.command else "") + out


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
