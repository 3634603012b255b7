from __future__ import annotations

from collections.abc import Callable

from torch import nn

from llmexp import mesh
from llmexp.config.sections import knobs_of
from llmexp.features.sample.config import Knobs
from llmexp.optim import eval_weights
from llmexp.train.assembly.assemble import Parts
from llmexp.train.feature import Feature
from llmexp.train.sampling import first_words, one_thread, sample
from llmexp.train.state import Loop
from llmexp.train.step import Setup

SMALL = 20_000_000  # parameters


def make(parts: Parts, setup: Setup) -> Sample:
    return Sample(knobs_of(parts.config, Knobs))


class Sample(Feature):
    """Write texts. A split model needs all its ranks for that; rank 0 prints them."""

    loop: Loop

    def __init__(self, chosen: Knobs) -> None:
        self._every, self._tokens = chosen.sample_every, chosen.sample_tokens

    def due(self, step: int, last: bool) -> Callable[[], None] | None:
        is_due = not last and self._every is not None and step % self._every == 0
        return self.act if is_due else None

    def act(self) -> None:
        """Print a sample in mid-run; one that fails is a line."""
        if not self._takes_part:
            return
        try:
            text = self.text()
        except Exception as error:
            if self.loop.mesh.sharded and not isinstance(error, (KeyError, ValueError)):
                raise  # not of the tokenizer: other ranks may be waiting for this one in the model
            text = f"none: {error!r}"
        self.loop.console.line(f"sample: {text}")

    def last_words(self) -> list[tuple[str, str]]:
        """Return a last sample. The run is over and recorded: an error is only printed."""
        if not self._takes_part:
            return []
        try:
            return [("sample", self.text())]
        except Exception as error:
            return [("sample", f"none: {error!r}")]

    def timed(self) -> dict[str, Callable[[], object]]:
        return {} if self._every is None else {"sample": self.act}

    @property
    def _takes_part(self) -> bool:
        return self.loop.main or self.loop.mesh.sharded

    def text(self) -> str:
        """Return a sampled text on one line, which begins as `first_words` says."""
        loop, parts = self.loop, self.loop.parts
        length = loop.run.sequence_length  # no position that was never trained
        prompt = first_words(parts.tokenizer, parts.corpus, parts.document_end)
        with one_thread(small=loop.run.parameters < SMALL):
            model: nn.Module = loop.setup.model
            if loop.mesh.sharded:  # a split model is whole within the loss alone
                mesh.share_buffers(loop.mesh, model)
                model = loop.setup.loss
            with eval_weights.evaluating(loop.setup.optimizers, loop.setup.module):
                text = sample(parts.tokenizer, model, length, parts.precision, prompt, self._tokens)
        return " ".join(text.split())
