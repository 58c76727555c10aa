"""The bytes of one connection to a bulk port, as they are or in sealed frames: generators that
yield what they wait for, so that a server runs many by turns and a client one to its end.

A sealed frame is the length of what follows (4 bytes, little-endian), then up to FRAME_BYTES
encrypted, and their tag: one Noise transport message, which may be longer than the framework's
65,535 bytes. No frame reaches beyond the end of a request, an answer or the bytes behind them, and
all of these tell their length before: what is cut off is missed.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from meshrl.common.base.host.settings import MeshSettings
from meshrl.common.weights.handshakes.noise import TAG_BYTES, Buffer, Cipher, Refusal

RATES = "rates"  # below a host's root
BURST_S = 0.02  # of what was not used lately: a thread that woke up late makes up for it
PIECE_S = 0.01  # what moves at once takes this long, so that connections share evenly
LEAST_BYTES = 16 << 10  # of a piece: below it the system calls cost more than they smooth
LONGEST_S = 60.0  # that anybody is ahead; more is of a clock that began anew with the machine
_FREE = struct.Struct("<d")  # when all that was moved so far is paid for, on the monotonic clock
T = TypeVar("T")
Steps = Generator[int, None, T]  # yields the selectors.EVENT_* that it waits for, or PAUSE
PAUSE = -2  # in place of an event: go on after `pause_s`
PIECE_BYTES = 1 << 20  # what one connection may move before the others have their turn
FRAME_BYTES = 256 << 10  # from here on AES-GCM is as fast as it gets: 9 GB/s a core
_LENGTH = struct.Struct("<I")
_SMALL, _LARGE = 4 << 10, 2 * FRAME_BYTES  # room for what comes: of requests alone, of chunks


class Rate:
    """One of them: who moves bytes says so, and waits as long as he is told before the next. A
    process that ends in between owes nothing.
    """

    def __init__(self, path: Path, bytes_per_s: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._bytes_per_s = bytes_per_s
        self._descriptor = descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        weakref.finalize(self, os.close, descriptor).atexit = False  # threads may be moving bytes
        if os.fstat(descriptor).st_size != _FREE.size:  # of those who have mapped it
            os.ftruncate(descriptor, _FREE.size)
        self._free = mmap.mmap(descriptor, _FREE.size)
        self._lock = threading.Lock()  # of this process's threads; the file's is of processes

    @property
    def piece_bytes(self) -> int:
        """The most that is moved at once."""
        return max(LEAST_BYTES, int(self._bytes_per_s * PIECE_S))

    def moved(self, size: int) -> float:
        """Says that bytes were moved; for how many seconds nobody may move more here."""
        with self._lock:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            try:
                now = time.monotonic()
                free: float = _FREE.unpack_from(self._free)[0]
                if not now - BURST_S < free < now + LONGEST_S:
                    free = now - BURST_S
                free += size / self._bytes_per_s
                _FREE.pack_into(self._free, 0, free)
            finally:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        return max(0.0, free - now)


@dataclass(frozen=True)
class Rates:
    """Both; None: as fast as it goes."""

    up: Rate | None = None
    down: Rate | None = None

    @classmethod
    def of(cls, settings: MeshSettings) -> Rates:
        """Those of a host's settings."""
        root = Path(settings.run_root) / RATES
        up, down = settings.rate_up, settings.rate_down
        return cls(
            Rate(root / "up", up) if up else None, Rate(root / "down", down) if down else None
        )


UNLIMITED = Rates()


class FileShorter(ConnectionError):
    """A file has fewer bytes than its length told when the transfer began."""


class BulkChannel:
    """Bytes as they are; `connected` does not block. They move no faster than `rates`."""

    def __init__(self, connected: socket.socket, rates: Rates = UNLIMITED) -> None:
        self._socket, self._rates = connected, rates
        self.pause_s = 0.0
        self.sent = 0  # bytes of files

    def whole(self, size: int) -> Steps[bytes]:
        """The next `size` bytes. ConnectionError, as from the others."""
        content = bytearray(size)
        view = memoryview(content)
        while view:
            view = view[(yield from self.receive(view)) :]
        return bytes(content)

    def receive(self, room: memoryview) -> Steps[int]:
        """Puts some bytes into `room`, which is not empty; how many."""
        most = min(len(room), _piece_bytes(self._rates.down))
        while True:
            yield selectors.EVENT_READ
            with suppress(BlockingIOError):
                received = self._socket.recv_into(room, most)
                if received == 0:
                    raise ConnectionError("the other end closed the connection")
                yield from self._moved(self._rates.down, received)
                return received

    def send(self, content: Buffer) -> Steps[None]:
        """Sends it all."""
        view, most = memoryview(content).cast("B"), _piece_bytes(self._rates.up)
        while view:
            yield selectors.EVENT_WRITE
            with suppress(BlockingIOError):
                sent = self._socket.send(view[:most])
                view = view[sent:]
                yield from self._moved(self._rates.up, sent)

    def send_file(self, descriptor: int, offset: int, length: int) -> Steps[None]:
        """Sends bytes of a file, past this process's memory. FileShorter."""
        ends, most = offset + length, _piece_bytes(self._rates.up)
        while offset < ends:
            yield selectors.EVENT_WRITE
            with suppress(BlockingIOError):
                piece = min(most, ends - offset)
                sent = os.sendfile(self._socket.fileno(), descriptor, offset, piece)
                if sent == 0:
                    raise FileShorter("the file became shorter")
                offset += sent
                self.sent += sent
                yield from self._moved(self._rates.up, sent)

    def _moved(self, rate: Rate | None, size: int) -> Steps[None]:
        if rate is not None and (pause_s := rate.moved(size)) > 0:
            self.pause_s = pause_s
            yield PAUSE


def _piece_bytes(rate: Rate | None) -> int:
    return PIECE_BYTES if rate is None else min(PIECE_BYTES, rate.piece_bytes)


class SealedChannel(BulkChannel):
    """Encrypted bytes, of which nobody can change, repeat or leave out any."""

    def __init__(
        self, connected: socket.socket, sends: Cipher, receives: Cipher, rates: Rates = UNLIMITED
    ) -> None:
        super().__init__(connected, rates)
        self._sends, self._receives = sends, receives
        # What has come and was not opened yet: from `_first` on, up to `_last`.
        self._incoming, self._first, self._last = bytearray(_SMALL), 0, 0
        self._outgoing = bytearray()
        self._content = bytearray()

    def receive(self, room: memoryview) -> Steps[int]:
        """Puts the next frame into `room`; how many bytes it has."""
        (length,) = _LENGTH.unpack((yield from self._next(_LENGTH.size)))
        size = length - TAG_BYTES
        if not 0 < size <= min(FRAME_BYTES, len(room)):
            raise Refusal(f"a frame of {size} bytes where {len(room)} are awaited")
        return self._receives.open((yield from self._next(length)), room[:size])

    def _next(self, size: int) -> Steps[memoryview]:
        """The next bytes, which lie there until more are asked for. As many are received at once as
        there is room for.
        """
        if self._first + size > len(self._incoming):
            left = self._incoming[self._first : self._last]
            if size > len(self._incoming):
                self._incoming = bytearray(_LARGE)
            self._incoming[: len(left)] = left
            self._first, self._last = 0, len(left)
        view = memoryview(self._incoming)
        while self._last - self._first < size:
            self._last += yield from super().receive(view[self._last :])
        self._first += size
        return view[self._first - size : self._first]

    def send(self, content: Buffer) -> Steps[None]:
        """Sends it all, in frames."""
        view = memoryview(content).cast("B")
        for at in range(0, len(view), FRAME_BYTES):
            yield from super().send(self._frame(view[at : at + FRAME_BYTES]))

    def send_file(self, descriptor: int, offset: int, length: int) -> Steps[None]:
        """Sends bytes of a file, in frames. FileShorter."""
        ends = offset + length
        self._content = self._content or bytearray(FRAME_BYTES)
        while offset < ends:
            room = memoryview(self._content)[: min(FRAME_BYTES, ends - offset)]
            read = os.preadv(descriptor, [room], offset)
            if read == 0:
                raise FileShorter("the file became shorter")
            offset += read
            yield from super().send(self._frame(room[:read]))
            self.sent += read

    def _frame(self, content: memoryview) -> memoryview:
        """A sealed frame, which lies there until the next one is made."""
        size = _LENGTH.size + len(content) + TAG_BYTES
        if len(self._outgoing) < size:
            self._outgoing = bytearray(size)
        frame = memoryview(self._outgoing)[:size]
        _LENGTH.pack_into(frame, 0, len(content) + TAG_BYTES)
        self._sends.seal(content, frame[_LENGTH.size :])
        return frame
