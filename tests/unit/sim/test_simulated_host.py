"""The simulated host keeps the promises of the real one, under virtual time."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from meshrl.common.base.errors import DeadlineExceeded, NotFound, PeerLost, StorageFull
from meshrl.common.base.random import Random
from meshrl.common.mesh.process.host import Host
from meshrl.common.mesh.process.starting import Spawning
from meshrl.sim.loop import VirtualClock, run_virtual
from tests.simulated_host import SimulatedChannel, SimulatedHost


async def echo(arguments: list[str], channel: SimulatedChannel) -> None:
    while True:
        frame = await channel.recv()
        if frame == b"fail":
            raise ValueError(frame)
        channel.send(frame + arguments[0].encode())


def test_a_process_is_a_task_with_a_channel_and_an_end() -> None:
    async def main(clock: VirtualClock, random: Random) -> None:
        host = SimulatedHost(clock, random, {"services.echo": echo})
        typed: Host = host
        child = typed.spawn(
            ["python", "-m", "services.echo", "!"], name="echo", how=Spawning(pipe=True)
        )
        await child.send(b"a")
        assert await child.recv(1) == b"a!"
        with pytest.raises(DeadlineExceeded):
            await child.recv(1)
        assert await child.wait(5) is None
        assert host.adopt(child.pid, child.start_time, name="echo") is child
        child.kill()
        assert await child.wait(5) == -signal.SIGKILL
        with pytest.raises(PeerLost):
            await child.send(b"a")
        failing = typed.spawn(
            ["python", "-m", "services.echo", "!"], name="echo", how=Spawning(pipe=True)
        )
        await failing.send(b"fail")
        assert await failing.wait(5) == 1
        with pytest.raises(NotFound):
            typed.spawn(["python", "-m", "services.other"], name="other")
        assert 6 <= clock.monotonic() < 7

    run_virtual(main)


def test_ticks_follow_the_virtual_clock_until_false() -> None:
    async def main(clock: VirtualClock, random: Random) -> None:
        times: list[float] = []

        def tick() -> bool:
            times.append(clock.monotonic())
            return len(times) < 3

        SimulatedHost(clock, random).every(1.5, tick, "renewal")
        await clock.sleep(100)
        assert times == [1.5, 3.0, 4.5]

    run_virtual(main)


def test_a_full_disk_refuses_the_record_and_keeps_the_earlier_ones(tmp_path: Path) -> None:
    async def main(clock: VirtualClock, random: Random) -> None:
        file = SimulatedHost(clock, random, disk_bytes=10).open_append(tmp_path / "segment")
        file.write(b"12345678")
        with pytest.raises(StorageFull, match="no room for 3 bytes after 8"):
            file.write(b"abc")
        file.write(b"90")
        assert file.tell() == 10
        assert (tmp_path / "segment").read_bytes() == b"1234567890"

    run_virtual(main)
