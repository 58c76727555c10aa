"""Listener for a guest's denied system calls, by number: the kernel notifies the init process.

A reported call waits until it has been answered. After a number of calls the listener is closed,
and the kernel answers ENOSYS by itself.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
from collections.abc import Callable

from ..confinement.syscall_policy import SECCOMP_NOTIF_RECV, SECCOMP_NOTIF_SEND

MAX_NOTIFICATIONS = 256  # that are answered one by one; each costs the init process some 20 us
NOTIFICATION = struct.Struct("=QIIi60x")  # id, thread, flags, number of the call
ANSWER = struct.Struct("=QqiI")  # id, value, error, flags
CALLER_GONE_ERRNOS = (
    errno.ENOENT,
    errno.EINTR,
)  # the caller was killed, or got a signal and will repeat the call


class SeccompListener:
    """Listener of denied calls.

    `fd` is readable when a call waits for its answer; -1: there is no listener. `on_denied` gets
    each number at its first time in a lap, before the call is answered.
    """

    def __init__(
        self, fd: int, on_denied: Callable[[int], None], ioctl: Callable[..., object] = fcntl.ioctl
    ) -> None:
        self.fd, self._on_denied, self._ioctl = fd, on_denied, ioctl
        self.denied_calls: list[int] = []  # each once, in the order of their first time
        self._denied_in_lap: set[int] = set()
        self._notifications_left = MAX_NOTIFICATIONS

    def start_lap(self) -> None:
        """Start another lap."""
        self._denied_in_lap.clear()

    def deny_pending(self) -> None:
        """Deny the call that waits."""
        record = bytearray(NOTIFICATION.size)
        try:
            self._ioctl(self.fd, SECCOMP_NOTIF_RECV, record)
            identifier, _, _, number = NOTIFICATION.unpack(record)
            if number not in self.denied_calls:
                self.denied_calls.append(number)
            if number not in self._denied_in_lap:
                self._denied_in_lap.add(number)
                self._on_denied(number)
            answer = ANSWER.pack(identifier, 0, -errno.EPERM, 0)
            # It is sent once: no signal of ours, as of a child's end, may interrupt it.
            while True:
                with contextlib.suppress(InterruptedError):
                    self._ioctl(self.fd, SECCOMP_NOTIF_SEND, answer)
                    break
        except OSError as error:
            if error.errno not in CALLER_GONE_ERRNOS:
                raise
        self._notifications_left -= 1
        if not self._notifications_left:
            os.close(self.fd)
            self.fd = -1
