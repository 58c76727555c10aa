"""The standard output that objects go to: one that is closed, full or stuck hinders nobody."""

from __future__ import annotations

import os
import select

STEP_BYTES = 4096  # PIPE_BUF of Linux: a pipe that is writable takes so much without waiting


class ObjectOutput:
    """A descriptor of its own. `gone` once nobody reads it any more."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._left = b""  # that was not taken yet
        self.gone = False

    @property
    def stuck(self) -> bool:
        """Whether something is left that it has not taken."""
        return bool(self._left) and not self.gone

    def add(self, text: str) -> None:
        """Lines for it, which `write` hands over."""
        if not self.gone:
            self._left += text.encode()

    def write(self, patience_s: float) -> None:
        """Hands over what there is, as far as it is taken; waits so long for each 4 KiB."""
        left = memoryview(self._left)
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        while left and not self.gone:
            if not poll.poll(patience_s * 1000):
                break
            try:
                left = left[os.write(self._descriptor, left[:STEP_BYTES]) :]
            except BlockingIOError:
                break
            except OSError:  # its reader has gone, or its disk is full
                self.gone = True
        self._left = bytes(left)
