"""Several channels multiplexed over one pair of pipes, without busy waiting."""

from __future__ import annotations

import os
import socket
import time

from meshrl.services.sandbox.jail.wire import mux

WAIT_S = 0.2


def drain(fd: int) -> bytes:
    """Read all data that a pipe holds now."""
    os.set_blocking(fd, False)
    data = b""
    try:
        while part := os.read(fd, mux.READ):
            data += part
    except BlockingIOError:
        return data
    return data


def test_step_blocks_while_output_waits_for_a_window() -> None:
    """Check that a step blocks while all output waits for a window. Otherwise it would spin until
    the output is read.
    """
    (incoming, outer), (far, outgoing) = os.pipe(), os.pipe()
    output_fd, writing = os.pipe()
    cells, other = socket.socketpair()
    link = mux.Mux(incoming, outgoing)
    link.attach(mux.STDOUT, read_fd=output_fd)
    link.attach(mux.GUEST, read_fd=cells.fileno())
    sent = 0
    while sent < mux.WINDOW:
        sent += os.write(writing, bytes(mux.PART))
        link.step(1.0)
        while link.outbox:
            drain(far)
            link.flush(0.0)
            link.step(0.0)
    drain(far)
    other.send(b"said after it")
    start_s = time.monotonic()
    link.step(WAIT_S)
    assert time.monotonic() - start_s > WAIT_S / 2
    os.write(outer, mux.HEAD.pack(mux.WINDOW_UPDATE, mux.STDOUT, mux.PART))
    link.step(1.0)
    link.step(1.0)
    link.flush(1.0)
    assert b"said after it" in drain(far)
    for fd in (incoming, outer, far, outgoing, output_fd, writing):
        os.close(fd)
    cells.close()
    other.close()
