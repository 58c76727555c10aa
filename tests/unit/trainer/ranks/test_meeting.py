"""Ranks meet where they should, notice a foreign process, and do long orders once."""

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
# Ranks are forks of one process that has imported PyTorch: one of each of CHOSEN, then two, of
# which the first has waited for the other in vain before, and the second is in a group of its own.
PROGRAM = """
import json, os, sys
from meshrl.common.api.ranks import Rendezvous
from meshrl.common.base.errors import RankLost
from meshrl.services.trainer.ranks.rank import join_group, leave_group

MEETS_S = float(sys.argv[3])

def at(name, within_s):
    return Rendezvous(1, f"{sys.argv[1]}/{name}", within_s)

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
def said(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
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
def test_ranks_meet_on_loopback_by_default(said: list[Any], which: int, expected: str) -> None:
    assert said[which] == ["lo", expected]


@pytest.mark.deep
@pytest.mark.group("meeting")
def test_a_rank_that_has_waited_in_vain_meets_one_that_has_just_begun(said: list[Any]) -> None:
    assert said[2:] == ["met", "met"]


def test_other_hosts_reach_a_rank_by_what_its_settings_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(network_interface.GLOO_VARIABLE, raising=False)
    for bind, interface, expected in (
        ("tcp://127.0.0.1:7000-7010", "", "lo"),  # the one with that address
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


def test_a_store_is_at_the_first_free_port_of_those_of_the_mesh() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        first = taken.getsockname()[1]
        with pytest.raises(NoRendezvousPort, match=f"{first} of 127.0.0.1") as refused:
            open_listener("127.0.0.1", range(first, first + 1))
        assert "FIRST-LAST" in refused.value.fix
        with open_listener("127.0.0.1", range(first, min(first + 100, 65536))) as door:
            port = door.getsockname()[1]
            assert port > first
            assert format_rendezvous_url(door, "word") == f"tcp://127.0.0.1:{port}/word"
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
        for row in tcp_sockets.read_sockets():
            if row.state == tcp_sockets.STATE_LISTENING and f"socket:[{row.inode}]" in sockets:
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
    meeting = Rendezvous(1, f"{sys.argv[1]}/{name}", float(sys.argv[2]), addresses)
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
        [sys.executable, "-c", FOREIGN, str(tmp_path), str(scaled(10.0))],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])},
        capture_output=True,
        text=True,
        timeout=scaled(120.0),
    )
    user, here, host = [line for line in ran.stdout.splitlines() if line.startswith("rank 0")]
    assert user.startswith("rank 0: a process of user 65534 has connected"), ran
    assert here == "rank 0 joined", ran  # indistinguishable from rank 1
    assert host.startswith("rank 0: a process at 127.0.0.2, where no rank is, has connected"), ran


class Work:
    """Work that runs until it is released; `ended` also counts abandoned calls."""

    def __init__(self) -> None:
        self.may, self.begun, self.ended = asyncio.Event(), 0, 0
        self.error: Exception | None = None

    async def done(self) -> int:
        self.begun += 1
        try:
            await self.may.wait()
        finally:
            self.ended += 1
        if self.error is not None:
            raise self.error
        return self.begun


async def test_it_goes_on_between_the_answers_and_its_result_stays() -> None:
    work, errand = Work(), BackgroundTask[int](0.0)
    for _ in range(3):
        assert await errand.poll(1, work.done) is None
    work.may.set()
    patient = 60.0
    errand._answer_timeout_s = patient
    for _ in range(2):  # an answer may be lost on its way
        assert await errand.poll(1, work.done) == 1
    assert await errand.poll(2, work.done) == 2


async def test_another_one_ends_it_and_who_still_asks_hears_of_that() -> None:
    first, second = Work(), Work()
    errand = BackgroundTask[int]()
    asking = asyncio.create_task(errand.poll(1, first.done))
    while not first.begun:
        await asyncio.sleep(0)
    second.may.set()
    assert await errand.poll(2, second.done) == 1
    with pytest.raises(RankLost, match="given up"):
        await asking
    assert first.ended == 1


async def test_who_stops_asking_does_not_end_it_and_its_error_is_told_to_all() -> None:
    work, errand = Work(), BackgroundTask[int]()
    asking = asyncio.create_task(errand.poll(1, work.done))
    while not work.begun:
        await asyncio.sleep(0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    work.error = StorageFull("no room")
    work.may.set()
    for _ in range(2):
        with pytest.raises(StorageFull):
            await errand.poll(1, work.done)
    assert work.begun == 1
    await errand.close()
