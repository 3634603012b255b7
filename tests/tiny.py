"""The smallest run, which most tests begin with."""

from llmexp.config.knobs import fields


def there(*overrides: str) -> list[str]:
    """Return those whose knob there is: where a feature is taken out its knobs are, too."""
    return [text for text in overrides if text.partition("=")[0] in fields()]


# A model so small that a step costs nothing; the sizes are odd on purpose where they may be.
TINY = [
    "model=gpt_tiny", "model.n_layers=2", "model.n_heads=2", "model.d_model=16", "model.d_ff=24",
    "model.max_position_embeddings=32", "batch.sequence_length=12", "tracker=none",
    "train.eval_tokens=600",  # or an evaluation takes longer than the steps
    *there("train.sample_tokens=0", "metrics.picture=false"),
    "precision=fp32",  # auto is bf16 on some machines; the last, which some leave out
]  # fmt: skip
