"""`llmexp sample RUN[@STEP] --prompt TEXT`: generate text from a checkpoint of a run."""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Sequence

from llmexp.cli.evaluate import answer_once, ranks_of, refuse_sections, with_data
from llmexp.compose import command_line
from llmexp.runs.naming import OF_CHECKPOINT, named_checkpoint
from llmexp.settings.values import ConfigError

_ARGUMENTS = OF_CHECKPOINT | {
    "--prompt": (None, "text to go on from (default: the start of a document)", ""),
    "--tokens": (None, "tokens to generate (default 200)", 200),
    "--temperature": (None, "0: always the likeliest token (default 0.8)", 0.8),
    "--top-k": (None, "sample from the k likeliest tokens (default 50)", 50),
    "--seed": (None, "of the sampling (default 0)", 0),
    "overrides*": (
        "parallelism=...",
        "ranks that share the model: parallelism=fsdp parallelism.nproc_per_node=4",
    ),
}


def main(arguments: list[str]) -> int:
    """`llmexp sample RUN[@STEP] --prompt TEXT`: text from a checkpoint of a run."""
    words = ["sample", *arguments]
    args = command_line.read("sample", "Generate text from a run.", _ARGUMENTS, arguments)
    text_only = "sample takes the ranks that share the model only; for example parallelism=fsdp"
    refuse_sections(args.overrides, ("parallelism",), text_only)
    ranks = ranks_of(args.run, args.overrides)
    return answer_once(words, ranks, lambda: _shown(text_of(**vars(args))))


def _shown(text: str) -> str:
    """Return a text without what would control a terminal."""
    controls = r"[^\S\n\t ]|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
    return re.sub(controls, "�", text) if sys.stdout.isatty() else text


def text_of(
    run: str,
    prompt: str,
    tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
    weights: str,
    overrides: Sequence[str] = (),
) -> str:
    """Return a text from a checkpoint, which `run` names as RUN[@STEP].

    With `overrides` of parallelism this process is one of the ranks that share the model. Raises
    ConfigError.
    """
    limits = {"tokens": (tokens, 1), "temperature": (temperature, 0), "top-k": (top_k, 1)}
    for name, (value, low) in limits.items():
        if not value >= low:
            raise ConfigError("out_of_range", f"--{name} {value}: must be at least {low}")
    path, step = named_checkpoint(run)
    from llmexp import mesh
    from llmexp.train.assembly.opening import join_ranks, open_run
    from llmexp.train.sampling import sample as sample_text

    joined = join_ranks(with_data(path, overrides, None)) if overrides else None
    opened = open_run(path, step, weights, joined)
    config, model = opened.config, opened.loss or opened.model
    length, kind = config.batch.sequence_length, config.precision.kind  # what it was trained at
    trained = opened.tokenizer, model, length, kind
    text = sample_text(*trained, prompt, tokens, temperature=temperature, top_k=top_k, seed=seed)
    if joined is not None:
        del opened, model, trained
        gc.collect()  # the model goes before the group, or gloo may abort at exit
        mesh.leave(joined)
    return text
