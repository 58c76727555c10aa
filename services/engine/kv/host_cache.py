"""Keys and values of one engine's host: what its cache lets go of, in memory and on disk, for this
engine and the others of the host.

The engine calls it between and within its steps, so nothing here waits: what is looked for is found
by the loader's thread, what is kept is written by the writer's.
"""

from __future__ import annotations

import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from meshrl.common.api.engine import Stored
from meshrl.common.api.stats import KVStats
from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import BadMessage
from meshrl.common.generation.contract import Ints
from meshrl.common.generation.loading import CHUNK, KeptPrefix, Loading, Origin, Sought
from meshrl.services.engine.kv.chunk_files import ChunkHead, domain_of, is_domain, names_of
from meshrl.services.engine.kv.loader import ChunkSource, Loader, Shelves, WantedPrefix
from meshrl.services.engine.kv.peers import FROM_TOKENS, ShelvedChunks, names_in
from meshrl.services.engine.kv.rates import LoadingPace, Worth
from meshrl.services.engine.kv.shelf import KVTier
from meshrl.services.engine.kv.writer import ChunkWriter, Copy

SESSIONS = 1 << 14  # whose caches were let go of


@dataclass(frozen=True)
class _LeftSession:
    tokens: Ints
    domain: str
    names: tuple[str, ...]
    origin: Origin
    adapter: str


class CachedEngine(Protocol):
    @property
    def cache_layout(self) -> str:
        """How they lie in copies of its cache."""

    @property
    def cache_bytes_per_token(self) -> int:
        """Bytes of a token's keys and values."""

    @property
    def prefill_tokens_per_s(self) -> float:
        """Known tokens computed in a second; 0: unknown."""

    def keep_all(self) -> None:
        """Offers all that it has."""


class HostCache:
    """What an engine keeps on shelves, the nearest first. `policy` keep: caches of other versions
    than the loaded one are of use.
    """

    def __init__(
        self,
        shelves: Sequence[KVTier],
        clock: Clock,
        engine: CachedEngine,
        policy: str,
        wake: Callable[[], None],
        failed: Callable[[BaseException], None],
        peers: ChunkSource | None = None,
    ) -> None:
        """`wake` is called when something has come; `failed` hears of what nobody has thought of;
        `peers` have what lies on other hosts.
        """
        self.keep_all = engine.keep_all
        self._shelves, self._clock, self._engine = shelves, clock, engine
        self._layout, self._policy = engine.cache_layout, policy
        self._bytes_per_token = engine.cache_bytes_per_token
        self._weights = ""  # the manifest of what the engine computes with; empty: unknown
        self._holds: list[int] = []
        self._sessions: OrderedDict[int, _LeftSession] = OrderedDict()
        self._pending: set[str] = set()  # names of chunks that are about to be written
        self._loads: list[Loading] = []
        self._worth = {"session": Worth(), "prefix": Worth()}
        self._copying = LoadingPace()  # of the engine, which stands meanwhile
        self.sought = 0  # tokens of prefixes that were looked for
        self.again = 0  # tokens that were computed although they had been kept
        self.loaded: Counter[str] = Counter()  # tokens that came, by shelf
        self.bytes: Counter[str] = Counter()  # of them
        self.saved_s = 0.0  # that computing them would have taken
        about = clock, wake, self._came, failed
        self._peers = None if peers is None else Loader(peers, *about)
        self._found = Shelves(shelves, clock)
        self.loader = Loader(self._found, *about, rest=self._elsewhere)
        done = self._pending.discard
        self.writer = ChunkWriter(shelves, clock, self._per_byte, done, failed)

    def _per_byte(self, shelf: KVTier) -> float:
        return self.loader.pace(shelf.name).per_byte

    def _elsewhere(self, wanted: WantedPrefix) -> None:
        """Other hosts are asked for what this one lacks, if it is much."""
        if self._peers is not None and len(wanted.names()) * CHUNK >= FROM_TOKENS:
            self._peers.add(wanted)

    def close(self) -> None:
        self.loader.close()
        if self._peers is not None:
            self._peers.close()
        self.writer.close()
        for descriptor in self._holds:
            os.close(descriptor)
        self._holds = []
        for shelf in self._shelves:
            shelf.close()

    def computing(self, weights: str, adapters: Sequence[str] = ()) -> None:
        """The engine computes with the weights of this manifest from now on, or with none that has
        a name; what was kept of others goes once nobody can use it."""
        if weights == self._weights:
            return
        self._weights = weights
        domains = [self._domain(adapter) for adapter in ("", *adapters)] if weights else []
        if self._policy == "recompute":
            self.release(list(self._sessions))
        self.writer.do(partial(self._exchange, domains))

    def _exchange(self, domains: Sequence[str]) -> None:
        held = [shelf.hold(domain) for shelf in self._shelves for domain in domains]
        before, self._holds = self._holds, [one for one in held if one is not None]
        for descriptor in before:
            os.close(descriptor)
        for shelf in self._shelves:
            shelf.empty()

    def _domain(self, adapter: str) -> str:
        return domain_of(self._weights, adapter, self._layout, self._policy)

    # -- what is looked for ----------------------------------------------------------------------

    def find(self, sought: Sought) -> Loading | None:
        """What will come of a prefix, perhaps nothing; None: there is nothing to look for."""
        if not self._weights:
            return None
        now_s, n = self._clock.monotonic(), len(sought.tokens)
        self.sought += n - sought.computed
        session = self._session_of(sought)
        domain = self._domain(sought.adapter)
        if session is not None and session.domain != domain:  # of earlier weights, or of several
            load = self._alone(sought, session, now_s)
            if load is not None:
                return load
            session = None
        origin = session.origin if session is not None else None
        load = Loading(sought.computed, (n - 1) // CHUNK * CHUNK, now_s, origin=origin)
        self._loads.append(load)
        tokens = sought.tokens[: n - 1]
        if any(self._there(domain, name) for name in names_of(domain, tokens[:CHUNK])):
            load.expected_s = CHUNK * self._bytes_per_token * self._per_byte(self._shelves[0])
        self.loader.add(WantedPrefix(load, domain, lambda: by_start(names_of(domain, tokens))))
        return load

    def _session_of(self, sought: Sought) -> _LeftSession | None:
        """What is kept of its own cache, if it goes on from there."""
        found = self._sessions.get(sought.session)
        if found is None or found.adapter != sought.adapter:
            return None
        n = len(found.tokens)
        goes_on = n < len(sought.tokens) and bool((sought.tokens[:n] == found.tokens).all())
        return found if goes_on else None

    def _alone(self, sought: Sought, session: _LeftSession, now_s: float) -> Loading | None:
        """A cache of earlier weights, where it may be used and is loaded faster than computed."""
        n, origin = len(session.tokens), session.origin
        if self._policy != "keep" or sought.computed or origin.first_sampled >= n:
            return None
        rate = self._engine.prefill_tokens_per_s
        per_byte = max(map(self._per_byte, self._shelves))
        if rate and per_byte * self._bytes_per_token > 1 / rate:
            return None
        load = Loading(0, n, now_s, origin=origin, alone=True)
        self._loads.append(load)
        self.loader.add(WantedPrefix(load, session.domain, lambda: by_start(session.names)))
        return load

    def _came(self, tier: str, head: ChunkHead, size: int) -> None:
        tokens = head.tokens
        self.loaded[tier] += tokens
        self.bytes[tier] += size
        self._worth["session" if head.session else "prefix"].was_used()
        rate = self._engine.prefill_tokens_per_s
        self.saved_s += tokens / rate if rate else 0.0

    # -- what is kept ----------------------------------------------------------------------------

    def keep(self, kept: KeptPrefix) -> None:
        """Copies out what is worth it, the last chunks first, for so long as an engine may stand.
        A cache of several weights is its session's alone, and of use as a whole.
        """
        if not self._weights or not (kept.pure or (kept.lost and self._policy == "keep")):
            return
        n = len(kept.tokens)
        if not kept.pure and (kept.session < 0 or kept.origin.first_sampled >= n):
            return  # nobody could use it
        domain = self._domain(kept.adapter) if kept.pure else os.urandom(16).hex()
        own = kept.lost and kept.session >= 0
        names = names_of(domain, kept.tokens, tail=own)  # all of it, if it outlives its weights
        tag = kept.session + 1 if own else 0
        copied = self._copied(kept, domain, names, tag)
        if own and (copied or kept.pure):
            self._remember(kept, domain, names, tag)

    def _copied(self, kept: KeptPrefix, domain: str, names: Sequence[str], tag: int) -> bool:
        """Copies what is worth it; whether all of it lies there or is on the way."""
        clock, n = self._clock, len(kept.tokens)
        began = clock.monotonic()
        worth = self._worth["session" if kept.lost else "prefix"]
        rate = self._engine.prefill_tokens_per_s
        for index in reversed(range(len(names))):
            name, start = names[index], index * CHUNK
            end = min(start + CHUNK, n)
            if name in self._pending or self._there(domain, name):
                continue
            size = (end - start) * self._bytes_per_token
            saved_s = (end - start) / rate if rate else 0.0
            left_s = began + kept.stop_s - clock.monotonic()
            if left_s <= 0 or not self.writer.room(size, left_s):
                self.writer.not_kept += index + 1
                return False
            if kept.pure and not worth.pays(saved_s, size * self._copying.per_byte):
                continue
            at = clock.monotonic()
            content = np.ascontiguousarray(kept.read(start, end))
            self._copying.add(content.nbytes, clock.monotonic() - at)
            worth.was_kept()
            self._pending.add(name)
            self.writer.add(
                Copy(domain, name, ChunkHead(start, end - start, saved_s, tag), content)
            )
        return True

    def _there(self, domain: str, name: str) -> bool:
        return any(shelf.files.has(domain, name) for shelf in self._shelves)

    def _remember(self, kept: KeptPrefix, domain: str, names: Sequence[str], tag: int) -> None:
        before = self._sessions.pop(kept.session, None)
        self._sessions[kept.session] = _LeftSession(
            kept.tokens, domain, tuple(names), kept.origin, kept.adapter
        )
        stays = frozenset(names) if before is not None and before.domain == domain else frozenset()
        old = [name for name in before.names if name not in stays] if before is not None else []

        def note() -> None:
            for shelf in self._shelves:
                shelf.wait_for(tag)
                if before is not None:
                    shelf.drop(before.domain, old, tag)

        self.writer.do(note)
        if len(self._sessions) > SESSIONS:
            self._forget(next(iter(self._sessions)))

    def release(self, sessions: Sequence[int]) -> None:
        """These sessions have ended: nobody asks for what was theirs alone."""
        for session in sessions:
            self._forget(session)

    def _forget(self, session: int) -> None:
        found = self._sessions.pop(session, None)
        if found is None:
            return

        def forget() -> None:
            for shelf in self._shelves:
                shelf.forget(session + 1)
                shelf.drop(found.domain, found.names, session + 1)

        self.writer.do(forget)

    @property
    def shelved(self) -> ShelvedChunks:
        return ShelvedChunks(self._shelves)

    def stored(self, asked: Stored) -> NDArray[np.bool_]:
        """Which of the chunks lie on the shelves, bool [n]; they stay for a while."""
        names = names_in(asked)
        if not is_domain(asked.domain):
            raise BadMessage(f"{asked.domain!r:.60} names no weights")
        there = set(self._found.look(asked.domain, dict(enumerate(names))))
        return np.array([index in there for index in range(len(names))], np.bool_)

    def stats(self) -> KVStats:
        for load in [load for load in self._loads if load.cancelled]:
            self._loads.remove(load)
            self.again += max(0, load.found - load.loaded)
        troubles = [*(shelf.refused for shelf in self._shelves), self.writer.trouble]
        return KVStats(
            again=self.again,
            loaded=dict(self.loaded),
            bytes_in=dict(self.bytes),
            bytes_out=dict(self.writer.written),
            sought=self.sought,
            not_kept=self.writer.not_kept,
            saved_s=round(self.saved_s, 3),
            used={shelf.name: shelf.used for shelf in self._shelves},
            refused=[trouble for trouble in troubles if trouble],
        )


def by_start(names: Sequence[str]) -> dict[int, str]:
    return {index * CHUNK: name for index, name in enumerate(names)}
