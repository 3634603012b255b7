"""`llmexp export RUN[@STEP] FOLDER`: a trained model in the form of Hugging Face."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from llmexp.config.values import choice
from llmexp.folders.naming import Name, Weights, named_checkpoint
from llmexp.folders.rundir import check_new

if TYPE_CHECKING:
    from llmexp.hf.export import Exported


def export(
    run: Name,
    folder: Annotated[Path, "FOLDER", "a new folder"],
    *,
    to: Annotated[str, choice("Hugging Face transformers", "hf")] = "hf",
    dtype: Annotated[
        str | None, choice("of the weights (default: as trained)", "fp32 | bf16 | fp16")
    ] = None,
    weights: Weights = "model",
    keep_padding: Annotated[
        bool, "write the rows of embedding and head behind the tokenizer's ids, too"
    ] = False,
    check: Annotated[
        bool, "do not compare tensors and ids with those that transformers finds in the folder"
    ] = True,
) -> Exported:
    """Write a trained model as a folder that transformers loads."""
    path, step = named_checkpoint(run)
    check_new(folder, "")
    from llmexp.train.assembly.opening import export_run

    checkpoint = (path, step, weights)
    return export_run(checkpoint, folder, dtype, keep_padding=keep_padding, check=check)
