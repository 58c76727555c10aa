"""A process that starts a server, names its session, and waits to be killed."""

from __future__ import annotations

import signal

from tests.sglang import served

if __name__ == "__main__":
    print(served.start().pid, flush=True)
    signal.pause()
