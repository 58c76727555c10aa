"""Which system calls were refused to a guest, by number: the kernel tells its keeper of each.

A call that is told waits until it has been answered. Whoever asks again and again is not told any
more: past so many the listener is closed, and the kernel answers ENOSYS by itself.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
from collections.abc import Callable

from ..confinement.allowed import LISTENER_ANSWER, LISTENER_RECEIVE

MOST = 256  # that are answered one by one; each costs the keeper some 20 us
NOTIFICATION = struct.Struct("=QIIi60x")  # id, thread, flags, number of the call
ANSWER = struct.Struct("=QqiI")  # id, value, error, flags
GONE = (errno.ENOENT, errno.EINTR)  # who asked was killed, or got a signal and will ask again


class Refusals:
    """`fd` is a listener, readable when a call waits for its answer; -1: there is none. `said` is
    called with each number, before the call is answered, at its first time in a lap.
    """

    def __init__(
        self, fd: int, said: Callable[[int], None], ioctl: Callable[..., object] = fcntl.ioctl
    ) -> None:
        self.fd, self._said, self._ioctl = fd, said, ioctl
        self.numbers: list[int] = []  # each once, in the order of their first time
        self._in_lap: set[int] = set()
        self._left = MOST

    def lap(self) -> None:
        """Another lap begins."""
        self._in_lap.clear()

    def answer(self) -> None:
        """Refuses the call that waits."""
        record = bytearray(NOTIFICATION.size)
        try:
            self._ioctl(self.fd, LISTENER_RECEIVE, record)
            identifier, _, _, number = NOTIFICATION.unpack(record)
            if number not in self.numbers:
                self.numbers.append(number)
            if number not in self._in_lap:
                self._in_lap.add(number)
                self._said(number)
            answer = ANSWER.pack(identifier, 0, -errno.EPERM, 0)
            # Nobody asks a second time: no signal of ours, as of a child's end, may end the answer.
            while True:
                with contextlib.suppress(InterruptedError):
                    self._ioctl(self.fd, LISTENER_ANSWER, answer)
                    break
        except OSError as error:
            if error.errno not in GONE:
                raise
        self._left -= 1
        if not self._left:
            os.close(self.fd)
            self.fd = -1
