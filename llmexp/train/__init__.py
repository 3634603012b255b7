"""The worker side: `python -m llmexp.train RUN_DIR` trains the run that a folder describes. No
Hydra in here."""
