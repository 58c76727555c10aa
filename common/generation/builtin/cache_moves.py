"""What an engine tells of a session's keys and values, and whether another one may use them.

A token tells which weights sampled it; what an engine takes over must not let tokens of one version
follow a cache of another without an earlier token that shows it. So a cache is taken over if the
very weights that are loaded here computed all of it, or, where mixed caches are allowed, if a token
in it was sampled under other weights than these: then it is as if the session had stayed.
"""

from __future__ import annotations

import numpy as np

from common.generation.batch.slots import Slots
from common.generation.contract import MIXED, SessionCache

OLDER = -1  # number of the weights of a cache that these weights did not compute, or not all of it


def cached(slots: Slots, slot: int, layout: str, adapter: str) -> SessionCache | None:
    """What a slot has computed, with the adapter of this name; None: nothing that another engine
    could take over.
    """
    n = int(slots.computed[slot])
    first = min(int(slots.first_sampled[slot]), n)
    mixed = bool(slots.weights[slot] != slots.current(slot))
    version = int(slots.loaded[slots.adapter[slot]])
    if not n or (mixed and first == n):
        return None
    return SessionCache(
        tokens=slots.tokens[slot, :n].astype(np.int32),
        layout=layout,
        version=MIXED if mixed else version,
        first_sampled=first,
        first_version=int(slots.versions[slot, first]) if first < n else version,
        adapter=adapter,
    )


def shown(cache: SessionCache, version: int) -> bool:
    """Whether a token of a cache tells that it is of other weights than this version's."""
    return cache.first_sampled < len(cache.tokens) and cache.first_version != version
