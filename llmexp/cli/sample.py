"""`llmexp sample RUN[@STEP] --prompt TEXT`: generate text from a checkpoint of a run."""

from __future__ import annotations

import re
import sys

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
    args = parser.parse_args(command_line.take_allowed(arguments))
    text = text_of(**vars(args))
    if sys.stdout.isatty():
        text = re.sub(r"[^\S\n\t ]|[\x00-\x08\x0b-\x1f\x7f-\x9f]", "�", text)
    print(text)
    return 0


def text_of(
    run: str, prompt: str, tokens: int, temperature: float, top_k: int, seed: int, weights: str
) -> str:
    """Return a text from a checkpoint, which `run` names as RUN[@STEP]. Raises ConfigError."""
    limits = {"tokens": (tokens, 1), "temperature": (temperature, 0), "top-k": (top_k, 1)}
    for name, (value, low) in limits.items():
        if not value >= low:
            raise ConfigError(f"--{name} {value}: must be at least {low}")
    path, step = named_checkpoint(run)
    from llmexp.train.assembly.opening import open_run
    from llmexp.train.sampling import sample as sample_text

    opened = open_run(path, step, weights)
    config, model = opened.config, opened.model
    length, kind = config.batch.sequence_length, config.precision.kind  # what it was trained at
    trained = opened.tokenizer, model, length, kind
    return sample_text(*trained, prompt, tokens, temperature=temperature, top_k=top_k, seed=seed)
