from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch

from llmexp import mesh
from llmexp.data.window import Window
from llmexp.train.assembly.assemble import Parts
from llmexp.train.feature import Feature
from llmexp.train.step import Setup


def make(parts: Parts, setup: Setup) -> Digest:
    return Digest(setup.mesh)


class Digest(Feature):
    """Sum digests of rows: the ranks' sum mod 2**63 does not depend on how a window is cut."""

    def __init__(self, joined: mesh.Mesh) -> None:
        self._mesh = joined

    def mark(self, tokens_rs: np.ndarray, first_row: int) -> int:
        """Return the sum of the rows' blake2b digests (8 bytes).

        Each is over the row's place in the window and its ids.
        """
        rows, width = tokens_rs.shape
        message = np.empty((rows, width + 1), "<u4")
        message[:, 0], message[:, 1:] = np.arange(first_row, first_row + rows), tokens_rs
        digests = [hashlib.blake2b(row, digest_size=8).digest() for row in message]
        return sum(int.from_bytes(digest, "little") for digest in digests) % 2**63

    def row(self, window: Window) -> dict[str, Any]:
        digest = torch.tensor(window.mark, device=self._mesh.device)
        return {"data_digest": f"{int(mesh.total_(self._mesh, digest)) % 2**63:016x}"}
