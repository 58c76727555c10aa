"""The unauthenticated peer of `loadtests.doors`, which finds open endpoints and no others."""

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

from loadtests.doors.endpoint_inventory import port_in
from loadtests.doors.plan import ANSWERED, GREETED, METRICS, REFUSED, Plan, Port, Process, Tried
from meshrl.common.base.clock import SystemClock
from meshrl.common.base.random import Random
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.mesh.runtime.dependencies import LeaseTerms, MeshDependencies
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.transport.zmq_transport import ZmqTransport
from meshrl.sim.redis.simulated_state import open_simulated_state
from tests.load import scaled
from tests.meshes import PATIENT, make_keys
from tests.unit.common.mesh.runtime.talking import Talker

ROOT = Path(__file__).parents[4]
TRIES_S = 90.0

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


async def run_plan(plan: Plan) -> list[Tried]:
    """Return the outcome of a plan."""
    peer = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "loadtests.doors.stranger"),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(scaled(TRIES_S)):
        told, _ = await peer.communicate(json.dumps(asdict(plan)).encode())
    assert peer.returncode == 0
    return [Tried(**one) for one in json.loads(told)]


@pytest.fixture
def serve_constant() -> Iterator[int]:
    """Serve a port that sends the same text to every peer."""

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
def readable_directory() -> Iterator[Path]:
    """Make a directory that every user can read."""
    with tempfile.TemporaryDirectory(prefix="doors-") as directory:
        Path(directory).chmod(0o711)
        for name, mode in (("open", 0o644), ("shut", 0o600)):
            path = Path(directory, name)
            path.write_text("content")
            path.chmod(mode)
        yield Path(directory)


async def test_open_and_protected_endpoints_are_distinguished(
    readable_directory: Path, serve_constant: int
) -> None:
    clock = SystemClock()
    state = open_simulated_state(clock)
    transports = {"open": ZmqTransport(), "shut": ZmqTransport(keys=make_keys("test"))}
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
            Port("127.0.0.1", serve_constant, "", "other"),
            Port("127.0.0.1", serve_constant, "metrics", "open on purpose"),
        ],
        files=[str(readable_directory / "open"), str(readable_directory / "shut")],
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
    found = await run_plan(plan)

    def outcomes(mark: str) -> set[str]:
        return {one.outcome for one in found if mark in one.what}

    assert outcomes("of other)") == {ANSWERED}
    assert outcomes("open on purpose") == {METRICS}
    answered = [
        one.what for one in found if one.outcome == ANSWERED and str(readable_directory) in one.what
    ]
    assert answered == [f"read {readable_directory}/open"]
    assert outcomes("(this test)") == {REFUSED}
    assert ANSWERED in outcomes("of open, keyless")
    assert outcomes("of shut, keyless") == outcomes("of shut, guessing") == {REFUSED}
    assert outcomes("(calls of shut)") <= {GREETED, REFUSED}
    for mesh in meshes:
        await mesh.leave()
    await state.close()
