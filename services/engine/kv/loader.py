"""Brings chunks of prefixes that engines compute meanwhile: a thread that reads them from this
host's shelves.

Of all chunks that are wanted it brings the one whose computing costs the most for its bytes. All of
one engine's are equally large, and attention makes the later ones cost more: so it is the one that
lies furthest back, of whichever request.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from common.clock import Clock
from common.generation.builtin.loading import CHUNK, Loading
from services.engine.kv.chunk_files import Head
from services.engine.kv.rates import Pace
from services.engine.kv.shelf import Shelf

AHEAD_BYTES = 512 << 20  # that the engine has not yet put in its place
RESERVED_S = 60.0  # for which what a prefix is loaded from stays where it is
LOOK_S = 0.05  # between two looks whether the engine has taken what has come


@dataclass
class Wanted:
    """A prefix of which some may lie on the shelves."""

    load: Loading
    domain: str
    names: Callable[[], Sequence[str]]  # of its chunks, first to last; dear to make
    left: dict[int, str] = field(default_factory=dict)  # that may still be brought, by first token

    def next(self) -> int | None:
        """The first token of the chunk to bring next; None: there is none."""
        for start in list(self.left):
            if not self.load.wants(start):
                del self.left[start]
        if not self.left:
            return None
        return min(self.left) if self.load.alone else max(self.left)


def best(wanted: Sequence[Wanted]) -> tuple[Wanted, int] | None:
    """Whose chunk to bring next, and which; those that only loading helps go first, as their
    engine waits for them."""
    offers = [(one, start) for one in wanted if (start := one.next()) is not None]
    if not offers:
        return None
    return max(offers, key=lambda offer: (offer[0].load.alone, offer[1]))


class Loader:
    """A thread that brings what is wanted until it is closed. `came(tier, head, bytes)` is called
    there for each chunk, `wake` after it; `failed` if the thread ends otherwise.
    """

    def __init__(
        self,
        shelves: Sequence[Shelf],
        clock: Clock,
        wake: Callable[[], None],
        came: Callable[[str, Head, int], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._shelves, self._clock = shelves, clock
        self._wake, self._came, self._failed = wake, came, failed
        self.paces: Mapping[str, Pace] = {shelf.name: Pace() for shelf in shelves}
        self._new: list[Wanted] = []
        self._wanted: list[Wanted] = []
        self._condition = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kv loader", daemon=True)
        self._thread.start()

    def add(self, wanted: Wanted) -> None:
        """Brings what there is of a prefix."""
        with self._condition:
            self._new.append(wanted)
            self._condition.notify()

    def close(self) -> None:
        """Ends the thread; what was wanted ends too."""
        with self._condition:
            self._closed = True
            self._condition.notify()
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._go_on():
                pass
        except BaseException as error:
            self._failed(error)
        finally:
            for wanted in [*self._new, *self._wanted]:
                wanted.load.over = True
            self._wake()

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
            wanted.load.over = True
            self._wake()
        if chosen is not None:
            self._bring(*chosen)
        return True

    def _look(self, wanted: Wanted) -> None:
        """Finds out what there is of it."""
        load, until_s = wanted.load, self._clock.wall() + RESERVED_S
        if load.cancelled:
            return
        for index, name in enumerate(wanted.names()):
            start = index * CHUNK
            there = (shelf.files.use(wanted.domain, name, until_s) for shelf in self._shelves)
            if start >= load.begin and any(there):
                wanted.left[start] = name
            elif load.alone:
                break  # what lies behind a gap would be of no use
        if wanted.left:
            load.end = min(load.end, max(wanted.left) + CHUNK)
            load.found = min(load.end - load.begin, len(wanted.left) * CHUNK)

    def _bring(self, wanted: Wanted, start: int) -> None:
        name, load = wanted.left.pop(start), wanted.load
        for shelf in self._shelves:
            began = self._clock.monotonic()
            found = shelf.files.read(wanted.domain, name)
            if found is None:
                continue
            head, content = found
            took_s = self._clock.monotonic() - began
            if head.start != start or not load.wants(start):
                return
            self.paces[shelf.name].add(content.nbytes, took_s)
            load.expected_s = content.nbytes * self.paces[shelf.name].per_byte * len(self._wanted)
            load.bring(start, start + head.tokens, content)
            self._came(shelf.name, head, content.nbytes)
            self._wake()
            self._hold_back(load)
            return
        if load.alone:
            wanted.left.clear()

    def _hold_back(self, load: Loading) -> None:
        """Waits while the engine has too much at hand that it has not put in its place."""
        while not load.cancelled and not self._closed and load.waiting_bytes > AHEAD_BYTES:
            with self._condition:
                self._condition.wait(LOOK_S)
