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
from meshrl.common.weights.handshakes.noise import (
    TAG_BYTES,
    Buffer,
    HandshakeViolation,
    NoiseCipher,
)

RATES_FOLDER = "rates"  # below a host's root
BURST_S = 0.02  # of what was not used lately: a thread that woke up late makes up for it
PIECE_DURATION_S = 0.01  # what moves at once takes this long, so that connections share evenly
MIN_PIECE_BYTES = 16 << 10  # of a piece: below it the system calls cost more than they smooth
MAX_BACKLOG_S = 60.0  # that anybody is ahead; more is of a clock that began anew with the machine
_FREE_AT = struct.Struct("<d")  # when all that was moved so far is paid for, on the monotonic clock
T = TypeVar("T")
IoSteps = Generator[int, None, T]  # yields the selectors.EVENT_* that it waits for, or PAUSE
PAUSE = -2  # in place of an event: go on after `pause_s`
MAX_PIECE_BYTES = 1 << 20  # what one connection may move before the others have their turn
FRAME_BYTES = 256 << 10  # from here on AES-GCM is as fast as it gets: 9 GB/s a core
_FRAME_LENGTH = struct.Struct("<I")
_SMALL_BUFFER_BYTES, _LARGE_BUFFER_BYTES = (
    4 << 10,
    2 * FRAME_BYTES,
)  # room for what comes: of requests alone, of chunks


class RateLimiter:
    """One of them: who moves bytes says so, and waits as long as he is told before the next. A
    process that ends in between owes nothing.
    """

    def __init__(self, path: Path, bytes_per_s: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._bytes_per_s = bytes_per_s
        self._descriptor = descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        weakref.finalize(self, os.close, descriptor).atexit = False  # threads may be moving bytes
        if os.fstat(descriptor).st_size != _FREE_AT.size:  # of those who have mapped it
            os.ftruncate(descriptor, _FREE_AT.size)
        self._free_at = mmap.mmap(descriptor, _FREE_AT.size)
        self._lock = threading.Lock()  # of this process's threads; the file's is of processes

    @property
    def piece_bytes(self) -> int:
        """The most that is moved at once."""
        return max(MIN_PIECE_BYTES, int(self._bytes_per_s * PIECE_DURATION_S))

    def charge(self, size_bytes: int) -> float:
        """Says that bytes were moved; for how many seconds nobody may move more here."""
        with self._lock:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            try:
                now = time.monotonic()
                free: float = _FREE_AT.unpack_from(self._free_at)[0]
                if not now - BURST_S < free < now + MAX_BACKLOG_S:
                    free = now - BURST_S
                free += size_bytes / self._bytes_per_s
                _FREE_AT.pack_into(self._free_at, 0, free)
            finally:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        return max(0.0, free - now)


@dataclass(frozen=True)
class RateLimits:
    """Both; None: as fast as it goes."""

    up: RateLimiter | None = None
    down: RateLimiter | None = None

    @classmethod
    def from_settings(cls, settings: MeshSettings) -> RateLimits:
        """Those of a host's settings."""
        root = Path(settings.run_root) / RATES_FOLDER
        up, down = settings.rate_up, settings.rate_down
        return cls(
            RateLimiter(root / "up", up) if up else None,
            RateLimiter(root / "down", down) if down else None,
        )


UNLIMITED = RateLimits()


class FileTruncated(ConnectionError):
    """A file has fewer bytes than its length told when the transfer began."""


class BulkChannel:
    """Bytes as they are; `connected` does not block. They move no faster than `rates`."""

    def __init__(self, connected_socket: socket.socket, rates: RateLimits = UNLIMITED) -> None:
        self._socket, self._rates = connected_socket, rates
        self.pause_s = 0.0
        self.sent_file_bytes = 0  # bytes of files

    def receive_exactly(self, size: int) -> IoSteps[bytes]:
        """The next `size` bytes. ConnectionError, as from the others."""
        content = bytearray(size)
        view = memoryview(content)
        while view:
            view = view[(yield from self.receive(view)) :]
        return bytes(content)

    def receive(self, buffer: memoryview) -> IoSteps[int]:
        """Puts some bytes into `buffer`, which is not empty; how many."""
        most = min(len(buffer), _choose_piece_bytes(self._rates.down))
        while True:
            yield selectors.EVENT_READ
            with suppress(BlockingIOError):
                received = self._socket.recv_into(buffer, most)
                if received == 0:
                    raise ConnectionError("the other end closed the connection")
                yield from self._apply_rate(self._rates.down, received)
                return received

    def send(self, content: Buffer) -> IoSteps[None]:
        """Sends it all."""
        view, most = memoryview(content).cast("B"), _choose_piece_bytes(self._rates.up)
        while view:
            yield selectors.EVENT_WRITE
            with suppress(BlockingIOError):
                sent = self._socket.send(view[:most])
                view = view[sent:]
                yield from self._apply_rate(self._rates.up, sent)

    def send_file(self, descriptor: int, offset: int, length: int) -> IoSteps[None]:
        """Sends bytes of a file, past this process's memory. FileShorter."""
        ends, most = offset + length, _choose_piece_bytes(self._rates.up)
        while offset < ends:
            yield selectors.EVENT_WRITE
            with suppress(BlockingIOError):
                piece = min(most, ends - offset)
                sent = os.sendfile(self._socket.fileno(), descriptor, offset, piece)
                if sent == 0:
                    raise FileTruncated("the file became shorter")
                offset += sent
                self.sent_file_bytes += sent
                yield from self._apply_rate(self._rates.up, sent)

    def _apply_rate(self, rate: RateLimiter | None, size_bytes: int) -> IoSteps[None]:
        if rate is not None and (pause_s := rate.charge(size_bytes)) > 0:
            self.pause_s = pause_s
            yield PAUSE


def _choose_piece_bytes(rate: RateLimiter | None) -> int:
    return MAX_PIECE_BYTES if rate is None else min(MAX_PIECE_BYTES, rate.piece_bytes)


class SealedChannel(BulkChannel):
    """Encrypted bytes, of which nobody can change, repeat or leave out any."""

    def __init__(
        self,
        connected_socket: socket.socket,
        send_cipher: NoiseCipher,
        receive_cipher: NoiseCipher,
        rates: RateLimits = UNLIMITED,
    ) -> None:
        super().__init__(connected_socket, rates)
        self._send_cipher, self._receive_cipher = send_cipher, receive_cipher
        # What has come and was not opened yet: from `_first` on, up to `_last`.
        self._receive_buffer, self._unread_begin, self._unread_end = (
            bytearray(_SMALL_BUFFER_BYTES),
            0,
            0,
        )
        self._send_buffer = bytearray()
        self._file_buffer = bytearray()

    def receive(self, buffer: memoryview) -> IoSteps[int]:
        """Puts the next frame into `buffer`; how many bytes it has."""
        (length,) = _FRAME_LENGTH.unpack((yield from self._receive_buffered(_FRAME_LENGTH.size)))
        size = length - TAG_BYTES
        if not 0 < size <= min(FRAME_BYTES, len(buffer)):
            raise HandshakeViolation(f"a frame of {size} bytes where {len(buffer)} are awaited")
        return self._receive_cipher.decrypt_into(
            (yield from self._receive_buffered(length)), buffer[:size]
        )

    def _receive_buffered(self, size: int) -> IoSteps[memoryview]:
        """The next bytes, which lie there until more are asked for. As many are received at once as
        there is room for.
        """
        if self._unread_begin + size > len(self._receive_buffer):
            left = self._receive_buffer[self._unread_begin : self._unread_end]
            if size > len(self._receive_buffer):
                self._receive_buffer = bytearray(_LARGE_BUFFER_BYTES)
            self._receive_buffer[: len(left)] = left
            self._unread_begin, self._unread_end = 0, len(left)
        view = memoryview(self._receive_buffer)
        while self._unread_end - self._unread_begin < size:
            self._unread_end += yield from super().receive(view[self._unread_end :])
        self._unread_begin += size
        return view[self._unread_begin - size : self._unread_begin]

    def send(self, content: Buffer) -> IoSteps[None]:
        """Sends it all, in frames."""
        view = memoryview(content).cast("B")
        for at in range(0, len(view), FRAME_BYTES):
            yield from super().send(self._seal_frame(view[at : at + FRAME_BYTES]))

    def send_file(self, descriptor: int, offset: int, length: int) -> IoSteps[None]:
        """Sends bytes of a file, in frames. FileShorter."""
        ends = offset + length
        self._file_buffer = self._file_buffer or bytearray(FRAME_BYTES)
        while offset < ends:
            room = memoryview(self._file_buffer)[: min(FRAME_BYTES, ends - offset)]
            read = os.preadv(descriptor, [room], offset)
            if read == 0:
                raise FileTruncated("the file became shorter")
            offset += read
            yield from super().send(self._seal_frame(room[:read]))
            self.sent_file_bytes += read

    def _seal_frame(self, content: memoryview) -> memoryview:
        """A sealed frame, which lies there until the next one is made."""
        size = _FRAME_LENGTH.size + len(content) + TAG_BYTES
        if len(self._send_buffer) < size:
            self._send_buffer = bytearray(size)
        frame = memoryview(self._send_buffer)[:size]
        _FRAME_LENGTH.pack_into(frame, 0, len(content) + TAG_BYTES)
        self._send_cipher.encrypt_into(content, frame[_FRAME_LENGTH.size :])
        return frame
