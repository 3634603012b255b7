"""The smallest run, which most tests begin with."""

from llmexp.settings.knobs import fields

# Beside the steps; where a feature is taken out its knobs are, too.
QUIET = {"train.sample_tokens": "0", "metrics.picture": "false"}

# A model so small that a step costs nothing; the sizes are odd on purpose where they may be.
TINY = [
    "model=gpt_tiny", "model.n_layers=2", "model.n_heads=2", "model.d_model=16", "model.d_ff=24",
    "model.max_position_embeddings=32", "batch.sequence_length=12", "tracker=none",
    "precision=fp32",  # auto is bf16 on some machines
    *(f"{key}={value}" for key, value in QUIET.items() if key in fields()),
]  # fmt: skip
