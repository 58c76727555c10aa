"""A process that joins a gang's group and is no rank is noticed before any gradient is in it: of
another user, or from a host where no rank is.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.load import scaled

# Rank 0 waits for rank 1; a stranger connects to its port meanwhile, and stays: three times.
PROGRAM = """
import os, signal, socket, sys, time
from contextlib import suppress
from meshrl.common.api.ranks import Meeting
from meshrl.common.base.errors import RankLost
from meshrl.common.mesh.process import peers
from meshrl.services.trainer.ranks.rank import join_group

USER, HERE = 65534, ["127.0.0.1"]

def say(text):
    os.write(1, (text + "\\n").encode())  # a line at once: both ranks say theirs

def rank(meeting, number):
    try:
        join_group(meeting, number, 2, "cpu")
        say(f"rank {number} joined")
    except RankLost as error:
        say(f"rank {number}: {error}")
    os._exit(0)

def port_of(pid):
    while True:
        sockets = set()
        for number in os.listdir(f"/proc/{pid}/fd"):
            with suppress(FileNotFoundError):  # it is closed by now
                sockets.add(os.readlink(f"/proc/{pid}/fd/{number}"))
        for row in peers.rows():
            if row.state == peers.LISTENING and f"socket:[{row.inode}]" in sockets:
                return row.local.port
        time.sleep(0.01)

def forked(work, *args):
    pid = os.fork()
    if pid == 0:
        work(*args)
    return pid

def stranger(port, tell, user, source):
    if user:
        os.setresuid(user, user, user)
    connected = socket.socket()
    connected.bind((source, 0))
    connected.connect(("127.0.0.1", port))
    connected.sendall(bytes(8))
    os.write(tell, b"!")
    signal.pause()

def meet(name, addresses, user, source):
    meeting = Meeting(1, f"{sys.argv[1]}/{name}", float(sys.argv[2]), addresses)
    first = forked(rank, meeting, 0)
    told, tell = os.pipe()
    other = forked(stranger, port_of(first), tell, user, source)
    os.close(tell)
    if not os.read(told, 1):
        sys.exit("the stranger did not come so far")
    second = forked(rank, meeting, 1)
    os.waitpid(first, 0)
    for pid in (other, second):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

meet("user", [], USER, "127.0.0.1")
meet("here", HERE, 0, "127.0.0.1")
meet("host", HERE, 0, "127.0.0.2")
"""


@pytest.mark.deep
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_a_gang_with_a_strangers_process_in_it_is_no_gang(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), str(scaled(10.0))],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])},
        capture_output=True,
        text=True,
        timeout=scaled(120.0),
    )
    user, here, host = [line for line in ran.stdout.splitlines() if line.startswith("rank 0")]
    assert user.startswith("rank 0: a process of user 65534 has connected"), ran
    assert here == "rank 0 joined", ran  # nobody can tell
    assert host.startswith("rank 0: a process at 127.0.0.2, where no rank is, has connected"), ran
