"""Process that starts a server, prints its session, and waits to be killed."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from tests.sglang import served

if __name__ == "__main__":
    print(served.start(Path(sys.argv[1])).pid, flush=True)
    signal.pause()
