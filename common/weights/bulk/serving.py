"""One client of a bulk port: a generator that goes on whenever its socket is ready."""

from __future__ import annotations

import os
import queue
import selectors
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Generic, TypeVar

from meshrl.common.api.transfer import bulk
from meshrl.common.base.digest import Hasher
from meshrl.common.base.errors import BadMessage, MeshError, NotAllowed, Refused, to_wire
from meshrl.common.mesh.wire.frames import pack_error
from meshrl.common.weights.bulk.channel import (
    PIECE_BYTES,
    UNLIMITED,
    BulkChannel,
    Rates,
    SealedChannel,
    Steps,
)
from meshrl.common.weights.bulk.doors import Door
from meshrl.common.weights.bulk.session import (
    ANSWER,
    FAILED,
    GET,
    HAS,
    OK,
    POSITION,
    PUT,
    REQUEST,
    REST,
    WHERE,
)
from meshrl.common.weights.chunks.chunks import ChunkStore
from meshrl.common.weights.chunks.partial import Parked, Partial

if TYPE_CHECKING:
    from meshrl.common.mesh.process.host import Host


TURN_S = 0.5  # how often a thread looks whether it should end

K = TypeVar("K")
Errand = Callable[[], object]
_MOST_BYTES = 1 << 62  # of a file: what is beyond is no offset
_PUTS = (PUT, HAS, REST)  # what who puts a chunk asks
_VERBS = (GET, WHERE, *_PUTS)
KEYS, DISK = 0, -1  # in place of an event of the socket: an errand, and who is to run it


class BulkTasks(Generic[K]):
    """One thread, which starts with the first errand. `woken` becomes readable when `done` has
    something to tell. `K`: who an errand is for.
    """

    def __init__(self, host: Host, name: str) -> None:
        self._host, self._name = host, name
        self.woken, self._wakes = socket.socketpair()
        for end in (self.woken, self._wakes):
            end.setblocking(False)
        self._todo: queue.SimpleQueue[tuple[K, Errand]] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[K, object]] = queue.SimpleQueue()
        self._started = self._closing = False

    def run(self, client: K, errand: Errand) -> None:
        """Has it done after those before it."""
        self._todo.put((client, errand))
        if not self._started:
            self._started = True
            self._thread = self._host.every(0.0, self._turn, self._name)

    def done(self) -> list[tuple[K, object]]:
        """For whom something was done, and what it returned, or its MeshError."""
        with suppress(BlockingIOError):
            self.woken.recv(4096)
        found = []
        with suppress(queue.Empty):
            while True:
                found.append(self._done.get_nowait())
        return found

    def close(self) -> None:
        """Ends the thread at its next look."""
        self._closing = True
        if not self._started:
            self._shut()

    def _shut(self) -> None:
        self.woken.close()
        self._wakes.close()

    def _turn(self) -> bool:
        if self._closing:
            self._shut()
            return False
        with suppress(queue.Empty):
            client, errand = self._todo.get(timeout=TURN_S)
            try:
                self._done.put((client, errand()))
            except Exception as error:  # its client is not to wait for an answer for ever
                typed = error if isinstance(error, MeshError) else MeshError(repr(error))
                self._done.put((client, typed))
            with suppress(BlockingIOError):  # the last one is still to be heard
                self._wakes.send(b"\0")
        return True


class Shelf:
    """What all clients of a port are served from."""

    def __init__(
        self,
        chunks: ChunkStore,
        parked: Parked,
        largest_bytes: int,
        rates: Rates = UNLIMITED,
        *,
        takes: bool = True,
    ) -> None:
        """`largest_bytes`: put by one request. `takes`: chunks; else it only gives them."""
        self.chunks, self.parked, self.largest_bytes = chunks, parked, largest_bytes
        self.rates, self.takes = rates, takes
        self.sent = 0  # bytes of chunks
        self.room = memoryview(bytearray(PIECE_BYTES))  # for what comes and is not kept in memory


class Serving:
    """Serves one client at `place`. Whoever runs `steps` sets `ends`, the time when it has waited
    too long; has `errand` done when it yields KEYS or DISK, and sets `done` to what came of it;
    goes on after `pause_s` when it yields PAUSE.
    """

    def __init__(
        self, connected: socket.socket, origin: str, door: Door, place: str, shelf: Shelf
    ) -> None:
        self.socket, self.origin = connected, origin
        self.told = False  # a key of its own
        self.user = ""  # who has it, and proves that
        self.errand: Errand = lambda: None
        self.done: object = None
        self.proven = self.ended = False
        self.ends = 0.0
        self.waits_for = selectors.EVENT_READ
        self._door, self._proof = door, door.answering(place)
        self._shelf, self._chunks, self._parked = shelf, shelf.chunks, shelf.parked
        self._room, self._largest_bytes = shelf.room, shelf.largest_bytes
        self._channel = BulkChannel(connected, shelf.rates)
        self._partial: Partial | None = None  # a chunk that this client brings part by part
        self.steps = self._serve()

    @property
    def pause_s(self) -> float:
        """How long it has to pause."""
        return self._channel.pause_s

    def _serve(self) -> Steps[None]:
        yield from self._let_in()
        if not self.proven:
            return
        try:
            while (yield from self._request()):
                pass
        finally:
            if self._partial is not None:
                self._parked.keep(self.user, self._partial)

    def _let_in(self) -> Steps[None]:
        proof = self._proof
        public = proof.whose((yield from self._channel.whole(proof.hello_bytes)))
        if public is None:
            return
        self.told = True
        user = yield from self._errand(KEYS, lambda: self._door.user_of(public))
        if not isinstance(user, str):  # nobody, or nobody knows now
            return
        self.user = user
        yield from self._channel.send(proof.challenge())
        self.proven = proof.proven((yield from self._channel.whole(proof.proof_bytes)))
        if self.proven and proof.ciphers is not None:
            self._channel = SealedChannel(self.socket, *proof.ciphers, self._shelf.rates)

    def _request(self) -> Steps[bool]:
        request = REQUEST.unpack((yield from self._channel.whole(REQUEST.size)))
        verb, number, digest, offset, length, size = request
        if verb not in _VERBS or offset + length > _MOST_BYTES or number >= len(bulk.SPACES):
            return False
        space = bulk.SPACES[number]
        if verb == PUT and length > self._largest_bytes:
            return False
        try:
            self._door.check(self.user, bulk.putting(space) if verb in _PUTS else bulk.GET)
            if (verb in _PUTS or space) and not self._shelf.takes:
                raise NotAllowed("it gives chunks and takes none", fix="Ask the weight store")
            self._chunks = self._shelf.chunks.space(space) if space else self._shelf.chunks
            if verb == GET:
                yield from self._get(digest.hex(), offset, length)
            elif verb == PUT:
                yield from self._put(digest.hex(), offset, length, size)
            elif verb == HAS:
                yield from self._has(digest.hex())
            elif verb == REST:
                # The client goes on where a broken connection has left off.
                self._forget()
                self._partial = self._parked.take(self.user, digest.hex())
                position = self._partial.position if self._partial is not None else 0
                yield from self._answer(POSITION.pack(position))
            else:
                yield from self._answer(os.fsencode(self._shelf.chunks.directory))
        except MeshError as error:
            self._forget()
            text = pack_error(*to_wire(error))
            yield from self._channel.send(ANSWER.pack(FAILED, 0, len(text)))
            yield from self._channel.send(text)
            return not isinstance(error, NotAllowed)
        return True

    def _get(self, digest: str, offset: int, most: int) -> Steps[None]:
        with self._chunks.open(digest) as file:
            size = os.fstat(file.fileno()).st_size
            length = max(0, min(size, offset + most) - offset)
            yield from self._channel.send(ANSWER.pack(OK, size, length))
            before = self._channel.sent
            try:
                yield from self._channel.send_file(file.fileno(), offset, length)
            finally:
                self._shelf.sent += self._channel.sent - before

    def _has(self, digest: str) -> Steps[None]:
        """Answer 1 if the chunk is there as it was written, for a client that has its bytes. It is
        read in pieces, so that the others have their turns.
        """
        whole = self._chunks.is_verified(digest)
        if not whole:
            hashed, there = Hasher(), False
            with suppress(FileNotFoundError), self._chunks.path(digest).open("rb") as file:
                there = True
                while piece := file.read(PIECE_BYTES):
                    hashed.update(piece)
                    yield selectors.EVENT_WRITE
            whole = hashed.hexdigest() == digest
            if there and not whole:
                self._chunks.whole(digest)
        yield from self._answer(bytes([whole and self._chunks.touch(digest)]))

    def _put(self, digest: str, offset: int, length: int, size: int) -> Steps[None]:
        trouble: MeshError | None = None
        partial: Partial | None = None
        try:
            if offset == 0:
                self._forget()
                self._partial = Partial.of_chunk(self._chunks, digest)
            partial = self._partial
            if partial is None or (partial.digest, partial.position) != (digest, offset):
                raise Refused(f"{digest} has not arrived up to byte {offset}", fix="Begin it again")
            if offset + length > size:
                raise BadMessage(f"bytes {offset} to {offset + length} of {size}")
        except MeshError as error:
            trouble = error
        while length:
            received = yield from self._channel.receive(self._room[: min(len(self._room), length)])
            length -= received
            if trouble is None and partial is not None:
                try:
                    partial.write(self._room[:received])
                except MeshError as error:  # take the rest, so that the client can read why
                    trouble = error
        if trouble is not None:
            raise trouble
        assert partial is not None
        if partial.position == size:
            if not partial.right:
                raise BadMessage(f"what arrived is not {digest}", where=str(self._chunks.directory))
            done = yield from self._errand(DISK, partial.commit)  # over what is there, if damaged
            if isinstance(done, MeshError):
                raise done
            self._forget()
        yield from self._answer(b"")

    def _errand(self, runner: int, errand: Errand) -> Steps[object]:
        self.errand = errand
        yield runner
        return self.done

    def _forget(self) -> None:
        if self._partial is not None:
            self._partial.discard()
            self._partial = None

    def _answer(self, content: bytes) -> Steps[None]:
        yield from self._channel.send(ANSWER.pack(OK, 0, len(content)))
        yield from self._channel.send(content)
