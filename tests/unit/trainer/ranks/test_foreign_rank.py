"""A process of another user that joins a gang's group is noticed before any gradient is in it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Rank 0 waits for rank 1; a stranger connects to its port meanwhile, and stays.
PROGRAM = """
import os, signal, socket, sys, time
from pathlib import Path
from common.errors import RankLost
from common.process import peers
from services.trainer.ranks.rank import join_group

meeting = Path(sys.argv[1], "meeting")

def rank(number):
    try:
        join_group(meeting, number, 2, "cpu", 10.0)
        print(f"rank {number} joined", flush=True)
    except RankLost as error:
        print(f"rank {number}: {error}", flush=True)
    os._exit(0)

def port_of(pid):
    while True:
        sockets = {os.readlink(f"/proc/{pid}/fd/{n}") for n in os.listdir(f"/proc/{pid}/fd")}
        for row in peers.rows():
            if row.state == peers.LISTENING and f"socket:[{row.inode}]" in sockets:
                return int(row.local.rpartition(":")[2], 16)
        time.sleep(0.01)

first = os.fork()
if first == 0:
    rank(0)
port = port_of(first)
told, tell = os.pipe()
stranger = os.fork()
if stranger == 0:
    os.setresuid(65534, 65534, 65534)
    connected = socket.socket()
    connected.connect(("127.0.0.1", port))
    connected.sendall(bytes(8))
    os.write(tell, b"!")
    signal.pause()
os.close(tell)
if not os.read(told, 1):
    sys.exit("the stranger did not come so far")
if os.fork() == 0:
    rank(1)
os.waitpid(first, 0)
os.kill(stranger, signal.SIGKILL)
while True:
    try:
        os.wait()
    except ChildProcessError:
        break
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_a_gang_with_another_users_process_in_it_is_no_gang(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])},
        capture_output=True,
        text=True,
        timeout=120.0,
    )
    said = [line for line in ran.stdout.splitlines() if line.startswith("rank 0")]
    assert said[0].startswith("rank 0: a process of user 65534 has connected"), ran
