"""One nursery for all tests of a run: what they start is forked from it, as on a user's host."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from common.process.birth import NURSERY_ENV, OFF
from common.process.handle import SystemChild
from common.process.host import SystemHost
from meshrl.launch import plan

LISTENS_S = 120.0


class TestNursery:
    """A nursery, from `start` to `close`, which every process below this one finds by its
    environment.
    """

    __test__ = False

    def __init__(self) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="meshrl-nursery-")
        self.socket = Path(self._scratch.name) / "nursery"
        self.child: SystemChild | None = None

    def start(self) -> None:
        """Returns at once: until it listens, processes are executed."""
        self.child = SystemHost().spawn(
            plan.nursery(self.socket),
            name="nursery",
            env={NURSERY_ENV: OFF, "OMP_NUM_THREADS": "1"},
            own_session=True,
        )
        os.environ[NURSERY_ENV] = str(self.socket)

    def close(self) -> None:
        if self.child is not None:
            self.child.kill()
            while self.child.poll() is None:
                time.sleep(0.01)
            del os.environ[NURSERY_ENV]
        self._scratch.cleanup()


def wait_until_listening(socket: Path) -> None:
    """AssertionError when it does not."""
    until = time.monotonic() + LISTENS_S
    while not socket.exists():
        assert time.monotonic() < until, f"no nursery listens at {socket}"
        time.sleep(0.02)
