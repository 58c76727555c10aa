"""Brings chunks of prefixes that engines compute meanwhile: a thread for each place from which they
come, this host's shelves or other hosts.

Of all chunks that are wanted it brings the one whose computing costs the most for its bytes. All of
one engine's are equally large, and attention makes the later ones cost more: so it is the one that
lies furthest back, of whichever request.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from meshrl.common.base.clock import Clock
from meshrl.common.generation.loading import CHUNK, Content, Loading
from meshrl.services.engine.kv.chunk_files import ChunkHead
from meshrl.services.engine.kv.rates import LoadingPace
from meshrl.services.engine.kv.shelf import KVTier

AHEAD_BYTES = 512 << 20  # that the engine has not yet put in its place
RESERVED_S = 60.0  # for which what a prefix is loaded from stays where it is
LOOK_S = 0.05  # between two looks whether the engine has taken what has come

Came = tuple[str, ChunkHead, Content]  # from which tier, and a chunk


class ChunkSource(Protocol):
    """Where chunks come from. It may take its time, and fails by having nothing."""

    name: str

    def look(self, domain: str, names: Mapping[int, str]) -> Collection[int]:
        """Which of these chunks it has, by their first tokens."""

    def read(self, domain: str, name: str) -> Came | None:
        """A chunk, checked; None: it has it no more."""


class Shelves:
    """Those of this host, the nearest first."""

    name = "shelves"

    def __init__(self, shelves: Sequence[KVTier], clock: Clock) -> None:
        self._shelves, self._clock = shelves, clock

    def look(self, domain: str, names: Mapping[int, str]) -> list[int]:
        until_s = self._clock.wall() + RESERVED_S
        return [
            start
            for start, name in names.items()
            if any(shelf.files.use(domain, name, until_s) for shelf in self._shelves)
        ]

    def read(self, domain: str, name: str) -> Came | None:
        for shelf in self._shelves:
            found = shelf.files.read(domain, name)
            if found is not None:
                return (shelf.name, *found)
        return None


@dataclass
class WantedPrefix:
    """A prefix of which some may lie there."""

    load: Loading
    domain: str
    names: Callable[[], Mapping[int, str]]  # of its chunks, by their first tokens; dear to make
    left: dict[int, str] = field(default_factory=dict)  # that may still be brought

    def next(self) -> int | None:
        """The first token of the chunk to bring next; None: there is none."""
        for start in list(self.left):
            if not self.load.wants(start):
                del self.left[start]
        if not self.left:
            return None
        return min(self.left) if self.load.alone else max(self.left)


def best(wanted: Sequence[WantedPrefix]) -> tuple[WantedPrefix, int] | None:
    """Whose chunk to bring next, and which; those that only loading helps go first, as their
    engine waits for them."""
    offers = [(one, start) for one in wanted if (start := one.next()) is not None]
    if not offers:
        return None
    return max(offers, key=lambda offer: (offer[0].load.alone, offer[1]))


class Loader:
    """A thread that brings what is wanted from one source, until it is closed. `came(tier, head,
    bytes)` is called there for each chunk, `wake` after it; `failed` if the thread ends otherwise.
    `rest` gets what the source does not have.
    """

    def __init__(
        self,
        source: ChunkSource,
        clock: Clock,
        wake: Callable[[], None],
        came: Callable[[str, ChunkHead, int], None],
        failed: Callable[[BaseException], None],
        rest: Callable[[WantedPrefix], None] = lambda _: None,
    ) -> None:
        self._source, self._clock = source, clock
        self._wake, self._came, self._failed, self._rest = wake, came, failed, rest
        self.paces: dict[str, LoadingPace] = {}
        self._new: list[WantedPrefix] = []
        self._wanted: list[WantedPrefix] = []
        self._condition = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"kv {source.name}", daemon=True)
        self._thread.start()

    def pace(self, tier: str) -> LoadingPace:
        return self.paces.setdefault(tier, LoadingPace())

    def add(self, wanted: WantedPrefix) -> None:
        wanted.load.bringers.add(self._source.name)
        with self._condition:
            self._new.append(wanted)
            self._condition.notify()

    def close(self) -> None:
        with self._condition:
            self._closed = True
            self._condition.notify()
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._go_on():
                pass
        except BaseException as error:
            if not self._closed:
                self._failed(error)
        finally:
            for wanted in [*self._new, *self._wanted]:
                self._end(wanted)

    def _go_on(self) -> bool:
        with self._condition:
            while not (self._new or self._wanted or self._closed):
                self._condition.wait()
            if self._closed:
                return False
            new, self._new = self._new, []
        for wanted in new:
            self._look(wanted)
            self._wanted.append(wanted)
        chosen = best(self._wanted)
        for wanted in [one for one in self._wanted if one.next() is None]:
            self._wanted.remove(wanted)
            self._end(wanted)
        if chosen is not None:
            self._bring(*chosen)
        return True

    def _end(self, wanted: WantedPrefix) -> None:
        wanted.load.bringers.discard(self._source.name)
        if not wanted.load.bringers:
            wanted.load.over = True
        self._wake()

    def _look(self, wanted: WantedPrefix) -> None:
        load = wanted.load
        if load.cancelled:
            return
        names = {start: name for start, name in wanted.names().items() if load.wants(start)}
        there = set(self._source.look(wanted.domain, names))
        for start, name in names.items():
            if start in there:
                wanted.left[start] = name
            elif load.alone:
                break  # what lies behind a gap would be of no use
        missing = {start: name for start, name in names.items() if start not in there}
        if missing and not load.alone:
            self._rest(WantedPrefix(load, wanted.domain, lambda: missing))
        load.found += CHUNK * len(wanted.left)

    def _bring(self, wanted: WantedPrefix, start: int) -> None:
        name, load = wanted.left.pop(start), wanted.load
        began = self._clock.monotonic()
        found = self._source.read(wanted.domain, name)
        if found is None or found[1].start != start:
            if load.alone:
                wanted.left.clear()
            return
        tier, head, content = found
        pace = self.pace(tier)
        pace.add(content.nbytes, self._clock.monotonic() - began)
        if load.wants(start):
            load.expected_s = content.nbytes * pace.per_byte * len(self._wanted)
            load.bring(start, start + head.tokens, content)
            self._came(tier, head, content.nbytes)
            self._wake()
            while not load.cancelled and not self._closed and load.waiting_bytes > AHEAD_BYTES:
                with self._condition:
                    self._condition.wait(LOOK_S)
