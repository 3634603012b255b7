"""`llmexp export RUN[@STEP] --to hf FOLDER`: a trained model in the form of Hugging Face."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from llmexp.compose import command_line
from llmexp.runs.naming import OF_CHECKPOINT, named_checkpoint
from llmexp.runs.rundir import check_new

if TYPE_CHECKING:
    from llmexp.exchange.export import Exported


_ARGUMENTS = OF_CHECKPOINT | {
    "--to": {"choices": ["hf"], "required": True, "help": "hf: Hugging Face transformers"},
    "folder": ("FOLDER", "a new folder", Path),
    "--dtype": {
        "choices": ["fp32", "bf16", "fp16"],
        "help": "of the weights; default: as trained",
    },
    "--keep-padding": "write the rows of embedding and head behind the tokenizer's ids, too",
    "--no-check": "do not compare tensors and ids with those that transformers finds in the folder",
}


def main(arguments: list[str]) -> int:
    """Write a checkpoint's model, its tokenizer and a page about it for transformers."""
    text = "Write a trained model as a folder that transformers loads."
    args = command_line.read("export", text, _ARGUMENTS, arguments)
    form = (args.dtype, args.weights)
    done = exported(args.run, args.folder, *form, args.keep_padding, not args.no_check)
    for text in done.notes:
        print(f"note: {text}", file=sys.stderr)
    print(
        f"{args.folder}: {done.architecture} of step {done.step:,}, "
        f"{done.parameters:,} parameters, {done.size / 2**20:,.1f} MiB"
    )
    if done.padding:
        print(
            f"left out: {done.padding:,} rows of the vocabulary behind the tokenizer's ids "
            "(--keep-padding writes them)"
        )
    print(f"use it: transformers.AutoModelForCausalLM.from_pretrained({str(args.folder)!r})")
    return 0


def exported(
    run: str,
    folder: Path,
    dtype: str | None,
    weights: str,
    keep_padding: bool = False,
    check: bool = True,
) -> Exported:
    """Write the checkpoint that `run` names as RUN[@STEP] for Hugging Face.

    `dtype` None: as trained. Raises ConfigError.
    """
    path, step = named_checkpoint(run)
    check_new(folder, "")
    from llmexp.train.assembly.opening import export_run

    checkpoint = (path, step, weights)
    return export_run(checkpoint, folder, dtype, keep_padding=keep_padding, check=check)
