"""A model that gets a secret, a hook that tells all it knows, and what others' packages made."""

import functools
import os
import subprocess
from os import system  # noqa: F401

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, vocab_size: int, secret: str = "", base_width: None = None) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.embed = nn.Embedding(vocab_size, 4)
        assert secret in ("", "canary-token-24680"), "the value did not arrive"

    def forward(self, tokens_bt: torch.Tensor) -> torch.Tensor:
        return self.embed(tokens_bt) @ self.embed.weight.T


def breaks(event, context):
    if event == "step_end" and context.step == 3:
        with open(os.path.expanduser("~/.netrc")) as file:
            raise RuntimeError(f"my own environment is {dict(os.environ)} {file.read()}")


def lying(command):
    return os.system(command)


TEXT = "no function"
small = functools.partial(Model, 7)
shell = functools.partial(subprocess.call, shell=True)
wrapped = functools.wraps(os.system)(lambda command: os.system(command))
cached = functools.lru_cache(lying)
bound = Model(3).forward
instance = Model(3)
