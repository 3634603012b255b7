"""The independent units of an evaluation: documents or sequences."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from llmexp.data.stream import TokenStream

SCAN_TOKENS = 1 << 20


def document_ends(stream: TokenStream, end: int | None) -> np.ndarray:
    """Return int64 [n]: the positions of the last ids of documents."""
    if end is None:
        return np.empty(0, np.int64)
    found = [at + np.flatnonzero(ids == end) for at, ids in stream.blocks(SCAN_TOKENS)]
    return np.concatenate([np.empty(0, np.int64), *found])


@dataclass
class Sums:
    """Sum nll, targets and bytes by unit. With `ends` units are documents, which may be cut into
    several sequences; else each sequence is one."""

    ends: np.ndarray
    _keys: list[np.ndarray] = field(default_factory=list)
    _sums: list[np.ndarray] = field(default_factory=list)

    @property
    def unit(self) -> str:
        return "documents" if len(self.ends) else "sequences"

    def add(
        self, starts_b: np.ndarray, nll_bt: np.ndarray, valid_bt: np.ndarray, bytes_bt: np.ndarray
    ) -> None:
        """Add rows whose inputs start at `starts_b`; of a row that is no sequence no target is
        valid."""
        # the target of input i is the id at i + 1
        at_bt = starts_b[:, None] + 1 + np.arange(nll_bt.shape[1])
        if len(self.ends):
            at_bt = np.searchsorted(self.ends, at_bt)  # so many documents end before it
        else:
            at_bt = np.broadcast_to(starts_b[:, None], nll_bt.shape)
        units, index = np.unique(at_bt[valid_bt], return_inverse=True)
        what = (nll_bt[valid_bt], None, bytes_bt[valid_bt])
        self._keys.append(units)
        self._sums.append(np.stack([np.bincount(index, w, len(units)) for w in what]))

    def take(self) -> tuple[np.ndarray, np.ndarray]:
        """Return int64 [n], the units (numbers of documents, or first positions of sequences), and
        float64 [3, n]: nll, targets and bytes of each."""
        if not self._keys:
            return np.empty(0, np.int64), np.empty((3, 0))
        units, index = np.unique(np.concatenate(self._keys), return_inverse=True)
        sums = np.concatenate(self._sums, axis=1)
        return units, np.stack([np.bincount(index, row, len(units)) for row in sums])
