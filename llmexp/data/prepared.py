"""The token shards of sources: those of the cache, or written now."""

from __future__ import annotations

from collections.abc import Iterable

from llmexp.data.cache import building
from llmexp.data.remote import RemoteCache
from llmexp.data.stored import SourceShards, open_shards
from llmexp.data.work import Work


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
