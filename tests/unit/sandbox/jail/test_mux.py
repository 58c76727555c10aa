"""Several channels over one pair of pipes, without spinning."""

from __future__ import annotations

import os
import socket
import time

from meshrl.services.sandbox.jail.wire import mux

PATIENCE_S = 0.2


def drained(fd: int) -> bytes:
    """All that can be read of a pipe now."""
    os.set_blocking(fd, False)
    found = b""
    try:
        while part := os.read(fd, mux.READ):
            found += part
    except BlockingIOError:
        return found
    return found


def test_cells_that_wait_for_an_output_without_a_window_are_waited_for() -> None:
    """Else a step returns at once, again and again, for as long as nobody takes the output."""
    (incoming, outer), (far, outgoing) = os.pipe(), os.pipe()
    printed, writing = os.pipe()
    cells, other = socket.socketpair()
    link = mux.Mux(incoming, outgoing)
    link.attach(mux.STDOUT, read_fd=printed)
    link.attach(mux.GUEST, read_fd=cells.fileno())
    sent = 0
    while sent < mux.WINDOW:
        sent += os.write(writing, bytes(mux.PART))
        link.step(1.0)
        while link.outbox:
            drained(far)
            link.flush(0.0)
            link.step(0.0)
    drained(far)
    other.send(b"said after it")
    begun = time.monotonic()
    link.step(PATIENCE_S)
    assert time.monotonic() - begun > PATIENCE_S / 2
    os.write(outer, mux.HEAD.pack(mux.WINDOW_UPDATE, mux.STDOUT, mux.PART))
    link.step(1.0)
    link.step(1.0)
    link.flush(1.0)
    assert b"said after it" in drained(far)
    for fd in (incoming, outer, far, outgoing, printed, writing):
        os.close(fd)
    cells.close()
    other.close()
