"""The bytes of one connection to a bulk port, as they are or in sealed frames: generators that
yield what they wait for, so that a server runs many by turns and a client one to its end.

A sealed frame is the length of what follows (4 bytes, little-endian), then up to FRAME_BYTES
encrypted, and their tag: one Noise transport message, which may be longer than the framework's
65,535 bytes. No frame reaches beyond the end of a request, an answer or the bytes behind them, and
all of these tell their length before: what is cut off is missed.
"""

from __future__ import annotations

import os
import selectors
import socket
import struct
from collections.abc import Generator
from contextlib import suppress
from typing import TypeVar

from common.weights.bulk.rates import UNLIMITED, Rate, Rates
from common.weights.handshakes.noise import TAG_BYTES, Buffer, Cipher, Refusal

T = TypeVar("T")
Steps = Generator[int, None, T]  # yields the selectors.EVENT_* that it waits for, or PAUSE
PAUSE = -2  # in place of an event: go on after `pause_s`

PIECE_BYTES = 1 << 20  # what one connection may move before the others have their turn
FRAME_BYTES = 256 << 10  # from here on AES-GCM is as fast as it gets: 9 GB/s a core
_LENGTH = struct.Struct("<I")
_SMALL, _LARGE = 4 << 10, 2 * FRAME_BYTES  # room for what comes: of requests alone, of chunks


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
