"""A process that is over soon, or is in the way: `python -m loadtests.start.brief HOW [STATUS]`.

`exit` ends with STATUS, `wait` sleeps, `echo` answers one frame of its channel, `leave` leaves a
grandchild in its session, `stop` stops itself, `hold` sleeps with the interpreter's lock held.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time

from meshrl.common.mesh.process.entry.child import ChildChannel

LONG_S = 600


def main(how: str, status: int) -> None:
    if how == "echo":
        channel = ChildChannel.from_env()
        frame = channel.recv()
        assert frame is not None
        channel.send(frame)
    elif how == "leave":
        subprocess.Popen(["sleep", str(LONG_S)])
    elif how == "wait":
        time.sleep(LONG_S)
    elif how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "hold":
        ctypes.PyDLL(None).sleep(LONG_S)
    sys.exit(status)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0)
