"""A model with an argument of text."""

from llmexp.models.gpt2 import GPT2


class Mine(GPT2):
    def __init__(self, corpus: str | None = None, **rest) -> None:
        super().__init__(**rest)
        assert corpus in (None, "1e5"), corpus
