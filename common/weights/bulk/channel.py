"""Byte channel of one connection to a bulk port, plain or in sealed frames.

Its generators yield the events that they wait for. A server interleaves many of them, and a client
runs one to its end.

A sealed frame is the length of the rest (4 bytes, little-endian), up to FRAME_BYTES of ciphertext,
and the tag: one Noise transport message, which may exceed the framework's 65,535 bytes. A frame
never spans two requests, responses or the bytes after them. Each of these announces its length, so
truncation is detected.
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
BURST_S = 0.02  # of unused time: a thread that woke up late may catch up
PIECE_DURATION_S = 0.01  # of one piece, so that connections share evenly
MIN_PIECE_BYTES = 16 << 10  # below it, system calls cost more than smoothing gains
MAX_BACKLOG_S = 60.0  # a larger debt is from a clock that restarted with the machine
_FREE_AT = struct.Struct("<d")  # when all moved bytes are paid for, on the monotonic clock
T = TypeVar("T")
IoSteps = Generator[int, None, T]  # yields the awaited selectors.EVENT_*, or PAUSE
PAUSE = -2  # in place of an event: continue after `pause_s`
MAX_PIECE_BYTES = 1 << 20  # of one connection before the others continue
FRAME_BYTES = 256 << 10  # AES-GCM does not get faster beyond it: 9 GB/s per core
_FRAME_LENGTH = struct.Struct("<I")
_SMALL_BUFFER_BYTES, _LARGE_BUFFER_BYTES = (
    4 << 10,
    2 * FRAME_BYTES,
)  # for requests only; for chunks


class RateLimiter:
    """Rate limiter shared by all processes of a host through a file.

    Callers report moved bytes and wait for the returned time. A process that exits before that
    leaves no debt of its own.
    """

    def __init__(self, path: Path, bytes_per_s: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._bytes_per_s = bytes_per_s
        self._descriptor = descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        weakref.finalize(self, os.close, descriptor).atexit = False  # threads may be moving bytes
        if os.fstat(descriptor).st_size != _FREE_AT.size:  # keep the state of other processes
            os.ftruncate(descriptor, _FREE_AT.size)
        self._free_at = mmap.mmap(descriptor, _FREE_AT.size)
        # between this process's threads; the file lock is between processes
        self._lock = threading.Lock()

    @property
    def piece_bytes(self) -> int:
        """Maximum bytes to move at once."""
        return max(MIN_PIECE_BYTES, int(self._bytes_per_s * PIECE_DURATION_S))

    def charge(self, size_bytes: int) -> float:
        """Record moved bytes; return the seconds until any process may move more."""
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
    """Rate limiters for both directions; None: unlimited."""

    up: RateLimiter | None = None
    down: RateLimiter | None = None

    @classmethod
    def from_settings(cls, settings: MeshSettings) -> RateLimits:
        """Create the limiters of a host's settings."""
        root = Path(settings.run_root) / RATES_FOLDER
        up, down = settings.rate_up, settings.rate_down
        return cls(
            RateLimiter(root / "up", up) if up else None,
            RateLimiter(root / "down", down) if down else None,
        )


UNLIMITED = RateLimits()


class FileTruncated(ConnectionError):
    """A file has fewer bytes than its announced length."""


class BulkChannel:
    """Plain bytes over a non-blocking socket, at most at the given rates."""

    def __init__(self, connected_socket: socket.socket, rates: RateLimits = UNLIMITED) -> None:
        self._socket, self._rates = connected_socket, rates
        self.pause_s = 0.0
        self.sent_file_bytes = 0  # of files

    def receive_exactly(self, size: int) -> IoSteps[bytes]:
        """Receive the next `size` bytes. ConnectionError: the connection failed, as in all
        methods.
        """
        content = bytearray(size)
        view = memoryview(content)
        while view:
            view = view[(yield from self.receive(view)) :]
        return bytes(content)

    def receive(self, buffer: memoryview) -> IoSteps[int]:
        """Receive some bytes into a non-empty buffer; return their number."""
        most = min(len(buffer), _choose_piece_bytes(self._rates.down))
        while True:
            yield selectors.EVENT_READ
            with suppress(BlockingIOError):
                received = self._socket.recv_into(buffer, most)
                if received == 0:
                    raise ConnectionError("the peer closed the connection")
                yield from self._apply_rate(self._rates.down, received)
                return received

    def send(self, content: Buffer) -> IoSteps[None]:
        """Send all bytes."""
        view, most = memoryview(content).cast("B"), _choose_piece_bytes(self._rates.up)
        while view:
            yield selectors.EVENT_WRITE
            with suppress(BlockingIOError):
                sent = self._socket.send(view[:most])
                view = view[sent:]
                yield from self._apply_rate(self._rates.up, sent)

    def send_file(self, descriptor: int, offset: int, length: int) -> IoSteps[None]:
        """Send bytes of a file without copying them to this process. FileTruncated."""
        ends, most = offset + length, _choose_piece_bytes(self._rates.up)
        while offset < ends:
            yield selectors.EVENT_WRITE
            with suppress(BlockingIOError):
                piece = min(most, ends - offset)
                sent = os.sendfile(self._socket.fileno(), descriptor, offset, piece)
                if sent == 0:
                    raise FileTruncated("the file was truncated during the transfer")
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
    """Encrypted bytes; changes, repetition and omission are detected."""

    def __init__(
        self,
        connected_socket: socket.socket,
        send_cipher: NoiseCipher,
        receive_cipher: NoiseCipher,
        rates: RateLimits = UNLIMITED,
    ) -> None:
        super().__init__(connected_socket, rates)
        self._send_cipher, self._receive_cipher = send_cipher, receive_cipher
        # Received bytes that are not decrypted yet: `_unread_begin` to `_unread_end`.
        self._receive_buffer, self._unread_begin, self._unread_end = (
            bytearray(_SMALL_BUFFER_BYTES),
            0,
            0,
        )
        self._send_buffer = bytearray()
        self._file_buffer = bytearray()

    def receive(self, buffer: memoryview) -> IoSteps[int]:
        """Receive the next frame into `buffer`; return its size."""
        (length,) = _FRAME_LENGTH.unpack((yield from self._receive_buffered(_FRAME_LENGTH.size)))
        size = length - TAG_BYTES
        if not 0 < size <= min(FRAME_BYTES, len(buffer)):
            raise HandshakeViolation(f"a frame has {size} bytes instead of {len(buffer)}")
        return self._receive_cipher.decrypt_into(
            (yield from self._receive_buffered(length)), buffer[:size]
        )

    def _receive_buffered(self, size: int) -> IoSteps[memoryview]:
        """Receive the next bytes, valid until the next call; it receives as much as the buffer
        fits.
        """
        if self._unread_begin + size > len(self._receive_buffer):
            unread = self._receive_buffer[self._unread_begin : self._unread_end]
            if size > len(self._receive_buffer):
                self._receive_buffer = bytearray(_LARGE_BUFFER_BYTES)
            self._receive_buffer[: len(unread)] = unread
            self._unread_begin, self._unread_end = 0, len(unread)
        view = memoryview(self._receive_buffer)
        while self._unread_end - self._unread_begin < size:
            self._unread_end += yield from super().receive(view[self._unread_end :])
        self._unread_begin += size
        return view[self._unread_begin - size : self._unread_begin]

    def send(self, content: Buffer) -> IoSteps[None]:
        """Send all bytes in frames."""
        view = memoryview(content).cast("B")
        for at in range(0, len(view), FRAME_BYTES):
            yield from super().send(self._seal_frame(view[at : at + FRAME_BYTES]))

    def send_file(self, descriptor: int, offset: int, length: int) -> IoSteps[None]:
        """Send bytes of a file in frames. FileTruncated."""
        ends = offset + length
        self._file_buffer = self._file_buffer or bytearray(FRAME_BYTES)
        while offset < ends:
            room = memoryview(self._file_buffer)[: min(FRAME_BYTES, ends - offset)]
            read = os.preadv(descriptor, [room], offset)
            if read == 0:
                raise FileTruncated("the file was truncated during the transfer")
            offset += read
            yield from super().send(self._seal_frame(room[:read]))
            self.sent_file_bytes += read

    def _seal_frame(self, content: memoryview) -> memoryview:
        """Return a sealed frame, valid until the next one is made."""
        size = _FRAME_LENGTH.size + len(content) + TAG_BYTES
        if len(self._send_buffer) < size:
            self._send_buffer = bytearray(size)
        frame = memoryview(self._send_buffer)[:size]
        _FRAME_LENGTH.pack_into(frame, 0, len(content) + TAG_BYTES)
        self._send_cipher.encrypt_into(content, frame[_FRAME_LENGTH.size :])
        return frame
