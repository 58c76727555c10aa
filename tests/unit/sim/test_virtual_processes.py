"""A virtual process that is killed does nothing more; one that is stopped waits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import structlog

from meshrl.common.base.errors import PeerLost
from meshrl.common.base.random import Random
from meshrl.common.mesh.process.starting import Spawning
from meshrl.sim.loop import VirtualLoop
from meshrl.sim.machine import Machine, ProcessHost, VirtualChild
from meshrl.sim.mesh.running import run_in
from meshrl.sim.process import VirtualProcess
from meshrl.sim.record import EventRecord

Story = Callable[[Machine], Awaitable[None]]


def on_machine(root: Path, story: Story) -> list[str]:
    """What the processes of a story said."""
    loop = VirtualLoop()
    loop.limit = 1000.0
    record = EventRecord(lambda: loop.now, root)
    said: list[str] = []

    async def told() -> list[str]:
        machine = Machine(loop, Random(1), record, root)
        machine.programs = {"talker": talker(said), "parent": parent, "echo": echo}
        await story(machine)
        return list(said)

    return run_in(loop, record, told())


def talker(said: list[str]) -> Callable[[VirtualProcess, list[str]], Awaitable[None]]:
    async def talk(process: VirtualProcess, argv: list[str]) -> None:
        host = ProcessHost(process)
        host.every(1.0, lambda: said.append("tick"), "ticker")
        try:
            async with asyncio.timeout(900):
                while True:
                    await process.machine.clock.sleep(1.0)
                    said.append("turn")
        finally:
            said.append("cleaned up")

    return talk


async def parent(process: VirtualProcess, argv: list[str]) -> None:
    host = ProcessHost(process)
    host.spawn(["talker"], name="tied")
    host.spawn(["talker"], name="free", how=Spawning(die_with_parent=False))
    await process.machine.clock.sleep(900.0)


async def echo(process: VirtualProcess, argv: list[str]) -> None:
    while (frame := await process.channel.to_child.get()) is not None:
        process.channel.to_parent.put_nowait(frame)


def test_a_killed_process_cleans_nothing_up(tmp_path: Path) -> None:
    async def story(machine: Machine) -> None:
        process = machine.spawn("talker", [], "talker", None, tied=False)
        await machine.clock.sleep(2.5)
        process.kill()
        await machine.clock.sleep(10.0)
        assert process.code == -9

    assert sorted(on_machine(tmp_path, story)) == ["tick", "tick", "turn", "turn"]


def test_what_a_process_begins_in_the_callback_that_ends_it_is_never_run(tmp_path: Path) -> None:
    async def quits(process: VirtualProcess, argv: list[str]) -> None:
        try:
            ProcessHost(process).exit(75, "its lease is lost")
        finally:
            late.append(asyncio.ensure_future(process.machine.clock.sleep(1.0)))

    late: list[asyncio.Future[None]] = []

    async def story(machine: Machine) -> None:
        machine.programs["quits"] = quits
        process = machine.spawn("quits", [], "quits", None, tied=False)
        await machine.clock.sleep(10.0)
        assert process.code == 75
        assert not late[0].done() and late[0] in machine.graveyard

    on_machine(tmp_path, story)


def test_a_terminated_process_cleans_up(tmp_path: Path) -> None:
    async def story(machine: Machine) -> None:
        process = machine.spawn("talker", [], "talker", None, tied=False)
        await machine.clock.sleep(0.5)
        process.terminate()
        await machine.clock.sleep(1.0)
        assert process.code == 0

    assert on_machine(tmp_path, story) == ["cleaned up"]


def test_a_stopped_process_goes_on_where_it_was(tmp_path: Path) -> None:
    seen: list[int] = []

    async def story(machine: Machine) -> None:
        process = machine.spawn("talker", [], "talker", None, tied=False)
        await machine.clock.sleep(2.5)
        process.stop()
        await machine.clock.sleep(50.0)
        seen.append(machine.clock.monotonic() > 52 and process.stopped)
        process.resume()
        await machine.clock.sleep(1.1)
        process.kill()

    said = on_machine(tmp_path, story)
    assert seen == [True]
    assert said.count("turn") == said.count("tick") == 4  # what was due came once, and one more


def test_children_die_with_their_parent_unless_they_need_not(tmp_path: Path) -> None:
    async def story(machine: Machine) -> None:
        process = machine.spawn("parent", [], "parent", None, tied=False)
        await machine.clock.sleep(0.5)
        process.kill()
        assert [one.name for one in machine.alive] == ["free"]

    on_machine(tmp_path, story)


def test_a_channel_ends_with_its_process(tmp_path: Path) -> None:
    heard: list[object] = []

    async def story(machine: Machine) -> None:
        process = machine.spawn("echo", [], "echo", None, tied=False)
        child = VirtualChild(process, machine.clock, adopted=False)
        await child.send(b"one")
        heard.append(await child.recv(1.0))
        process.kill()
        try:
            await child.recv(1.0)
        except PeerLost:
            heard.append("lost")
        heard.append(await child.wait(1.0))

    on_machine(tmp_path, story)
    assert heard == [b"one", "lost", -9]


def test_what_is_logged_afterwards_goes_where_it_went_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def nothing(machine: Machine) -> None:
        structlog.get_logger().warning("within")

    on_machine(tmp_path, nothing)
    structlog.get_logger().warning("afterwards")
    said = "".join(capsys.readouterr())
    assert "afterwards" in said and "within" not in said
