from __future__ import annotations

from typing import Any

import torch

from llmexp import mesh
from llmexp.data.window import Window
from llmexp.train.assembly.assemble import Parts
from llmexp.train.feature import Feature
from llmexp.train.step import Setup


def make(parts: Parts, setup: Setup) -> Digest:
    return Digest(setup.mesh)


class Digest(Feature):
    needs_digest = True

    def __init__(self, joined: mesh.Mesh) -> None:
        self._mesh = joined

    def row(self, window: Window) -> dict[str, Any]:
        digest = torch.tensor(window.digest, device=self._mesh.device)
        return {"data_digest": f"{int(mesh.total(self._mesh, digest)) % 2**63:016x}"}
