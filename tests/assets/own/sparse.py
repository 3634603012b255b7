"""Models of a user's own with experts: ours, and a number that is called so."""

from llmexp.models.llama import Llama


class Sparse(Llama):
    def __init__(self, n_experts: int) -> None:
        super().__init__(320, 12, 1, 2, 2, 8, 12, n_experts=n_experts)


class Named(Llama):
    def __init__(self, n_experts: int) -> None:
        super().__init__(320, 12, 1, 2, 2, 8, n_experts)
