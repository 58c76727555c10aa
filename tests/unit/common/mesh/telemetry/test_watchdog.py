"""A process whose loop stands still ends itself, with stacks; so does one that lost its name."""

from __future__ import annotations

import subprocess
import sys

import pytest

from meshrl.common.base.errors import Refused
from meshrl.common.mesh.runtime.lease import LOST
from meshrl.common.state import registry
from tests.load import scaled
from tests.unit.common.mesh.runtime.talking import Join, Talker

HUNG = """
import asyncio, sys, time
from meshrl.common.base.clock import SystemClock
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.mesh.runtime.mesh import Mesh, run
from meshrl.common.mesh.runtime.seams import Seams, Terms
from meshrl.common.base.random import Random
from meshrl.sim.redis.state import simulated_state
from meshrl.common.mesh.transport.zmq import ZmqTransport

def stand_still(seconds):
    time.sleep(seconds)

STALL_S = float(sys.argv[1])

async def main():
    clock = SystemClock()
    seams = Seams(simulated_state(clock), ZmqTransport(), clock, Random.system(), SystemHost())
    mesh = Mesh("hung", "test", seams, terms=Terms(renew_s=0.1, stall_s=STALL_S))
    await mesh.join(None)
    with mesh.loading():
        stand_still(1.5 * STALL_S)
    print("loaded", flush=True)
    stand_still(3600)

run(main)
"""


def test_a_hung_loop_dumps_its_stacks_and_exits() -> None:
    command = [sys.executable, "-c", HUNG, str(min(10.0, scaled(2.0)))]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=scaled(100), check=False
    )
    assert ended.returncode == LOST
    assert ended.stdout == "loaded\n"
    assert "the event loop has not run for" in ended.stderr
    assert "in stand_still" in ended.stderr


async def test_ready_is_published_without_waiting_for_the_renewal(join: Join) -> None:
    mesh = await join("a", Talker(), renew_s=60.0, ttl_s=120.0)
    mesh.ready = True
    await mesh.publish()
    entry = await registry.lookup(mesh.state, "a")
    assert entry is not None and entry.stats["ready"] is True


async def test_a_name_has_one_holder(join: Join) -> None:
    first = await join("a", Talker(), ttl_s=30.0)
    with pytest.raises(Refused):
        await join("a", Talker(), ttl_s=0.1)
    await first.leave()
    second = await join("a", Talker())
    assert second.token > first.token > 0
