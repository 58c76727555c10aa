"""Several channels over one pair of pipes: what a runner gives is standard input and output alone.

A record is its kind, its channel, and a length; DATA is followed by so many bytes, END says that no
more come, TAKEN that so many bytes have been passed on. An end sends at most WINDOW bytes of a
channel beyond what was taken of it, so that one channel which nobody reads holds up no other. Both
ends run this; neither believes the other: what breaks these rules is Garbage.
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

from .frames import read_now

HEAD = struct.Struct("<BBI")
DATA, END, TAKEN = 0, 1, 2
WINDOW = 1 << 18  # bytes of a channel under way
PART = 1 << 15  # most bytes in a record
READ = 1 << 16

# Numbers of the channels. The first two carry little, and have no window.
CONTROL, KEEPER, STDIN, STDOUT, STDERR, CELLS, PEER = range(7)
NAMED = dict(zip(("keeper", "stdin", "stdout", "stderr", "cells", "peer"), range(KEEPER, PEER + 1)))
FREE = (CONTROL, KEEPER)
OUTPUTS = (STDOUT, STDERR)
AFTER_OUTPUTS = (CELLS,)  # what is said there is said of what was printed before: never earlier


class Garbage(Exception):
    """The other end does not speak this."""


class MuxChannel:
    """One channel at one end: what comes goes to a descriptor, or to a function."""

    def __init__(self, reading: int, writing: int, took: Callable[[bytes], None] | None) -> None:
        self.reading, self.writing, self.took = reading, writing, took
        self.may_send = WINDOW
        self.may_come = WINDOW
        self.waiting = bytearray()  # has come, and is not passed on
        self.over = False  # no more comes


class Mux:
    """One end. `incoming` and `outgoing` are descriptors of the pipes to the other."""

    def __init__(self, incoming: int, outgoing: int) -> None:
        self._incoming, self._outgoing = incoming, outgoing
        for fd in (incoming, outgoing):
            os.set_blocking(fd, False)
        self._channels: dict[int, MuxChannel] = {}
        self._came = bytearray()
        self.outbox = bytearray()
        self._deaf = False  # the other end takes nothing more
        self.over = False  # the other end has closed

    def attach(
        self,
        number: int,
        reading: int = -1,
        writing: int = -1,
        took: Callable[[bytes], None] | None = None,
    ) -> None:
        """Bytes of `reading` are sent on this channel, and what comes on it is written to `writing`
        or handed to `took`. Descriptors are closed at their end; both may be one socket.
        """
        for fd in (reading, writing):
            if fd >= 0:
                os.set_blocking(fd, False)
        self._channels[number] = MuxChannel(reading, writing, took)

    def send(self, number: int, content: bytes) -> None:
        """Sends what no descriptor carries, on a channel without a window."""
        for start in range(0, len(content), PART):
            self._record(DATA, number, content[start : start + PART])

    def passed_on(self, number: int) -> bool:
        """Whether all that has come on the channel was written, or cannot be."""
        return not self._channels[number].waiting

    def reads(self, number: int) -> bool:
        """Whether the descriptor of a channel may still have something to send."""
        return self._channels[number].reading >= 0

    def finish(self, number: int) -> None:
        """Nothing more is written to its descriptor, which is told so."""
        channel = self._channels[number]
        channel.waiting.clear()
        self._written_off(channel)

    def step(self, patience_s: float, others: Sequence[int] = ()) -> list[int]:
        """Moves what can be moved, after waiting for that at most so long; returns which of the
        `others`, descriptors of the caller's, can be read.
        """
        poller = select.poll()
        wanted = Counter({fd: select.POLLIN for fd in others})
        if not self.over:
            wanted[self._incoming] |= select.POLLIN
        if self.outbox:
            wanted[self._outgoing] |= select.POLLOUT
        outputs = [self._channels[each] for each in OUTPUTS if each in self._channels]
        behind = any(output.reading >= 0 and output.may_send <= 0 for output in outputs)
        for number, channel in self._channels.items():
            late = (
                behind and number in AFTER_OUTPUTS
            )  # not before more of what was printed is taken
            if channel.reading >= 0 and channel.may_send > 0 and not late:
                wanted[channel.reading] |= select.POLLIN
            if channel.waiting and channel.writing >= 0 and not self._held(number):
                wanted[channel.writing] |= select.POLLOUT
        for fd, event in wanted.items():
            poller.register(fd, event)
        ready = dict(poller.poll(max(0.0, patience_s) * 1000))
        if self._outgoing in ready:
            self._flush()
        for number, channel in self._channels.items():
            if channel.waiting and (channel.writing in ready or number in AFTER_OUTPUTS):
                self._pass_on(number, channel)
            if channel.reading in ready and channel.may_send > 0:
                if number in AFTER_OUTPUTS and not self._outputs_taken():
                    continue
                self._take(number, channel)
        if self._incoming in ready and not self.over:
            self._receive()
        return [fd for fd in others if fd in ready]

    def flush(self, deadline_s: float) -> None:
        """Sends what is still to be sent, as long as the other end takes it."""
        end = time.monotonic() + deadline_s
        while self.outbox and time.monotonic() < end:
            poller = select.poll()
            poller.register(self._outgoing, select.POLLOUT)
            poller.poll(100)
            self._flush()

    def _record(self, kind: int, number: int, content: bytes = b"", length: int = -1) -> None:
        if not self._deaf:
            size = len(content) if length < 0 else length
            self.outbox += HEAD.pack(kind, number, size) + content

    def _flush(self) -> None:
        try:
            del self.outbox[: os.write(self._outgoing, self.outbox)]
        except BlockingIOError:
            return
        except OSError:  # nobody listens; what was said before may still come
            self.outbox.clear()
            self._deaf = True

    def _outputs_taken(self) -> bool:
        """Takes all that was printed; False if more of it is there than the window lets through."""
        for number in OUTPUTS:
            channel = self._channels.get(number)
            while channel is not None and channel.reading >= 0:
                if channel.may_send <= 0:
                    return False
                before = channel.may_send
                self._take(number, channel)
                if channel.may_send == before:
                    break
        return True

    def _held(self, number: int) -> bool:
        """Whether what has come must wait until what was printed before is passed on."""
        outputs = [self._channels[each] for each in OUTPUTS if each in self._channels]
        return number in AFTER_OUTPUTS and any(output.waiting for output in outputs)

    def _take(self, number: int, channel: MuxChannel) -> None:
        part = read_now(channel.reading, min(PART, channel.may_send))
        if part is None:
            return
        if part:
            channel.may_send -= len(part)
            self._record(DATA, number, part)
            return
        self._record(END, number)
        fd, channel.reading = channel.reading, -1
        if fd != channel.writing:
            os.close(fd)

    def _pass_on(self, number: int, channel: MuxChannel) -> None:
        if self._held(number):
            return
        try:
            count = os.write(channel.writing, channel.waiting)
        except BlockingIOError:
            return
        except OSError:  # nobody reads it any more: it is taken all the same
            count = len(channel.waiting)
            self._written_off(channel)
        del channel.waiting[:count]
        self._was_taken(number, channel, count)
        if channel.over and not channel.waiting:
            self._written_off(channel)

    def _written_off(self, channel: MuxChannel) -> None:
        fd, channel.writing = channel.writing, -1
        if fd < 0:
            return
        if fd != channel.reading:
            os.close(fd)
            return
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as ours:
            ours.shutdown(socket.SHUT_WR)  # it is still read

    def _was_taken(self, number: int, channel: MuxChannel, count: int) -> None:
        if number not in FREE:
            channel.may_come += count
            self._record(TAKEN, number, length=count)

    def _receive(self) -> None:
        part = read_now(self._incoming, READ)
        self.over = part == b""
        self._came += part or b""
        while len(self._came) >= HEAD.size:
            kind, number, length = HEAD.unpack_from(self._came)
            channel = self._channels.get(number)
            if kind > TAKEN or channel is None or (kind == DATA and length > PART):
                raise Garbage(bytes(self._came[:200]))
            size = HEAD.size + (length if kind == DATA else 0)
            if len(self._came) < size:
                return
            content = bytes(self._came[HEAD.size : size])
            del self._came[:size]
            self._took(kind, number, channel, length, content)

    def _took(
        self, kind: int, number: int, channel: MuxChannel, length: int, content: bytes
    ) -> None:
        if kind == TAKEN:
            if number in FREE or channel.may_send + length > WINDOW:
                raise Garbage(b"more was taken than was sent")
            channel.may_send += length
        elif kind == END:
            channel.over = True
            if not channel.waiting:
                self._written_off(channel)
        elif channel.took is not None:
            channel.took(content)
        elif channel.writing < 0:
            self._was_taken(number, channel, length)
        else:
            channel.may_come -= 0 if number in FREE else length
            if channel.may_come < 0:
                raise Garbage(b"more has come than was allowed")
            channel.waiting += content
            self._pass_on(number, channel)
