"""llmexp: Hydra-configured language-model pretraining experiments in plain PyTorch."""

__version__ = "0.1.0"
