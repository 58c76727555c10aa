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
from tests.meshes import PATIENT, SECRET, begun, keys_of
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
KEYS = keys_of("loadtest")  # that the echo lets in


class Trouble:
    """What happens at the named steps, once their own work is done."""

    def __init__(self) -> None:
        self.steps: dict[str, Callable[[], Awaitable[None]]] = {}
        self.reached: list[str] = []

    async def at(self, step: str) -> None:
        self.reached.append(step)
        if step in self.steps:
            await self.steps[step]()


class Troubled(Talker):
    def __init__(self, trouble: Trouble) -> None:
        super().__init__()
        self.trouble = trouble

    async def start(self) -> None:
        await self.trouble.at("start")

    async def stop(self) -> None:
        await self.trouble.at("actor")


class TroubledState(StateClient):
    def __init__(self, *arguments: Any, trouble: Trouble) -> None:
        super().__init__(*arguments)
        self.trouble = trouble

    async def run_script(self, script: str, keys: list[str], *args: Any) -> Any:
        answer = await super().run_script(script, keys, *args)
        await self.trouble.at({"vacate": "lease", "register": "take"}.get(script, script))
        return answer

    async def close(self) -> None:
        await super().close()
        await self.trouble.at("state")


class TroubledTransport(ZmqTransport):
    def __init__(self, trouble: Trouble) -> None:
        super().__init__()
        self.trouble = trouble

    async def close(self) -> None:
        await super().close()
        await self.trouble.at("transport")


class CountingHost(SystemHost):
    """Knows which of its threads were told to stop."""

    def __init__(self) -> None:
        super().__init__()
        self.running: dict[str, Stoppable] = {}

    def run_periodically(
        self, interval_s: float, fn: Callable[[], bool | None], name: str
    ) -> Stoppable:
        thread, running = super().run_periodically(interval_s, fn, name), self.running

        class Counted:
            def stop(self) -> None:
                running.pop(name, None)
                thread.stop()

        running[name] = Counted()
        return running[name]


class Scene:
    """A mesh with all that it can open, and an actor."""

    def __init__(self) -> None:
        self.trouble, self.clock, self.host = Trouble(), SystemClock(), CountingHost()
        self.whole = open_simulated_state(self.clock)
        whole = (self.whole.url, self.whole.client, self.whole._sync_client, self.clock.monotonic)
        self.transport = TroubledTransport(self.trouble)
        self.mesh = Mesh(
            "a",
            "test",
            MeshDependencies(
                state=TroubledState(*whole, trouble=self.trouble),
                transport=self.transport,
                clock=self.clock,
                random=Random.from_os_entropy(),
                host=self.host,
                owns_state=True,
            ),
            terms=LeaseTerms(**PATIENT),
        )
        self.mesh.serve_metrics("127.0.0.1:*")
        self.actor = Troubled(self.trouble)

    async def all_is_closed(self) -> None:
        """Tasks, the lease's thread, sockets, connections and the metrics' port."""
        assert self.transport._context.closed
        assert "state" in self.trouble.reached
        assert not [name for name in self.host.running if name.startswith("lease")]
        await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})
        assert self.mesh._endpoint is not None
        host, _, port = self.mesh._endpoint.address.removeprefix("http://").rpartition(":")
        await until(lambda: refused(host, int(port)))


def refused(host: str, port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex((host, port)) != 0


async def fails() -> None:
    raise RuntimeError("broken")


async def refuses() -> None:
    raise Refused("not me")


async def hangs() -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("step", STEPS)
async def test_a_step_that_fails_leaves_nothing_open_and_surfaces(step: str) -> None:
    scene = Scene()
    await scene.mesh.join(scene.actor)
    scene.trouble.steps[step] = fails
    with pytest.raises(RuntimeError, match="broken"):
        await scene.mesh.leave()
    assert [s for s in scene.trouble.reached if s in STEPS] == STEPS
    await scene.all_is_closed()
    entry = await registry.lookup(scene.whole, "a")
    assert entry is not None and not entry.alive
    await scene.whole.close()


@pytest.mark.parametrize("step", STEPS)
async def test_leaving_that_is_cancelled_leaves_nothing_open(step: str) -> None:
    scene = Scene()
    await scene.mesh.join(scene.actor)
    scene.trouble.steps[step] = hangs
    leaving = asyncio.create_task(scene.mesh.leave())
    await until(lambda: step in scene.trouble.reached)
    await cancel(leaving)
    assert [s for s in scene.trouble.reached if s in STEPS] == STEPS
    await scene.all_is_closed()


async def test_leaving_that_is_cancelled_while_calls_end_leaves_nothing_open() -> None:
    scene = Scene()
    stubborn = asyncio.Event()

    class Stubborn(Troubled):
        @call(Talk.sleep)
        async def sleep(self, m: Number) -> Text:
            try:
                await hangs()
            finally:
                await stubborn.wait()
            return Text("")

    await scene.mesh.join(Stubborn(scene.trouble))
    asking = asyncio.create_task(scene.mesh.ref("a").call(Talk.sleep, Number(9)))
    await until(lambda: scene.mesh.running_calls)
    leaving = asyncio.create_task(scene.mesh.leave())
    await asyncio.sleep(0.05)
    assert scene.trouble.reached[-1] not in STEPS
    await cancel(leaving)
    stubborn.set()
    await asyncio.wait([asking])
    await scene.all_is_closed()


async def test_the_first_of_several_errors_surfaces() -> None:
    scene = Scene()
    await scene.mesh.join(scene.actor)
    scene.trouble.steps.update(actor=refuses, transport=fails, state=fails)
    with pytest.raises(Refused, match="not me"):
        await scene.mesh.leave()
    await scene.all_is_closed()


async def test_a_step_that_fails_after_the_cancellation_does_not_hide_it() -> None:
    scene = Scene()
    await scene.mesh.join(scene.actor)
    scene.trouble.steps.update(actor=hangs, transport=fails)
    leaving = asyncio.create_task(scene.mesh.leave())
    await until(lambda: "actor" in scene.trouble.reached)
    await cancel(leaving)
    await scene.all_is_closed()


@pytest.mark.parametrize("step", ["take", "start"])
async def test_joining_that_fails_closes_what_it_opened(step: str) -> None:
    scene = Scene()
    scene.trouble.steps.update({step: fails, "transport": refuses})
    with pytest.raises(RuntimeError, match="broken"):
        await scene.mesh.join(scene.actor)
    await scene.all_is_closed()


@pytest.mark.parametrize("step", ["take", "start"])
async def test_joining_that_is_cancelled_closes_what_it_opened(step: str) -> None:
    scene = Scene()
    scene.trouble.steps.update({step: hangs, "state": fails})
    joining = asyncio.create_task(scene.mesh.join(scene.actor))
    await until(lambda: step in scene.trouble.reached)
    await cancel(joining)
    await scene.all_is_closed()


async def test_a_process_that_cannot_open_its_mesh_closes_its_connections(tmp_path: Path) -> None:
    server, host = prepare_server(tmp_path), SystemHost()
    redis = host.spawn(server.argv, name="redis", log=tmp_path / "redis.log")
    watching = await eventually_open(server.url)
    taken, kept = socket.create_server(("127.0.0.1", 0)), []
    where = f"127.0.0.1:{taken.getsockname()[1]}"
    odd: list[dict[str, Any]] = [{"metrics": where}, {"bind": f"tcp://{where}"}]
    for options in odd:
        settings = MeshSettings(server.url, str(tmp_path), host="here", secret=SECRET, **options)
        with pytest.raises(ConfigError) as why:
            await Mesh.open("a", "engine", settings)
        kept.append(why)  # what the error's frames hold is not closed by being collected
    async with asyncio.timeout(scaled(20.0)):
        while len((await watching.run_command("CLIENT", "LIST")).splitlines()) > 1:
            await asyncio.sleep(0.02)
    await watching.close()
    taken.close()
    redis.kill()
    assert await redis.wait(scaled(5.0)) is not None


async def eventually_open(url: str) -> StateClient:
    async with asyncio.timeout(scaled(20.0)):
        while True:
            try:
                return await StateClient.open(url, connect_timeout_s=1)
            except StateUnavailable:
                await asyncio.sleep(0.02)


@pytest.fixture
def echo() -> Iterator[tuple[subprocess.Popen[str], registry.RegistryEntry]]:
    """A real process that answers Echo, and its registry entry."""
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
    async with asyncio.timeout(scaled(30)):  # not at their own deadline
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(o, PeerLost) and "echo has gone" in str(o) for o in outcomes)


async def test_a_call_to_a_process_that_has_ended_is_a_lost_peer(
    join: Join, echo: tuple[subprocess.Popen[str], registry.RegistryEntry]
) -> None:
    process, entry = echo
    process.kill()
    process.wait()
    mesh = await join("b", kind="loadtest", transport=ZmqTransport(keys=KEYS))
    await registry.register(mesh.state, entry, 60_000)
    with pytest.raises(PeerLost, match="echo has gone"):
        await call_until_refused(mesh.ref("echo"), Echo.inline, PING)
    assert mesh.telemetry.counters["repeated_peer_lost"] >= 1  # nothing had arrived


async def test_replies_beyond_the_high_water_mark_are_all_delivered() -> None:
    """The requester does not read for a while; what the ROUTER refuses is parked, in order."""
    server = ZmqTransport(high_water_mark=2)
    replies, size = 400, 60_000  # 24 MB: more than the kernel holds

    def answer(peer: bytes, frames: list[Frame], role: str) -> None:
        for place in range(replies):
            server.reply(peer, (place.to_bytes(4, "little"), bytes(size)))

    server.start(answer, lambda *_: None, lambda *_: None)
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.set(zmq.RCVHWM, 2)
        client.connect(server.address)
        client.send(begun(b"", b"all"))
        await until(lambda: server.parked_count > 100)
        await asyncio.sleep(0.1)
        assert server.parked_count > 100
        got: list[int] = []
        while len(got) < replies:
            await until(lambda: client.poll(0))
            got.append(int.from_bytes(client.recv_multipart()[0][2:], "little"))
        assert got == list(range(replies))
        client.close(0)
    assert server.parked_count == 0
    await server.close()


async def test_a_requester_that_has_gone_is_reported() -> None:
    server, client = ZmqTransport(), ZmqTransport()
    asked: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    gone: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    server.start(lambda peer, *_: asked.set_result(peer), lambda *_: None, gone.set_result)
    client.start(lambda *_: None, lambda *_: None, lambda *_: None)
    client.send(server.address, (b"", b""))
    async with asyncio.timeout(scaled(10)):
        peer = await asked
        await client.close()
        while not gone.done():
            server.reply(peer, (b"", b""))
            await asyncio.sleep(0.01)
    assert gone.result() == peer
    await server.close()


async def test_a_peer_that_was_silent_has_not_refused_however_late_one_hears_of_that() -> None:
    """All of the handshake goes by while the loop stands still."""
    client = ZmqTransport(keys=keys_of("engine"), handshake_timeout_s=0.3)
    lost: list[tuple[str, bool, bool]] = []
    client.start(lambda *_: None, lambda *all: lost.append(all), lambda *_: None)
    with socket.create_server(("127.0.0.1", 0)) as still:
        still.settimeout(scaled(20.0))
        address = f"tcp://127.0.0.1:{still.getsockname()[1]}#{KEYS.public_key_text}"
        client.send(address, (b"", b""))
        accepted, _ = still.accept()
        with accepted:
            accepted.settimeout(scaled(20.0))
            while accepted.recv(4096):  # until it is given up
                pass
        await until(lambda: lost, 20.0)
    assert lost == [(address, False, False)]
    await client.close()
