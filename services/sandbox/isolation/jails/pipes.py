"""Descriptors between the event loop and a jail: frames, and output that is read up to a limit."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import BadMessage, DeadlineExceeded, PeerLost
from meshrl.services.sandbox.jail.wire import frames

READ_BYTES = 1 << 16
FRAME_BYTES = 1 << 20  # largest answer of a jail; the model may write it


class _DescriptorReader(ABC):
    """Reader that calls `_arrived` when bytes have come or the end was reached."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd, self.is_eof, self._buffer = fd, False, bytearray()
        self._waiter: asyncio.Future[None] | None = None
        asyncio.get_running_loop().add_reader(fd, self._read)

    def _read(self) -> None:
        part = frames.read_available(self._fd, READ_BYTES)
        if part is None:
            return
        if part:
            self._accept(part)
        else:
            self._stop()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _read_all(self) -> None:
        """Read until nothing more is available now."""
        before = -1
        while not self.is_eof and len(self._buffer) > before:
            before = len(self._buffer)
            self._read()

    @abstractmethod
    def _accept(self, part: bytes) -> None: ...

    def _stop(self) -> None:
        if not self.is_eof:
            self.is_eof = True
            asyncio.get_running_loop().remove_reader(self._fd)

    async def wait_readable(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def close(self) -> None:
        self._stop()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class JailOutput:
    """Standard output and error of a jail, counted together against one limit."""

    def __init__(self, limit_bytes: int) -> None:
        self.over_limit = asyncio.get_running_loop().create_future()  # resolves past the limit
        self.remaining_bytes = limit_bytes
        self.streams: list[OutputStream] = []

    def open_stream(self) -> int:
        """Open another stream and return the descriptor to write to, which the caller closes."""
        reading, writing = os.pipe2(os.O_CLOEXEC)
        self.streams.append(OutputStream(reading, self))
        return writing

    async def drain(self, clock: Clock, deadline_s: float) -> None:
        """Return when all streams have ended, or at the deadline."""
        if all(stream.is_eof for stream in self.streams):
            return
        with contextlib.suppress(DeadlineExceeded):
            async with clock.timeout(deadline_s, "reading the last output of a jail"):
                for stream in self.streams:
                    while not stream.is_eof:
                        await stream.wait_readable()

    def close(self) -> None:
        for stream in self.streams:
            stream.close()
        self.over_limit.cancel()


class OutputStream(_DescriptorReader):
    def __init__(self, fd: int, output: JailOutput) -> None:
        self._output = output
        super().__init__(fd)

    def _accept(self, part: bytes) -> None:
        accepted = part[: self._output.remaining_bytes]
        self._buffer += accepted
        self._output.remaining_bytes -= len(accepted)
        if len(accepted) < len(part) and not self._output.over_limit.done():
            self._output.over_limit.set_result(None)

    def take(self) -> bytes:
        """Return the output since the last call."""
        self._read_all()
        found = bytes(self._buffer)
        self._buffer.clear()
        return found


class Pipe(_DescriptorReader):
    """Our end of a socket pair that carries `frames`; the other end is passed to a jail."""

    def __init__(self) -> None:
        self._limit_bytes = FRAME_BYTES
        ours, self._jail_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        super().__init__(ours.detach())

    @property
    def jail_fd(self) -> int:
        return self._jail_end.fileno()

    def raise_frame_limit(self, extra_bytes: int) -> None:
        """Raise the limit of a frame by `extra_bytes`."""
        self._limit_bytes = FRAME_BYTES + extra_bytes

    def close_jail_end(self) -> None:
        """Close our copy of the jail's end, so that the end of the jail closes the pipe."""
        self._jail_end.close()

    def _accept(self, part: bytes) -> None:
        self._buffer += part
        if len(self._buffer) > frames.LENGTH + self._limit_bytes:
            self._stop()

    def send_now(self, value: Any) -> bool:
        """Send a frame that fits into the socket's buffer; False if the jail is gone."""
        record = frames.pack(value)
        try:
            return os.write(self._fd, record) == len(record)
        except OSError:
            return False

    async def send(self, clock: Clock, value: Any, deadline_s: float) -> None:
        """Return when a frame was taken; at once if it fits into the socket's buffer."""
        record = self._write(memoryview(frames.pack(value)))
        if not record:
            return
        loop = asyncio.get_running_loop()
        async with clock.timeout(deadline_s, "sending a frame to a jail"):
            while record:
                free = asyncio.Event()
                loop.add_writer(self._fd, free.set)
                try:
                    await free.wait()
                finally:
                    loop.remove_writer(self._fd)
                record = self._write(record)

    def _write(self, record: memoryview) -> memoryview:
        """Write what the socket takes now and return the rest; PeerLost if the jail is gone."""
        try:
            while record:
                record = record[os.write(self._fd, record) :]
        except BlockingIOError:
            return record
        except OSError as error:
            raise PeerLost(f"a jail has closed its channel: {error}") from None
        return record

    def is_idle(self) -> bool:
        """Return whether no unread bytes are there and the jail is not gone."""
        if not self.is_eof and not self._buffer:
            self._read()
        return not self.is_eof and not self._buffer

    async def receive(self, clock: Clock, deadline_s: float) -> Any:
        """Return the next frame; PeerLost at the end, BadMessage for an invalid one,
        DeadlineExceeded.
        """
        if (frame := self._take_frame()) is None:
            async with clock.timeout(deadline_s, "waiting for a jail's answer"):
                while frame is None:
                    if self.is_eof:
                        raise PeerLost("the jail has exited")
                    await self.wait_readable()
                    frame = self._take_frame()
        return frame

    def take_frames(self) -> Iterator[Any]:
        self._read_all()
        while (frame := self._take_frame()) is not None:
            yield frame

    def _take_frame(self) -> Any:
        try:
            return frames.take_frame(self._buffer, self._limit_bytes)
        except frames.FrameChannelClosed as error:
            raise BadMessage(f"invalid frame from a jail: {error}") from None
