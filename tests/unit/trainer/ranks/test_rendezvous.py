"""Rendezvous of ranks, detection of foreign processes, and background tasks of long orders."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from meshrl.common.base.errors import RankLost, StorageFull
from meshrl.common.base.host.interfaces import find_address
from meshrl.common.base.host.settings import MeshSettings
from meshrl.common.weights.transports.rendezvous import (
    NoRendezvousPort,
    format_rendezvous_url,
    open_listener,
    parse_port_range,
)
from meshrl.services.trainer.ranks import network_interface
from meshrl.services.trainer.ranks.row_tasks import BackgroundTask
from tests.load import scaled

CHOSEN: list[dict[str, str]] = [{}, {"NCCL_SOCKET_IFNAME": "ib0"}]
# Ranks are forks of one process that has imported PyTorch: one for each of CHOSEN, then two. The
# first of the two has waited for the other in vain before, and the second is in its own group.
PROGRAM = """
import json, os, sys
from meshrl.common.api.ranks import Rendezvous
from meshrl.common.base.errors import RankLost
from meshrl.services.trainer.ranks.rank import join_group, leave_group

MEETS_S = float(sys.argv[3])

def at(name, within_s):
    return Rendezvous(1, f"{sys.argv[1]}/{name}", within_s, form_timeout_s=within_s)

def alone(chosen):
    os.environ.update(chosen)
    join_group(at(str(chosen), MEETS_S), 0, 1, "cpu")
    leave_group()
    return [os.environ[f"{name}_SOCKET_IFNAME"] for name in ("GLOO", "NCCL")]

def rank(number):
    if number == 0:
        try:
            join_group(at("early", 0.5), 0, 2, "cpu")
        except RankLost as error:
            leave_group()
    else:
        join_group(at("its own", MEETS_S), 0, 1, "cpu")
    join_group(at("late", MEETS_S), number, 2, "cpu")
    leave_group()
    return "met"

def fork(of, value):
    pid = os.fork()
    if pid == 0:
        os.write(1, (json.dumps(of(value)) + "\\n").encode())  # a line at once
        os._exit(0)
    return pid

for chosen in json.loads(sys.argv[2]):
    os.waitpid(fork(alone, chosen), 0)
both = [fork(rank, number) for number in (0, 1)]
sys.exit(any([os.waitpid(pid, 0)[1] for pid in both]))
"""


@pytest.fixture(scope="module")
def program_output(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Return the output of the forks of PROGRAM."""
    inherited = {k: v for k, v in os.environ.items() if not k.endswith("_SOCKET_IFNAME")}
    words = str(tmp_path_factory.mktemp("ranks")), json.dumps(CHOSEN), str(scaled(30.0))
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words],
        env={**inherited, "PYTHONPATH": str(Path(__file__).parents[4])},
        capture_output=True,
        timeout=scaled(120.0),
    )
    assert found.returncode == 0, found.stderr.decode()[-3000:]
    return [json.loads(line) for line in found.stdout.splitlines()]


@pytest.mark.deep
@pytest.mark.group("meeting")
@pytest.mark.parametrize(("which", "expected"), [(0, "=lo"), (1, "ib0")])
def test_ranks_rendezvous_on_loopback_by_default(
    program_output: list[Any], which: int, expected: str
) -> None:
    assert program_output[which] == ["lo", expected]


@pytest.mark.deep
@pytest.mark.group("meeting")
def test_rank_rendezvouses_again_after_a_timeout(program_output: list[Any]) -> None:
    assert program_output[2:] == ["met", "met"]


def test_rank_listens_at_the_address_of_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(network_interface.GLOO_VARIABLE, raising=False)
    for bind, interface, expected in (
        ("tcp://127.0.0.1:7000-7010", "", "lo"),  # the host with that address
        ("tcp://127.0.0.1:*", "eth7", "eth7"),
        ("tcp://0.0.0.0:*", "", ""),
        ("tcp://192.0.2.254:*", "", ""),
    ):
        settings = MeshSettings("", "", bind=bind, interface=interface)
        assert network_interface.find_rank_interface(settings) == expected, bind
    assert find_address("lo") == "127.0.0.1"
    assert find_address("none") == ""
    monkeypatch.setenv(network_interface.GLOO_VARIABLE, "ib0,ib1")
    assert network_interface.find_rank_interface(MeshSettings("", "", interface="eth7")) == "ib0"


def test_store_uses_the_first_free_port_of_the_mesh() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        first = taken.getsockname()[1]
        with pytest.raises(NoRendezvousPort, match=f"{first} of 127.0.0.1") as refused:
            open_listener("127.0.0.1", range(first, first + 1))
        assert "FIRST-LAST" in refused.value.fix
        with open_listener("127.0.0.1", range(first, min(first + 100, 65536))) as listener:
            port = listener.getsockname()[1]
            assert port > first
            assert format_rendezvous_url(listener, "word") == f"tcp://127.0.0.1:{port}/word"
    assert parse_port_range("tcp://127.0.0.1:7000-7010") == range(7000, 7011)
    assert list(parse_port_range("tcp://127.0.0.1:*")) == [0]


# While rank 0 waits for rank 1, an unauthenticated peer connects to its port and stays, three
# times.
FOREIGN = """
import os, signal, socket, sys, time
from contextlib import suppress
from meshrl.common.api.ranks import Rendezvous
from meshrl.common.base.errors import RankLost
from meshrl.common.mesh.process import tcp_sockets
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
        for row in tcp_sockets.read_sockets(tcp_sockets.STATE_LISTENING):
            if f"socket:[{row.inode}]" in sockets:
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
    within_s = float(sys.argv[2])
    meeting = Rendezvous(1, f"{sys.argv[1]}/{name}", within_s, addresses, within_s)
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
def test_gang_with_a_foreign_process_is_rejected(tmp_path: Path) -> None:
    program_text = subprocess.run(
        [sys.executable, "-c", FOREIGN, str(tmp_path), str(scaled(10.0))],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])},
        capture_output=True,
        text=True,
        timeout=scaled(120.0),
    )
    user, first_line, host = [
        line for line in program_text.stdout.splitlines() if line.startswith("rank 0")
    ]
    assert user.startswith("rank 0: a process of user 65534 has connected"), program_text
    assert first_line == "rank 0 joined", program_text  # indistinguishable from rank 1
    assert host.startswith("rank 0: a process at 127.0.0.2, where no rank is, has connected"), (
        program_text
    )


class ReleasableWork:
    """Work that runs until it is released; `ended` also counts abandoned calls."""

    def __init__(self) -> None:
        self.released, self.start_count, self.end_count = asyncio.Event(), 0, 0
        self.error: Exception | None = None

    async def run(self) -> int:
        self.start_count += 1
        try:
            await self.released.wait()
        finally:
            self.end_count += 1
        if self.error is not None:
            raise self.error
        return self.start_count


async def test_background_task_runs_between_polls_and_retains_its_result() -> None:
    work, background_task = ReleasableWork(), BackgroundTask[int](0.0)
    for _ in range(3):
        assert await background_task.poll(1, work.run) is None
    work.released.set()
    answer_timeout_s = 60.0
    background_task._answer_timeout_s = answer_timeout_s
    for _ in range(2):  # an answer may be lost
        assert await background_task.poll(1, work.run) == 1
    assert await background_task.poll(2, work.run) == 2


async def test_new_background_task_cancels_the_previous_one() -> None:
    first, second = ReleasableWork(), ReleasableWork()
    background_task = BackgroundTask[int]()
    pending_poll = asyncio.create_task(background_task.poll(1, first.run))
    while not first.start_count:
        await asyncio.sleep(0)
    second.released.set()
    assert await background_task.poll(2, second.run) == 1
    with pytest.raises(RankLost, match="was cancelled"):
        await pending_poll
    assert first.end_count == 1


async def test_cancelled_poll_keeps_the_task_and_its_error_reaches_all_polls() -> None:
    work, background_task = ReleasableWork(), BackgroundTask[int]()
    pending_poll = asyncio.create_task(background_task.poll(1, work.run))
    while not work.start_count:
        await asyncio.sleep(0)
    pending_poll.cancel()
    await asyncio.gather(pending_poll, return_exceptions=True)
    work.error = StorageFull("no room")
    work.released.set()
    for _ in range(2):
        with pytest.raises(StorageFull):
            await background_task.poll(1, work.run)
    assert work.start_count == 1
    await background_task.close()
