from __future__ import annotations

from llmexp.folders import rundir
from llmexp.folders.rows import LINEAGE, walk_rows
from llmexp.system.fileio import write_whole
from llmexp.train.assembly.assemble import Parts
from llmexp.train.feature import Feature
from llmexp.train.step import Setup


def make(parts: Parts, setup: Setup) -> Picture:
    return Picture()


class Picture(Feature):
    """Draw the rows of the run, of a fork after those of its parents."""

    def files(self) -> list[tuple[str, str]]:
        from llmexp.metrics.plot import plot_losses

        path = self.loop.path
        before = (row for row, _ in walk_rows(path / LINEAGE))
        rows = (row for row, _ in walk_rows(path / rundir.METRICS))
        if png := plot_losses(rows, f"{self.loop.config.name}/{path.name}", before):
            write_whole(path / "loss.png", png)
        picture = path / "loss.png"
        return [("picture", str(picture))] if picture.exists() else []
