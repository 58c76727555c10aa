"""An agent whose notes are lost: no worker of its predecessor stays without one."""

from __future__ import annotations

from pathlib import Path

from meshrl.sim.mesh.world.world import Size, World
from meshrl.sim.process import VirtualProcess
from tests.mesh.simulated.worlds import on_world


def test_workers_are_adopted_by_what_the_registry_says(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await world.clock.sleep(10.0)
        before = {p.name: p.pid for p in world.machine.alive}
        (tmp_path / "mesh" / "node-one.json").unlink()
        next(p for p in world.machine.alive if p.name == "node/one").kill()
        await world.clock.sleep(30.0)
        after = {p.name: p.pid for p in world.machine.alive}
        assert after["node/one"] != before["node/one"]
        for worker in ("worker/w0", "worker/w1"):
            assert after[worker] == before[worker]
            started = [p for p in world.machine.processes.values() if p.name == worker]
            assert len(started) == 1

    on_world(tmp_path, Size(steps=4), story)


def test_a_worker_that_registers_too_late_makes_room(tmp_path: Path) -> None:
    """Its agent took no note of it, and the next one could not find it."""

    async def story(world: World) -> None:
        def workers() -> list[VirtualProcess]:
            return [p for p in world.machine.alive if p.name == "worker/w0"]

        await world.clock.sleep(10.0)
        workers()[0].kill()
        await world.clock.sleep(0.1)
        (unnoted,) = workers()
        unnoted.stop()  # before it has registered
        (tmp_path / "mesh" / "node-one.json").unlink()
        next(p for p in world.machine.alive if p.name == "node/one").kill()
        while len(workers()) == 1:
            await world.clock.sleep(0.05)
        unnoted.resume()
        await world.clock.sleep(30.0)
        assert unnoted.ended
        assert len(workers()) == 1

    on_world(tmp_path, Size(steps=4), story)
