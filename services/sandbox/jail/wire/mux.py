"""Several channels over one pair of pipes: a runner has only standard input and output.

A record is its kind, its channel, and a length. DATA is followed by so many bytes, END marks the
end of a channel, TAKEN acknowledges so many bytes. An end sends at most WINDOW bytes of a channel
beyond the acknowledged ones, so that a channel without a reader blocks no other. Both ends run this
code. Neither trusts the other: a violation of these rules is a MuxProtocolError.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Sequence

from .frames import read_available

HEAD = struct.Struct("<BBI")
DATA, END, WINDOW_UPDATE = 0, 1, 2
WINDOW = 1 << 18  # unacknowledged bytes of a channel
PART = 1 << 15  # most bytes in a record
READ = 1 << 16

# Numbers of the channels. The first two carry little, and have no window.
CONTROL, INIT, STDIN, STDOUT, STDERR, GUEST, PEER = range(7)
CHANNELS_BY_NAME = dict(
    zip(("keeper", "stdin", "stdout", "stderr", "cells", "peer"), range(INIT, PEER + 1))
)
UNWINDOWED = (CONTROL, INIT)
OUTPUTS = (STDOUT, STDERR)
AFTER_OUTPUTS = (GUEST,)  # their messages refer to earlier output: they never precede it


class MuxProtocolError(Exception):
    """Error raised when the other end violates the protocol."""


class MuxChannel:
    """Channel at one end: incoming data goes to a descriptor, or to a function."""

    def __init__(
        self, read_fd: int, write_fd: int, on_data: Callable[[bytes], None] | None
    ) -> None:
        self.read_fd, self.write_fd, self.on_data = read_fd, write_fd, on_data
        self.send_window_bytes = WINDOW
        self.receive_window_bytes = WINDOW
        self.pending = bytearray()  # received, and not yet written
        self.is_eof = False  # no more data follows


class Mux:
    """End of the connection, over the descriptors of the pipes to the other end."""

    def __init__(self, incoming_fd: int, outgoing_fd: int) -> None:
        self._incoming_fd, self._outgoing_fd = incoming_fd, outgoing_fd
        for fd in (incoming_fd, outgoing_fd):
            os.set_blocking(fd, False)
        self._channels: dict[int, MuxChannel] = {}
        self._received = bytearray()
        self.outbox = bytearray()
        self._is_peer_deaf = False  # the other end reads no more
        self.is_closed = False  # the other end has closed

    def attach(
        self,
        number: int,
        read_fd: int = -1,
        write_fd: int = -1,
        on_data: Callable[[bytes], None] | None = None,
    ) -> None:
        """Attach descriptors to a channel.

        Bytes of `read_fd` are sent on the channel. Incoming bytes are written to `write_fd` or
        passed to `on_data`. Descriptors are closed at their end; both may be one socket.
        """
        for fd in (read_fd, write_fd):
            if fd >= 0:
                os.set_blocking(fd, False)
        self._channels[number] = MuxChannel(read_fd, write_fd, on_data)

    def send(self, number: int, content: bytes) -> None:
        """Send bytes that no descriptor carries, on a channel without a window."""
        for start in range(0, len(content), PART):
            self._append_record(DATA, number, content[start : start + PART])

    def is_delivered(self, number: int) -> bool:
        """Return whether all data received on the channel was written, or cannot be."""
        return not self._channels[number].pending

    def is_readable(self, number: int) -> bool:
        """Return whether the descriptor of a channel may still have data to send."""
        return self._channels[number].read_fd >= 0

    def close_writer(self, number: int) -> None:
        """Close the channel's descriptor for writing."""
        channel = self._channels[number]
        channel.pending.clear()
        self._close_write_end(channel)

    def step(self, timeout_s: float, other_fds: Sequence[int] = ()) -> list[int]:
        """Wait at most `timeout_s`, and move the data that can be moved.

        Returns the readable descriptors of `other_fds`, which are the caller's.
        """
        poller = select.poll()
        poll_events = Counter({fd: select.POLLIN for fd in other_fds})
        if not self.is_closed:
            poll_events[self._incoming_fd] |= select.POLLIN
        if self.outbox:
            poll_events[self._outgoing_fd] |= select.POLLOUT
        outputs = [self._channels[each] for each in OUTPUTS if each in self._channels]
        behind = any(output.read_fd >= 0 and output.send_window_bytes <= 0 for output in outputs)
        for number, channel in self._channels.items():
            late = behind and number in AFTER_OUTPUTS  # not before earlier output is acknowledged
            if channel.read_fd >= 0 and channel.send_window_bytes > 0 and not late:
                poll_events[channel.read_fd] |= select.POLLIN
            if channel.pending and channel.write_fd >= 0 and not self._must_wait_for_output(number):
                poll_events[channel.write_fd] |= select.POLLOUT
        for fd, event in poll_events.items():
            poller.register(fd, event)
        ready = dict(poller.poll(max(0.0, timeout_s) * 1000))
        if self._outgoing_fd in ready:
            self._write_outbox()
        for number, channel in self._channels.items():
            if channel.pending and (channel.write_fd in ready or number in AFTER_OUTPUTS):
                self._deliver(number, channel)
            if channel.read_fd in ready and channel.send_window_bytes > 0:
                if number in AFTER_OUTPUTS and not self._read_outputs():
                    continue
                self._read_channel(number, channel)
        if self._incoming_fd in ready and not self.is_closed:
            self._receive()
        return [fd for fd in other_fds if fd in ready]

    def flush(self, deadline_s: float) -> None:
        """Send what is still to be sent, as long as the other end takes it."""
        end = time.monotonic() + deadline_s
        while self.outbox and time.monotonic() < end:
            poller = select.poll()
            poller.register(self._outgoing_fd, select.POLLOUT)
            poller.poll(100)
            self._write_outbox()

    def _append_record(
        self, kind: int, number: int, content: bytes = b"", length: int = -1
    ) -> None:
        if not self._is_peer_deaf:
            size = len(content) if length < 0 else length
            self.outbox += HEAD.pack(kind, number, size) + content

    def _write_outbox(self) -> None:
        try:
            del self.outbox[: os.write(self._outgoing_fd, self.outbox)]
        except BlockingIOError:
            return
        except OSError:  # no reader is left; earlier data may still arrive
            self.outbox.clear()
            self._is_peer_deaf = True

    def _read_outputs(self) -> bool:
        """Read all output; False if more of it is available than the window permits."""
        for number in OUTPUTS:
            channel = self._channels.get(number)
            while channel is not None and channel.read_fd >= 0:
                if channel.send_window_bytes <= 0:
                    return False
                before = channel.send_window_bytes
                self._read_channel(number, channel)
                if channel.send_window_bytes == before:
                    break
        return True

    def _must_wait_for_output(self, number: int) -> bool:
        """Return whether received data must wait until earlier output is acknowledged."""
        outputs = [self._channels[each] for each in OUTPUTS if each in self._channels]
        return number in AFTER_OUTPUTS and any(output.pending for output in outputs)

    def _read_channel(self, number: int, channel: MuxChannel) -> None:
        part = read_available(channel.read_fd, min(PART, channel.send_window_bytes))
        if part is None:
            return
        if part:
            channel.send_window_bytes -= len(part)
            self._append_record(DATA, number, part)
            return
        self._append_record(END, number)
        fd, channel.read_fd = channel.read_fd, -1
        if fd != channel.write_fd:
            os.close(fd)

    def _deliver(self, number: int, channel: MuxChannel) -> None:
        if self._must_wait_for_output(number):
            return
        try:
            count = os.write(channel.write_fd, channel.pending)
        except BlockingIOError:
            return
        except OSError:  # no reader is left: it is acknowledged all the same
            count = len(channel.pending)
            self._close_write_end(channel)
        del channel.pending[:count]
        self._acknowledge(number, channel, count)
        if channel.is_eof and not channel.pending:
            self._close_write_end(channel)

    def _close_write_end(self, channel: MuxChannel) -> None:
        fd, channel.write_fd = channel.write_fd, -1
        if fd < 0:
            return
        if fd != channel.read_fd:
            os.close(fd)
            return
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as ours:
            ours.shutdown(socket.SHUT_WR)  # it is still read

    def _acknowledge(self, number: int, channel: MuxChannel, count: int) -> None:
        if number not in UNWINDOWED:
            channel.receive_window_bytes += count
            self._append_record(WINDOW_UPDATE, number, length=count)

    def _receive(self) -> None:
        part = read_available(self._incoming_fd, READ)
        self.is_closed = part == b""
        self._received += part or b""
        while len(self._received) >= HEAD.size:
            kind, number, length = HEAD.unpack_from(self._received)
            channel = self._channels.get(number)
            if kind > WINDOW_UPDATE or channel is None or (kind == DATA and length > PART):
                raise MuxProtocolError(bytes(self._received[:200]))
            size = HEAD.size + (length if kind == DATA else 0)
            if len(self._received) < size:
                return
            content = bytes(self._received[HEAD.size : size])
            del self._received[:size]
            self._apply_record(kind, number, channel, length, content)

    def _apply_record(
        self, kind: int, number: int, channel: MuxChannel, length: int, content: bytes
    ) -> None:
        if kind == WINDOW_UPDATE:
            if number in UNWINDOWED or channel.send_window_bytes + length > WINDOW:
                raise MuxProtocolError(b"more was taken than was sent")
            channel.send_window_bytes += length
        elif kind == END:
            channel.is_eof = True
            if not channel.pending:
                self._close_write_end(channel)
        elif channel.on_data is not None:
            channel.on_data(content)
        elif channel.write_fd < 0:
            self._acknowledge(number, channel, length)
        else:
            channel.receive_window_bytes -= 0 if number in UNWINDOWED else length
            if channel.receive_window_bytes < 0:
                raise MuxProtocolError(b"more has come than was allowed")
            channel.pending += content
            self._deliver(number, channel)
