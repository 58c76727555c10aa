"""Virtual hosts of a machine: their guarantees, and ranks and a mesh that run on them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
from asyncio.subprocess import Process
from pathlib import Path
from typing import Any

import psutil
import pytest

from loadtests.hosts.mesh import ROOT, HostsMesh, mesh_over
from loadtests.namespaces.groups import PREFIX, sweep
from loadtests.namespaces.host import Host
from loadtests.namespaces.hosts import CODE, Hosts
from loadtests.namespaces.init import HOME
from tests.hosts.conftest import PORT, probe, run_probe_server
from tests.load import scaled


async def await_processes(host: Host, count: int) -> list[psutil.Process]:
    """Return the processes of a host once there are `count`."""
    async with asyncio.timeout(scaled(10)):
        while len(found := host.processes()) < count:
            await asyncio.sleep(0.01)
    return found


ABSTRACT = "import socket; socket.socket(socket.AF_UNIX).connect('\\0meshrl-ground')"
LOOPBACK = f"import socket; socket.create_connection(('127.0.0.1', {PORT}), 1)"


async def test_host_shares_only_its_network_address(tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("of this machine")
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind("\0meshrl-ground")
    abstract.listen()
    async with Hosts(2, delay_s=0) as hosts:
        one, other = hosts[0], hosts[1]
        for place in ("/tmp", "/dev/shm", "/var/tmp", "/host", "/run"):
            await one.run("sh", "-c", f"echo mine >{place}/mine")
            assert "mine" not in (await other.run("ls", place)).out, place
        assert not (await one.run("cat", str(tmp_path / "outside"), check=False)).out
        assert (await one.run("cat", "/tmp/mine")).out == "mine\n"
        assert one.path("/tmp/mine").read_text() == "mine\n"
        assert (await one.run("hostname")).out == "h0\n"
        async with run_probe_server(one):
            assert (await one.run("python", "-c", LOOPBACK, check=False)).status == 0
            assert (await other.run("python", "-c", LOOPBACK, check=False)).status == 1
            assert await probe(other, "ask", one, 1)
        assert (await one.run("python", "-c", ABSTRACT, check=False)).status == 1
        seen = (await one.run("ps", "-e", "-o", "pid=")).out.split()
        assert len(seen) < 6 and str(os.getpid()) not in seen
        assert (await one.run("touch", str(Path(__file__)), check=False)).status != 0
    abstract.close()


@pytest.mark.timing
async def test_link_has_its_configured_rate() -> None:
    async with Hosts(2, rate="100mbit") as hosts, run_probe_server(hosts[0]):
        (rate,) = await probe(hosts[1], "send", hosts[0], 3 << 20)
        assert rate < 1.1 * 100e6 / 8
    async with Hosts(2, rate="1gbit") as hosts, run_probe_server(hosts[0]):
        async with asyncio.timeout(scaled(60)):  # a busy machine may be slower than the link
            while (await probe(hosts[1], "send", hosts[0], 12 << 20))[0] <= 1.2 * rate:
                pass


@pytest.mark.timing
async def test_round_trip_takes_twice_the_delay() -> None:
    async with Hosts(2, delay_s=0.02) as hosts, run_probe_server(hosts[0]):
        took = await probe(hosts[1], "ask", hosts[0], 20)
        assert 0.04 <= min(took) < scaled(0.2)
        assert hosts.router_cpu_s() > 0


@pytest.mark.deep
async def test_connections_survive_packet_loss() -> None:
    async with Hosts(2, delay_s=0.0005) as hosts, run_probe_server(hosts[0]):
        assert await probe(hosts[1], "datagrams", hosts[0], 300) == [300]
        await hosts.lose(1, 0.3)
        (came,) = await probe(hosts[1], "datagrams", hosts[0], 300)
        there_and_back = 0.7 * 0.7 * 300
        assert 0.7 * there_and_back < came < 200
        await hosts.lose(1, 0.02)
        assert await probe(hosts[1], "send", hosts[0], 1 << 20)
        await hosts.mend(1)
        assert await probe(hosts[1], "datagrams", hosts[0], 300) == [300]


@pytest.mark.deep
async def test_connection_survives_a_partition_of_its_host() -> None:
    async with Hosts(3) as hosts, run_probe_server(hosts[0]):
        words = ("tests.hosts.probe", "ask", hosts[0].address, str(PORT))
        async with hosts[1].started("python", "-m", *words, "800", pipes=True) as asking:
            assert asking.stdout and await asking.stdout.readline()
            async with hosts.partition(1):
                assert await probe(hosts[2], "ask", hosts[0], 3)
                cut = await hosts[1].run("python", "-m", *words, "1", check=False)
                assert "timed out" in cut.err
                assert asking.returncode is None
            rest, _ = await asking.communicate()
        assert rest.count(b"\n") == 799


@pytest.mark.deep
async def test_killed_host_is_silent_and_keeps_its_disk() -> None:
    async with Hosts(2) as hosts, run_probe_server(hosts[0]):
        await hosts[1].run("sh", "-c", "echo kept >/host/kept; echo lost >/dev/shm/lost")
        async with hosts[1].started("sleep", "600") as sleeper:
            processes = await await_processes(hosts[1], 1)
            await hosts.kill(1)
            assert await sleeper.wait() == -signal.SIGKILL
            _, left = await asyncio.to_thread(psutil.wait_procs, processes, timeout=scaled(20.0))
            assert not left
        refused = await hosts[0].run(
            *("python", "-m", "tests.hosts.probe", "ask", "10.77.1.2", str(PORT), "1"),
            check=False,
        )
        assert "timed out" in refused.err, "a dead host answers nothing, not even a refusal"
        back = await hosts.revive(1)
        assert (await back.run("cat", "/host/kept")).out == "kept\n"
        assert not (await back.run("ls", "/dev/shm")).out
        assert await probe(back, "ask", hosts[0], 1)


async def test_command_ends_with_its_block_and_runs_in_its_hosts_groups() -> None:
    async with Hosts(1) as hosts:
        async with hosts[0].started("sh", "-c", "sleep 601 & sleep 602") as command:
            processes = await await_processes(hosts[0], 3)
            hosts[0].signal(command, signal.SIGSTOP)
        _, left = await asyncio.to_thread(psutil.wait_procs, processes, timeout=scaled(20.0))
        assert not left
        if hosts[0].groups:
            assert hosts[0].groups[0].name in (await hosts[0].run("cat", "/proc/self/cgroup")).out


@pytest.mark.deep
async def test_cancelled_test_leaves_nothing() -> None:
    async def sleep_forever(made: asyncio.Future[Hosts]) -> None:
        async with Hosts(2) as hosts, hosts[1].started("sleep", "603"):
            made.set_result(hosts)
            await asyncio.Event().wait()

    made: asyncio.Future[Hosts] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(sleep_forever(made))
    hosts = await made
    inits = [hosts.router, hosts[0].init, hosts[1].init]
    groups = [place for number in (0, 1) for place in hosts[number].groups]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not any(map(psutil.pid_exists, inits))
    assert not [place for place in groups if place.exists()]
    assert not _list_groups(os.getpid())


async def test_killed_test_leaves_nothing() -> None:
    program = """
import asyncio, sys
from loadtests.namespaces.hosts import Hosts
async def main():
    async with Hosts(2) as hosts, hosts[1].started("sleep", "604"):
        print(hosts.router, hosts[0].init, hosts[1].init, flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""
    killed = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE
    )
    assert killed.stdout
    inits = [psutil.Process(int(pid)) for pid in (await killed.stdout.readline()).split()]
    assert len(inits) == 3 and _list_groups(killed.pid)
    killed.kill()
    await killed.wait()
    async with asyncio.timeout(scaled(20)):
        while any(init.is_running() and init.status() != "zombie" for init in inits):
            await asyncio.sleep(0.02)
        while _list_groups(killed.pid):  # groups are empty once the kernel has reaped all processes
            sweep()
            await asyncio.sleep(0.02)


def _list_groups(pid: int) -> list[Path]:
    return list(Path(tempfile.gettempdir()).glob(f"{PREFIX}{pid}-*"))


DEADLINE_S = 6.0  # of a rendezvous of ranks, and of each collective
# A name that does not resolve.
NAMED = f'hostname nowhere.invalid; PYTHONPATH={CODE} exec "$@"'


class RankOutput:
    """Output of the rank on a host."""

    def __init__(self, process: Process) -> None:
        assert process.stdout is not None
        self._process, self._lines = process, process.stdout

    async def await_event(self, what: str, within_s: float = 60.0) -> Any:
        async with asyncio.timeout(scaled(within_s)):
            line = await self._lines.readline()
        if not line:
            assert self._process.stderr is not None
            raise AssertionError((await self._process.stderr.read()).decode()[-3000:])
        kind, value = json.loads(line)
        assert kind == what, value
        return value


@pytest.mark.deep
@pytest.mark.timeout(240)
async def test_partitioned_ranks_fail_and_repeat_the_step_bitwise_when_reconnected() -> None:
    deadline_s = scaled(DEADLINE_S)
    async with Hosts(2) as hosts, contextlib.AsyncExitStack() as stack:
        talks = []
        for number in (0, 1):
            host = hosts[number]
            words = ("python", "-m", "tests.hosts.far_rank", str(number), str(deadline_s))
            named = ("sh", "-c", NAMED, "sh", *words, hosts[0].address, hosts[1].address)
            process = host.started(*named, pipes=True)
            talks.append(RankOutput(await stack.enter_async_context(process)))
        await asyncio.gather(*(talk.await_event("met", 120.0) for talk in talks))
        before = await talks[0].await_event("step")
        await talks[1].await_event("step")
        async with hosts.partition(1):
            for talk in talks:
                assert await talk.await_event("lost") <= deadline_s + scaled(10.0)
            for talk in talks:
                await talk.await_event("apart", 4 * deadline_s + 60.0)
        for number in (0, 1):
            hosts[number].path(HOME).joinpath("mended").touch()
        for talk in talks:
            assert await talk.await_event("met") < deadline_s + scaled(10.0)
        assert await talks[0].await_event("step") == before


JOB = Path(__file__).parents[1] / "mesh" / "jobs" / "digits.toml"
RUN_S = 420.0


def list_kinds(mesh: HostsMesh, number: int) -> set[str]:
    """Return the kinds of all processes that a host has had."""
    there = mesh.names[number]
    return {one["kind"] for look in mesh.seen for one in look.processes if one["host"] == there}


@pytest.mark.deep
@pytest.mark.needs("redis-server")  # needs TLS, which the wheel's server lacks
@pytest.mark.timeout(RUN_S)
async def test_host_joins_trains_and_is_reported_lost_when_it_vanishes() -> None:
    async with Hosts(2) as hosts, mesh_over(hosts, (1, 1)) as mesh:
        await mesh.submit(JOB, "digits", "budget.steps=4")
        summary = await mesh.finished("digits")
        assert (summary["phase"], summary["lost"], summary["trained_twice"]) == ("finished", 0, 0)
        assert {"node", "worker"} < list_kinds(mesh, 1) and {"engine", "trainer"} & list_kinds(
            mesh, 1
        )
        assert {len(owners) for owners in mesh.leaders().values()} == {1}
        assert not (await hosts[1].run("ls", f"{ROOT}/mesh/redis", check=False)).out
        await hosts.kill(1)
        await mesh.until(
            lambda look: mesh.names[1] not in _list_alive(look.processes), scaled(60.0)
        )


def _list_alive(processes: list[dict[str, str]]) -> set[str]:
    return {process["host"] for process in processes}
