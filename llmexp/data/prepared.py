"""The token shards of sources, written where the cache has none; documents that two of them share.

No text is read for these but digests beside the shards, of at most LOOKED_AT training documents,
once for a validation set: the counts are kept in the cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

import numpy as np

from llmexp.data.beside import beside, digests_of
from llmexp.data.cache import building, cached
from llmexp.data.remote import RemoteCache
from llmexp.data.stored import SourceShards, open_shards
from llmexp.data.work import TRAIN, Work

LOOKED_AT = 1 << 26  # training documents that are looked at: 1 GiB of digests, some seconds


class StaleCache(Exception):
    """Report that remembered answers of a bucket or the hub describe shards that are missing."""


def prepare_sources(
    works: Iterable[Work], remote: RemoteCache
) -> tuple[dict[str, SourceShards], dict[str, SourceShards]]:
    """Return the shards of sources by name: of those to train on, and of validation sets.

    They are written where the cache has none. Raises ConfigError, and StaleCache.
    """
    ready, held_out = dict[str, SourceShards](), dict[str, SourceShards]()
    for work in works:
        found = open_shards(work)
        if found is None:
            if work.source.key in remote.remembered:
                raise StaleCache
            from llmexp.data.shards import write_source

            with building(work.folder, remote.cache):
                found = open_shards(work) or write_source(
                    work, remote.cache
                )  # another process was faster
        (held_out if work.source.held_out else ready)[work.source.name] = found
    return ready, held_out


def warnings_of(
    training: Mapping[str, SourceShards],
    held_out: Mapping[str, SourceShards],
    remote: RemoteCache,
) -> tuple[str, ...]:
    """Return a warning for each validation set that shares documents with training.

    Shares of the sources never do: a document's text decides its split.
    """
    found = []
    for name, one in held_out.items():
        known = [
            LOOKED_AT,
            [[source, each.content] for source, each in training.items()],
            one.content,
        ]
        try:
            counts = cached(remote.cache, "overlap", known, [], partial(shared, training, one))
        except OSError:  # a file of digests is gone: `verify data` names it
            continue
        if both := sum(counts.values()):
            there = ", ".join(f"{source} {count:,}" for source, count in counts.items() if count)
            found.append(
                f"the validation set {name} shares documents with training: {both:,} of its "
                f"{one.documents[TRAIN]:,} are trained on, as documents of {there}; its losses are "
                "too low: leave these out of one of the two (llmexp verify data names the first)"
            )
    return tuple(found)


def shared(training: Mapping[str, SourceShards], val: SourceShards) -> dict[str, int]:
    """Return by source how many documents of the set `val` are trained on.

    One that is in several sources counts for the first. Raises OSError.
    """
    mine = digests_of(val.streams[TRAIN].shards)
    mine = mine[np.argsort(mine["first"])]
    left = np.ones(len(mine), np.bool_)
    every = 1 + sum(one.documents[TRAIN] for one in training.values()) // LOOKED_AT
    counts = {}
    for name, one in training.items():
        before = int(left.sum())
        for shard in one.streams[TRAIN].shards[::every]:
            block = beside(shard, "digests")
            at = np.searchsorted(mine["first"], block["first"])
            at[at == len(mine)] = 0
            some = block[mine["first"][at] == block["first"]] if len(mine) else block[:0]
            if len(some):
                left &= ~np.isin(mine, some)
        counts[name] = before - int(left.sum())
    return counts
