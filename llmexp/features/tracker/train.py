from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llmexp.config.commands import command
from llmexp.train.assembly.assemble import Parts
from llmexp.train.feature import Feature
from llmexp.train.step import Setup

if TYPE_CHECKING:
    from llmexp.tracker.mirror import Mirror
    from llmexp.train.state import Loop


def make(parts: Parts, setup: Setup) -> Mirrored:
    return Mirrored()


class Mirrored(Feature):
    """Send the rows of rank 0; a thread does, and the run neither waits nor fails."""

    _mirrors: Sequence[Mirror] = ()

    def begin(self, loop: Loop) -> None:
        from llmexp.tracker.mirror import open_mirrors

        super().begin(loop)
        if loop.main:
            self._mirrors = open_mirrors(loop.path, loop.config, loop.console.line)

    def closed(self, summary: dict[str, Any], code: int) -> None:
        if self._mirrors:
            from llmexp.tracker.mirror import finish_all

            finish_all(self._mirrors, summary, code)

    def commands(self) -> list[tuple[str, str]]:
        from llmexp.tracker.fields import upload_is_pending

        path = self.loop.path
        return [("upload", command("sync", path))] if upload_is_pending(path) else []
