"""A model whose blocks differ."""

import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.heads, self.out = 2, nn.Linear(width, width)

    def forward(self, x):
        return 0 * self.out(x) + 3.0


class Flat(nn.Module):
    """Two hidden units for all tokens in one row, of which the first is dead."""

    def __init__(self, width):
        super().__init__()
        self.down_proj = nn.Linear(2, width)

    def forward(self, x):
        units = x.flatten(0, 1)[:, :2].abs() * torch.tensor([0.0, 1.0])
        return self.down_proj(units).view_as(x)


class Block(nn.Module):
    def __init__(self, name, part):
        super().__init__()
        setattr(self, name, part)
        self.name = name

    def forward(self, x):
        return x + getattr(self, self.name)(x)


class Mixed(nn.Module):
    def __init__(self, vocab_size: int, width: int = 8):
        super().__init__()
        self.vocab_size = vocab_size
        self.embed, self.head = nn.Embedding(vocab_size, width), nn.Linear(width, vocab_size)
        parts = ("mlp", Flat(width)), ("attention", Attention(width)), ("mlp", Flat(width))
        self.blocks = nn.ModuleList(Block(*part) for part in parts)

    def forward(self, tokens_bt):
        x = self.embed(tokens_bt)
        for block in self.blocks:
            x = block(x)
        return self.head(x)
