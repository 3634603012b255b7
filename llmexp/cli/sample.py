"""`llmexp sample RUN[@STEP] --prompt TEXT`: generate text from a checkpoint of a run."""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from llmexp.cli.evaluate import ranks_of, refuse_sections, with_data
from llmexp.config.values import count, knob
from llmexp.folders.naming import Name, Weights, named_checkpoint


@dataclass(frozen=True)
class Sampled:
    """A text from a checkpoint."""

    text: str

    def show(self) -> None:
        """Print the text without what would control a terminal."""
        controls = r"[^\S\n\t ]|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
        print(re.sub(controls, "�", self.text) if sys.stdout.isatty() else self.text)


def sample(
    run: Name,
    overrides: Annotated[
        Sequence[str],
        "KEY=VALUE",
        "ranks that share the model: parallelism=fsdp parallelism.nproc_per_node=4",
    ] = (),
    *,
    prompt: Annotated[str, "TEXT", "to continue (default: the start of a document)"] = "",
    tokens: Annotated[int, count("tokens to generate", 200)] = 200,
    temperature: Annotated[float, knob("0: always the likeliest token", 0.8, at_least=0)] = 0.8,
    top_k: Annotated[int, count("sample from so many, the likeliest tokens", 50)] = 50,
    seed: Annotated[int, "of the sampling"] = 0,
    weights: Weights = "model",
) -> Sampled:
    """Generate text from a run."""
    text = "sample takes the ranks that share the model only; for example parallelism=fsdp"
    refuse_sections(overrides, ("parallelism",), text)
    path, step = named_checkpoint(run)
    from llmexp.train.assembly.opening import joined_to, open_run
    from llmexp.train.sampling import sample as sample_text

    config = with_data(path, overrides, None)
    with joined_to(config, bool(overrides)) as joined:
        opened = open_run(path, step, weights, joined)
        model, length = opened.loss or opened.model, opened.config.batch.sequence_length
        kind = opened.config.precision.kind  # what it was trained at
        trained = opened.tokenizer, model, length, kind
        found = sample_text(
            *trained, prompt, tokens, temperature=temperature, top_k=top_k, seed=seed
        )
        del opened, model, trained
    return Sampled(found)


def ranks(args: Namespace) -> int:
    """Return how many ranks the command takes."""
    return ranks_of(args.run, args.overrides)
