"""The server of a bulk port: who may connect, how many and how long.

It is one thread that never waits for one client, so a CANCEL on the control port never waits behind
a chunk.
"""

from __future__ import annotations

import errno
import math
import selectors
import socket
import time
from collections import Counter
from typing import TYPE_CHECKING

from meshrl.common.base.errors import ConfigError, StateUnavailable
from meshrl.common.base.host.ports import bare, ports, shown
from meshrl.common.base.host.settings import advertised_host
from meshrl.common.weights.bulk.channel import PAUSE, UNLIMITED, Rates
from meshrl.common.weights.bulk.doors import Door
from meshrl.common.weights.bulk.serving import DISK, KEYS, BulkTasks, Serving, Shelf
from meshrl.common.weights.chunks.chunks import ChunkStore
from meshrl.common.weights.chunks.partial import Parked

if TYPE_CHECKING:
    from meshrl.common.mesh.process.host import Host

LARGEST_BYTES = 4 << 30  # most in one request, at either end
IDLE_S = 60.0
COMMIT_S = 600.0  # for a disk to take what is left of a large file
TURN_S = 0.2  # how often the thread looks whether it should end
PROOF_S = 5.0  # in which a client has proved who it is: one round trip, on a busy host too
CONNECTIONS = 256
USER_CONNECTIONS = 64  # of one process; each has one request at a time
STRANGERS = 64  # connections without a proof yet; one makes room for the next
PAUSE_S = 0.5  # without accepting when no descriptors are left
_NONE_LEFT = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class BulkServer:
    """Serves a ChunkStore to whom `door` lets in. `bind` and `advertise` as for the transport;
    without `bind` there is no port, and only clients of this host find the chunks.
    """

    def __init__(
        self,
        chunks: ChunkStore,
        host: Host,
        bind: str,
        advertise: str = "",
        *,
        door: Door,
        largest_bytes: int = LARGEST_BYTES,
        rates: Rates = UNLIMITED,
        takes: bool = True,
    ) -> None:
        """`takes`: chunks of whoever may put them; else it only gives them."""
        chunks.directory.mkdir(parents=True, exist_ok=True)
        self._door, self._parked = door, Parked(time.monotonic)
        self._shelf = Shelf(chunks, self._parked, largest_bytes, rates, takes=takes)
        self._clients: dict[socket.socket, Serving] = {}
        self._paused: dict[Serving, float] = {}  # until when, by the clock
        # "bulk_handshake": could not begin, or prove its key. "bulk_keys": has a key that nobody of
        # the mesh has. "bulk_undecided": Redis did not tell. "bulk_crowd": made room.
        # "bulk_descriptors": there was none to take it with.
        self.refused: Counter[str] = Counter()
        self._closing = False
        if not bind:
            self.address = chunks.local_address
            return
        self._listener = _listening(bind)
        self._listener.setblocking(False)
        bound = self._listener.getsockname()
        self._place = f"tcp://{advertised_host(advertise) or shown(bound[0])}:{bound[1]}"
        self.address = f"{self._place}#{chunks.directory}"
        self._errands: dict[int, BulkTasks[Serving]] = {
            KEYS: BulkTasks(host, "bulk-keys"),
            DISK: BulkTasks(host, "bulk-disk"),
        }
        self._selector = selectors.DefaultSelector()
        self._accepts_from = 0.0  # by the clock; while it is ahead the listener is not looked at
        self._selector.register(self._listener, selectors.EVENT_READ)
        for errands in self._errands.values():
            self._selector.register(errands.woken, selectors.EVENT_READ, errands)
        self._thread = host.every(0.0, self._turn, "bulk")

    @property
    def connections(self) -> int:
        """How many are open now, those without a proof among them."""
        return len(self._clients)

    @property
    def sent(self) -> int:
        """Bytes of chunks that have left through this port."""
        return self._shelf.sent

    def close(self) -> None:
        """Stops the server at its thread's next look; transfers under way break off."""
        self._closing = True

    def _turn(self) -> bool:
        if self._closing:
            for client in list(self._clients.values()):
                self._end(client)
            for errands in self._errands.values():
                errands.close()
            self._selector.close()
            self._listener.close()
            self._parked.clear()
            return False
        # Until one that has paused goes on, or the thread looks whether it should end.
        paused_s = min(self._paused.values(), default=math.inf) - time.monotonic()
        for key, _ in self._selector.select(min(TURN_S, max(0.0, paused_s))):
            if key.fileobj is self._listener:
                self._accept()
            elif isinstance(key.data, BulkTasks):
                for client, done in key.data.done():
                    if not client.ended:
                        client.done = done
                        self._advance(client)
            elif not key.data.ended:  # in this very turn
                self._advance(key.data)
        now = time.monotonic()
        for client in [c for c, until in self._paused.items() if until <= now]:
            del self._paused[client]
            self._advance(client)
        self._parked.age()
        for client in [c for c in self._clients.values() if now > c.ends]:
            self._end(client)
        if 0.0 < self._accepts_from <= now:
            self._accepts_from = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ)
        return True

    # ------------------------------------------------------------ coming and going

    def _accept(self) -> None:
        strangers = [c for c in self._clients.values() if not c.proven]
        try:
            accepted, (origin, *_) = self._listener.accept()
        except OSError as error:
            if error.errno in _NONE_LEFT:  # else the client has gone again
                self.refused["bulk_descriptors"] += 1
                for stranger in strangers:  # they give theirs back
                    self._end(stranger)
                # Who knocks waits: it would wake the thread for ever.
                self._selector.unregister(self._listener)
                self._accepts_from = time.monotonic() + PAUSE_S
            return
        if len(self._clients) - len(strangers) >= CONNECTIONS:
            self.refused["bulk_crowd"] += 1
            accepted.close()
            return
        if len(strangers) >= STRANGERS:
            # The oldest of the address that has most goes: who knocks often keeps nobody else out.
            [(busiest, _)] = Counter(c.origin for c in strangers).most_common(1)
            self.refused["bulk_crowd"] += 1
            self._end(next(c for c in strangers if c.origin == busiest))
        accepted.setblocking(False)
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client = Serving(accepted, origin, self._door, self._place, self._shelf)
        client.ends = time.monotonic() + PROOF_S
        self._clients[accepted] = client
        self._selector.register(accepted, selectors.EVENT_READ, client)

    def _advance(self, client: Serving) -> None:
        known = client.proven
        try:
            wanted = next(client.steps)
        except (StopIteration, OSError):
            if not client.proven:
                undecided = isinstance(client.done, StateUnavailable)
                no_keys = "bulk_keys" if client.told and not client.user else "bulk_handshake"
                self.refused["bulk_undecided" if undecided else no_keys] += 1
            self._end(client)
            return
        if client.proven:
            client.ends = time.monotonic() + IDLE_S
            if not known:
                own = sum(c.proven and c.user == client.user for c in self._clients.values())
                if own > USER_CONNECTIONS:
                    self.refused["bulk_crowd"] += 1
                    self._end(client)
                    return
        if wanted == DISK:
            client.ends = time.monotonic() + COMMIT_S
        if wanted in self._errands:
            self._errands[wanted].run(client, client.errand)
        if wanted == PAUSE:
            self._paused[client] = time.monotonic() + client.pause_s
        self._wait(client, wanted)

    def _wait(self, client: Serving, wanted: int) -> None:
        before, client.waits_for = client.waits_for, max(0, wanted)
        if before == client.waits_for:
            return
        if not before:
            self._selector.register(client.socket, wanted, client)
        elif not client.waits_for:
            self._selector.unregister(client.socket)
        else:
            self._selector.modify(client.socket, wanted, client)

    def _end(self, client: Serving) -> None:
        client.ended = True
        self._paused.pop(client, None)
        client.steps.close()
        if client.waits_for:
            self._selector.unregister(client.socket)
        client.socket.close()
        del self._clients[client.socket]


def _listening(bind: str) -> socket.socket:
    interface, tried = ports(bind, "mesh.bind")
    host, family = bare(interface)
    trouble: OSError | None = None
    for port in tried:
        try:
            return socket.create_server((host, port), family=family, backlog=CONNECTIONS)
        except OSError as error:
            trouble = error
    raise ConfigError(
        f"no port to serve chunks from: {trouble}",
        where=f"mesh.bind = {bind!r}",
        fix="Take an address of this host, and * or a wider range of ports behind it",
    )
