"""The stranger of `loadtests.doors` finds what is open, and takes nothing that is shut for it."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import pytest

from loadtests.doors.found import port_in
from loadtests.doors.plan import ANSWERED, GREETED, METRICS, REFUSED, Plan, Port, Process, Tried
from meshrl.common.base.clock import SystemClock
from meshrl.common.base.random import Random
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.mesh.runtime.dependencies import LeaseTerms, MeshDependencies
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.transport.zmq_transport import ZmqTransport
from meshrl.sim.redis.simulated_state import open_simulated_state
from tests.load import scaled
from tests.meshes import PATIENT, keys_of
from tests.unit.common.mesh.runtime.talking import Talker

ROOT = Path(__file__).parents[4]
TRIES_S = 90.0

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


async def tried(plan: Plan) -> list[Tried]:
    """What came of a plan."""
    stranger = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "loadtests.doors.stranger"),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(scaled(TRIES_S)):
        told, _ = await stranger.communicate(json.dumps(asdict(plan)).encode())
    assert stranger.returncode == 0
    return [Tried(**one) for one in json.loads(told)]


@pytest.fixture
def talkative() -> Iterator[int]:
    """A port that tells everybody the same."""

    def serve() -> None:
        with suppress(OSError):
            while True:
                taken, _ = listener.accept()
                taken.sendall(b"hello")
                taken.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(scaled(10))


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A directory in which everybody can reach what they know by name."""
    with tempfile.TemporaryDirectory(prefix="doors-") as directory:
        Path(directory).chmod(0o711)
        for name, mode in (("open", 0o644), ("shut", 0o600)):
            path = Path(directory, name)
            path.write_text("content")
            path.chmod(mode)
        yield Path(directory)


async def test_open_and_shut_doors_are_told_apart(reachable: Path, talkative: int) -> None:
    clock = SystemClock()
    state = open_simulated_state(clock)
    transports = {"open": ZmqTransport(), "shut": ZmqTransport(keys=keys_of("test"))}
    meshes = [
        Mesh(
            name,
            "test",
            MeshDependencies(
                state=state,
                transport=transport,
                clock=clock,
                random=Random.from_os_entropy(),
                host=SystemHost(),
            ),
            terms=LeaseTerms(**PATIENT),
        )
        for name, transport in transports.items()
    ]
    plan = Plan(
        ports=[
            Port("127.0.0.1", talkative, "", "other"),
            Port("127.0.0.1", talkative, "metrics", "open on purpose"),
        ],
        files=[str(reachable / "open"), str(reachable / "shut")],
        pids={os.getpid(): "this test"},
    )
    for mesh in meshes:
        actor = Talker()
        actor.mesh = mesh
        await mesh.join(actor)
        address = transports[mesh.name].address
        plan.processes.append(Process(mesh.name, address, mesh.incarnation))
        port = port_in(address)
        plan.ports.append(Port("127.0.0.1", port, "calls", mesh.name))
    found = await tried(plan)

    def outcomes(mark: str) -> set[str]:
        return {one.outcome for one in found if mark in one.what}

    assert outcomes("of other)") == {ANSWERED}
    assert outcomes("open on purpose") == {METRICS}
    answered = [one.what for one in found if one.outcome == ANSWERED and str(reachable) in one.what]
    assert answered == [f"read {reachable}/open"]
    assert outcomes("(this test)") == {REFUSED}
    assert ANSWERED in outcomes("of open, keyless")
    assert outcomes("of shut, keyless") == outcomes("of shut, guessing") == {REFUSED}
    assert outcomes("(calls of shut)") <= {GREETED, REFUSED}
    for mesh in meshes:
        await mesh.leave()
    await state.close()
