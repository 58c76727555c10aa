"""Meshes that leave or cannot join, and peers that are killed or do not read."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from loadtests.rpc.echo import PING, Echo
from meshrl.common.base.clock import SystemClock
from meshrl.common.base.encoding.messages import Frame
from meshrl.common.base.errors import ConfigError, PeerLost, Refused, StateUnavailable
from meshrl.common.base.random import Random
from meshrl.common.mesh.process.host import Stoppable, SystemHost
from meshrl.common.mesh.runtime.calls.actor import call
from meshrl.common.mesh.runtime.dependencies import LeaseTerms, MeshDependencies
from meshrl.common.mesh.runtime.mesh import Mesh, MeshSettings
from meshrl.common.mesh.transport.zmq_transport import ZmqTransport
from meshrl.common.state import registry
from meshrl.common.state.redis.client import StateClient
from meshrl.common.state.redis.embedded_server import prepare_server
from meshrl.sim.redis.simulated_state import open_simulated_state
from tests.load import scaled
from tests.meshes import PATIENT, SECRET, encode_first_frame, make_keys
from tests.unit.common.mesh.runtime.talking import (
    Join,
    Number,
    Talk,
    Talker,
    Text,
    call_until_refused,
    cancel,
    until,
)

STEPS = ["actor", "lease", "transport", "state"]
KEYS = make_keys("loadtest")  # accepted by the echo process


class FaultInjector:
    """Actions that run at named steps, after the step's own work."""

    def __init__(self) -> None:
        self.steps: dict[str, Callable[[], Awaitable[None]]] = {}
        self.reached: list[str] = []

    async def run_step(self, step: str) -> None:
        self.reached.append(step)
        if step in self.steps:
            await self.steps[step]()


class FaultyActor(Talker):
    def __init__(self, faults: FaultInjector) -> None:
        super().__init__()
        self.faults = faults

    async def start(self) -> None:
        await self.faults.run_step("start")

    async def stop(self) -> None:
        await self.faults.run_step("actor")


class FaultyState(StateClient):
    def __init__(self, *arguments: Any, faults: FaultInjector) -> None:
        super().__init__(*arguments)
        self.faults = faults

    async def run_script(self, script: str, keys: list[str], *args: Any) -> Any:
        answer = await super().run_script(script, keys, *args)
        await self.faults.run_step({"end_lease": "lease", "register": "take"}.get(script, script))
        return answer

    async def close(self) -> None:
        await super().close()
        await self.faults.run_step("state")


class FaultyTransport(ZmqTransport):
    def __init__(self, faults: FaultInjector) -> None:
        super().__init__()
        self.faults = faults

    async def close(self) -> None:
        await super().close()
        await self.faults.run_step("transport")


class CountingHost(SystemHost):
    """Host that records its periodic threads until they stop."""

    def __init__(self) -> None:
        super().__init__()
        self.running: dict[str, Stoppable] = {}

    def run_periodically(
        self, interval_s: float, fn: Callable[[], bool | None], name: str
    ) -> Stoppable:
        thread, running = super().run_periodically(interval_s, fn, name), self.running

        class CountedThread:
            def stop(self) -> None:
                running.pop(name, None)
                thread.stop()

        running[name] = CountedThread()
        return running[name]


class MeshBench:
    """Mesh with every resource that it can open, and an actor."""

    def __init__(self) -> None:
        self.faults, self.clock, self.host = FaultInjector(), SystemClock(), CountingHost()
        self.state_client = open_simulated_state(self.clock)
        client_arguments = (
            self.state_client.url,
            self.state_client.client,
            self.state_client._sync_client,
            self.clock.monotonic,
        )
        self.transport = FaultyTransport(self.faults)
        self.mesh = Mesh(
            "a",
            "test",
            MeshDependencies(
                state=FaultyState(*client_arguments, faults=self.faults),
                transport=self.transport,
                clock=self.clock,
                random=Random.from_os_entropy(),
                host=self.host,
                owns_state=True,
            ),
            terms=LeaseTerms(**PATIENT),
        )
        self.mesh.serve_metrics("127.0.0.1:*")
        self.actor = FaultyActor(self.faults)

    async def assert_all_closed(self) -> None:
        """Check that tasks, the lease's thread, sockets, connections and the metrics port are
        closed.
        """
        assert self.transport._context.closed
        assert "state" in self.faults.reached
        assert not [name for name in self.host.running if name.startswith("lease")]
        await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})
        assert self.mesh._endpoint is not None
        host, _, port = self.mesh._endpoint.address.removeprefix("http://").rpartition(":")
        await until(lambda: is_port_closed(host, int(port)))


def is_port_closed(host: str, port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex((host, port)) != 0


async def raise_error() -> None:
    raise RuntimeError("broken")


async def raise_refused() -> None:
    raise Refused("not me")


async def wait_forever() -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("step", STEPS)
async def test_failing_leave_step_raises_and_leaves_nothing_open(step: str) -> None:
    bench = MeshBench()
    await bench.mesh.join(bench.actor)
    bench.faults.steps[step] = raise_error
    with pytest.raises(RuntimeError, match="broken"):
        await bench.mesh.leave()
    assert [s for s in bench.faults.reached if s in STEPS] == STEPS
    await bench.assert_all_closed()
    entry = await registry.lookup(bench.state_client, "a")
    assert entry is not None and not entry.alive
    await bench.state_client.close()


@pytest.mark.parametrize("step", STEPS)
async def test_cancelled_leave_leaves_nothing_open(step: str) -> None:
    bench = MeshBench()
    await bench.mesh.join(bench.actor)
    bench.faults.steps[step] = wait_forever
    leaving = asyncio.create_task(bench.mesh.leave())
    await until(lambda: step in bench.faults.reached)
    await cancel(leaving)
    assert [s for s in bench.faults.reached if s in STEPS] == STEPS
    await bench.assert_all_closed()


async def test_leave_cancelled_while_calls_end_leaves_nothing_open() -> None:
    bench = MeshBench()
    may_end = asyncio.Event()

    class SlowActor(FaultyActor):
        @call(Talk.sleep)
        async def sleep(self, m: Number) -> Text:
            try:
                await wait_forever()
            finally:
                await may_end.wait()
            return Text("")

    await bench.mesh.join(SlowActor(bench.faults))
    call_task = asyncio.create_task(bench.mesh.ref("a").call(Talk.sleep, Number(9)))
    await until(lambda: bench.mesh.running_calls)
    leaving = asyncio.create_task(bench.mesh.leave())
    await asyncio.sleep(0.05)
    assert bench.faults.reached[-1] not in STEPS
    await cancel(leaving)
    may_end.set()
    await asyncio.wait([call_task])
    await bench.assert_all_closed()


async def test_leave_raises_the_first_of_several_errors() -> None:
    bench = MeshBench()
    await bench.mesh.join(bench.actor)
    bench.faults.steps.update(actor=raise_refused, transport=raise_error, state=raise_error)
    with pytest.raises(Refused, match="not me"):
        await bench.mesh.leave()
    await bench.assert_all_closed()


async def test_failure_after_a_cancelled_leave_does_not_hide_the_cancellation() -> None:
    bench = MeshBench()
    await bench.mesh.join(bench.actor)
    bench.faults.steps.update(actor=wait_forever, transport=raise_error)
    leaving = asyncio.create_task(bench.mesh.leave())
    await until(lambda: "actor" in bench.faults.reached)
    await cancel(leaving)
    await bench.assert_all_closed()


@pytest.mark.parametrize("step", ["take", "start"])
async def test_failed_join_closes_what_it_opened(step: str) -> None:
    bench = MeshBench()
    bench.faults.steps.update({step: raise_error, "transport": raise_refused})
    with pytest.raises(RuntimeError, match="broken"):
        await bench.mesh.join(bench.actor)
    await bench.assert_all_closed()


@pytest.mark.parametrize("step", ["take", "start"])
async def test_cancelled_join_closes_what_it_opened(step: str) -> None:
    bench = MeshBench()
    bench.faults.steps.update({step: wait_forever, "state": raise_error})
    joining = asyncio.create_task(bench.mesh.join(bench.actor))
    await until(lambda: step in bench.faults.reached)
    await cancel(joining)
    await bench.assert_all_closed()


async def test_failed_mesh_open_closes_its_connections(tmp_path: Path) -> None:
    server, host = prepare_server(tmp_path), SystemHost()
    redis = host.spawn(server.argv, name="redis", log=tmp_path / "redis.log")
    observer = await open_when_ready(server.url)
    taken, raised_errors = socket.create_server(("127.0.0.1", 0)), []
    endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
    invalid_options: list[dict[str, Any]] = [{"metrics": endpoint}, {"bind": f"tcp://{endpoint}"}]
    for options in invalid_options:
        settings = MeshSettings(server.url, str(tmp_path), host="here", secret=SECRET, **options)
        with pytest.raises(ConfigError) as raised:
            await Mesh.open("a", "engine", settings)
        # Tracebacks would otherwise keep the connections alive until garbage collection.
        raised_errors.append(raised)
    async with asyncio.timeout(scaled(20.0)):
        while len((await observer.run_command("CLIENT", "LIST")).splitlines()) > 1:
            await asyncio.sleep(0.02)
    await observer.close()
    taken.close()
    redis.kill()
    assert await redis.wait(scaled(5.0)) is not None


async def open_when_ready(url: str) -> StateClient:
    async with asyncio.timeout(scaled(20.0)):
        while True:
            try:
                return await StateClient.open(url, connect_timeout_s=1)
            except StateUnavailable:
                await asyncio.sleep(0.02)


@pytest.fixture
def echo() -> Iterator[tuple[subprocess.Popen[str], registry.RegistryEntry]]:
    """Start a real process that answers Echo, and yield it with its registry entry."""
    argv = [sys.executable, "-m", "loadtests.rpc.echo", KEYS.public_key_text]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    address, incarnation = process.stdout.readline().split()
    yield process, registry.RegistryEntry("echo", "test", address=address, incarnation=incarnation)
    process.kill()
    process.wait()
    process.stdout.close()


async def test_calls_to_a_killed_process_fail_at_once(
    join: Join, echo: tuple[subprocess.Popen[str], registry.RegistryEntry]
) -> None:
    process, entry = echo
    mesh = await join("b", kind="loadtest", transport=ZmqTransport(keys=KEYS))
    await registry.register(mesh.state, entry, 60_000)
    ref = mesh.ref("echo")
    assert await ref.call(Echo.inline, PING) == PING
    os.kill(process.pid, signal.SIGSTOP)
    calls = [asyncio.create_task(ref.call(Echo.inline, PING, deadline_s=9e3)) for _ in range(200)]
    await asyncio.sleep(0.1)
    process.kill()
    async with asyncio.timeout(scaled(30)):  # before their own deadline
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(o, PeerLost) and "echo has exited" in str(o) for o in outcomes)


async def test_call_to_an_exited_process_raises_peer_lost(
    join: Join, echo: tuple[subprocess.Popen[str], registry.RegistryEntry]
) -> None:
    process, entry = echo
    process.kill()
    process.wait()
    mesh = await join("b", kind="loadtest", transport=ZmqTransport(keys=KEYS))
    await registry.register(mesh.state, entry, 60_000)
    with pytest.raises(PeerLost, match="echo has exited"):
        await call_until_refused(mesh.ref("echo"), Echo.inline, PING)
    assert mesh.telemetry.counters["repeated_peer_lost"] >= 1  # no message had arrived


async def test_replies_beyond_the_high_water_mark_are_delivered() -> None:
    """Check that replies that the ROUTER rejects are parked in order while the requester does not
    read.
    """
    server = ZmqTransport(high_water_mark=2)
    replies, size = 400, 60_000  # 24 MB: more than the kernel holds

    def answer(peer: bytes, frames: list[Frame], role: str) -> None:
        for index in range(replies):
            server.reply(peer, (index.to_bytes(4, "little"), bytes(size)))

    server.start(answer, lambda *_: None, lambda *_: None)
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.set(zmq.RCVHWM, 2)
        client.connect(server.address)
        client.send(encode_first_frame(b"", b"all"))
        await until(lambda: server.parked_count > 100)
        await asyncio.sleep(0.1)
        assert server.parked_count > 100
        received: list[int] = []
        while len(received) < replies:
            await until(lambda: client.poll(0))
            received.append(int.from_bytes(client.recv_multipart()[0][2:], "little"))
        assert received == list(range(replies))
        client.close(0)
    assert server.parked_count == 0
    await server.close()


async def test_departed_requester_is_reported() -> None:
    server, client = ZmqTransport(), ZmqTransport()
    requester: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    departed: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    server.start(lambda peer, *_: requester.set_result(peer), lambda *_: None, departed.set_result)
    client.start(lambda *_: None, lambda *_: None, lambda *_: None)
    client.send(server.address, (b"", b""))
    async with asyncio.timeout(scaled(10)):
        peer = await requester
        await client.close()
        while not departed.done():
            server.reply(peer, (b"", b""))
            await asyncio.sleep(0.01)
    assert departed.result() == peer
    await server.close()


async def test_silent_peer_is_not_reported_as_rejecting_after_a_blocked_loop() -> None:
    """Check a handshake that times out while the event loop is blocked."""
    client = ZmqTransport(keys=make_keys("engine"), handshake_timeout_s=0.3)
    lost_peers: list[tuple[str, bool, bool]] = []
    client.start(lambda *_: None, lambda *all: lost_peers.append(all), lambda *_: None)
    with socket.create_server(("127.0.0.1", 0)) as silent_server:
        silent_server.settimeout(scaled(20.0))
        address = f"tcp://127.0.0.1:{silent_server.getsockname()[1]}#{KEYS.public_key_text}"
        client.send(address, (b"", b""))
        accepted, _ = silent_server.accept()
        with accepted:
            accepted.settimeout(scaled(20.0))
            while accepted.recv(4096):  # until the connection is given up
                pass
        await until(lambda: lost_peers, 20.0)
    assert lost_peers == [(address, False, False)]
    await client.close()
