"""`llmexp export RUN[@STEP] --to hf FOLDER`: a trained model in the form of Hugging Face."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from llmexp.compose import command_line
from llmexp.naming import add_weights, check_new, named_checkpoint

if TYPE_CHECKING:
    from llmexp.exchange.export import Exported


def export(arguments: list[str]) -> int:
    """Write a checkpoint's model, its tokenizer and a page about it for transformers."""
    text = "Write a trained model as a folder that transformers loads."
    parser = command_line.parser_of("export", text)
    parser.add_argument("run", metavar="RUN[@STEP]", help="run folder; default: newest checkpoint")
    parser.add_argument("--to", choices=["hf"], required=True, help="hf: Hugging Face transformers")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a new folder")
    parser.add_argument(
        "--dtype", choices=["fp32", "bf16", "fp16"], help="of the weights; default: as trained"
    )
    add_weights(parser)
    args = parser.parse_args(command_line.take_allowed(arguments))
    done = exported(args.run, args.folder, args.dtype, args.weights)
    for text in done.notes:
        print(f"note: {text}", file=sys.stderr)
    print(
        f"{args.folder}: {done.architecture} of step {done.step:,}, "
        f"{done.parameters:,} parameters, {done.size / 2**20:,.1f} MiB"
    )
    print(f"use it: transformers.AutoModelForCausalLM.from_pretrained({str(args.folder)!r})")
    return 0


def exported(run: str, folder: Path, dtype: str | None, weights: str) -> Exported:
    """Write the checkpoint that `run` names as RUN[@STEP]; `dtype`: null for as trained. Raises
    ConfigError."""
    path, step = named_checkpoint(run)
    check_new(folder, "FOLDER")
    from llmexp.assembly.opening import export_run

    warn = functools.partial(print, file=sys.stderr)
    return export_run((path, step, weights), folder, dtype, warn)
