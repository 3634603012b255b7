"""`llmexp sample RUN[@STEP] --prompt TEXT`: generate text from a checkpoint of a run."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Sequence

from llmexp.cli.evaluate import ranks_of, refuse_sections, with_data
from llmexp.compose import command_line
from llmexp.runs.naming import add_checkpoint, named_checkpoint
from llmexp.settings.values import ConfigError


def main(arguments: list[str]) -> int:
    """`llmexp sample RUN[@STEP] --prompt TEXT`: text from a checkpoint of a run."""
    parser = command_line.parser_of("sample", "Generate text from a run.")
    add_checkpoint(parser)
    parser.add_argument(
        "--prompt", default="", help="text to go on from (default: the start of a document)"
    )
    parser.add_argument("--tokens", type=int, default=200, help="tokens to generate (default 200)")
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="0: always the likeliest token (default 0.8)"
    )
    parser.add_argument(
        "--top-k", type=int, default=50, help="sample from the k likeliest tokens (default 50)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (default 0)")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="parallelism=...",
        help="ranks that share the model: parallelism=fsdp parallelism.nproc_per_node=4",
    )
    words = ["sample", *arguments]
    args = parser.parse_intermixed_args(command_line.take_allowed(arguments))
    text_only = "sample takes the ranks that share the model only; for example parallelism=fsdp"
    refuse_sections(args.overrides, ("parallelism",), text_only)
    ranks = ranks_of(args.run, args.overrides)
    if ranks > 1 and "RANK" not in os.environ:
        from llmexp.mesh.ranks import run_alike

        return run_alike(words, ranks)
    text = text_of(**vars(args))
    if ranks > 1 and os.environ.get("RANK", "0") != "0":
        return 0
    if sys.stdout.isatty():
        text = re.sub(r"[^\S\n\t ]|[\x00-\x08\x0b-\x1f\x7f-\x9f]", "�", text)
    print(text)
    return 0


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
            raise ConfigError(f"--{name} {value}: must be at least {low}")
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
