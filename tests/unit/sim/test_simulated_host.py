"""Simulated hosts with their processes and disks under virtual time."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import structlog

from meshrl.common.base.errors import DeadlineExceeded, NotFound, PeerLost, StorageFull
from meshrl.common.base.files.append_file import AppendFile
from meshrl.common.base.files.disk_sync import fsync_path
from meshrl.common.base.random import Random
from meshrl.common.mesh.process.host import Host, replace_file
from meshrl.common.mesh.process.spawning import SpawnOptions
from meshrl.common.weights.chunks.chunk_store import ChunkStore
from meshrl.sim.event_record import EventRecord
from meshrl.sim.mesh.faults.corruption import FileCorruptor, flip_bit, write_misdirected
from meshrl.sim.mesh.seed_runner import run_on_loop
from meshrl.sim.virtual_disk import VirtualDisk
from meshrl.sim.virtual_loop import VirtualClock, VirtualLoop
from meshrl.sim.virtual_machine import VirtualChild, VirtualHost, VirtualMachine
from meshrl.sim.virtual_process import VirtualProcess
from tests.simulated_host import SimulatedChannel, SimulatedHost, virtual

Story = Callable[[VirtualMachine], Awaitable[None]]


async def echo(arguments: list[str], channel: SimulatedChannel) -> None:
    while True:
        frame = await channel.recv()
        if frame == b"fail":
            raise ValueError(frame)
        channel.send(frame + arguments[0].encode())


@virtual
async def test_process_is_a_task_with_a_channel_and_an_exit(
    clock: VirtualClock, random: Random
) -> None:
    host = SimulatedHost(clock, random, {"services.echo": echo})
    typed: Host = host
    child = typed.spawn(
        ["python", "-m", "services.echo", "!"], name="echo", options=SpawnOptions(has_channel=True)
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
        ["python", "-m", "services.echo", "!"], name="echo", options=SpawnOptions(has_channel=True)
    )
    await failing.send(b"fail")
    assert await failing.wait(5) == 1
    with pytest.raises(NotFound):
        typed.spawn(["python", "-m", "services.other"], name="other")
    assert 6 <= clock.monotonic() < 7


@virtual
async def test_periodic_function_follows_the_virtual_clock_until_it_returns_false(
    clock: VirtualClock, random: Random
) -> None:
    times: list[float] = []

    def tick() -> bool:
        times.append(clock.monotonic())
        return len(times) < 3

    SimulatedHost(clock, random).run_periodically(1.5, tick, "renewal")
    await clock.sleep(100)
    assert times == [1.5, 3.0, 4.5]


@virtual
async def test_full_disk_rejects_a_record_and_keeps_earlier_ones(
    clock: VirtualClock, random: Random, tmp_path: Path
) -> None:
    file = SimulatedHost(clock, random, disk_bytes=10).open_append(tmp_path / "segment")
    file.write(b"12345678")
    with pytest.raises(StorageFull, match="no space for 3 bytes after 8"):
        file.write(b"abc")
    file.write(b"90")
    assert file.tell() == 10
    assert (tmp_path / "segment").read_bytes() == b"1234567890"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "run"
    made.mkdir()
    return made


@pytest.fixture
def disk(root: Path) -> Iterator[VirtualDisk]:
    made = VirtualDisk(root)
    made.start_tracking()
    yield made
    made.close()


def test_power_cut_keeps_a_prefix_of_unsynced_content(root: Path, disk: VirtualDisk) -> None:
    left = set()
    for seed in range(20):
        file = AppendFile(root / f"{seed}.ledger")
        file.write(b"durable ")
        file.sync()
        file.write(b"not yet")
        file.close()
        disk.cut_power(Random(seed))
        content = (root / f"{seed}.ledger").read_bytes()
        assert b"durable not yet".startswith(content) and content.startswith(b"durable ")
        left.add(len(content))
    assert len(left) > 3, "a prefix of any length"


def test_power_cut_removes_a_file_in_an_unsynced_directory(root: Path, disk: VirtualDisk) -> None:
    (root / "new").mkdir()
    (root / "new" / "file").write_bytes(b"content")
    assert disk.cut_power(Random(0)) == {"new/file"}
    assert list(root.iterdir()) == []


def test_rename_is_durable_after_a_directory_sync(root: Path, disk: VirtualDisk) -> None:
    replace_file(root / "record", b"old")
    scratch = root / "scratch"
    scratch.write_bytes(b"new")
    fsync_path(scratch)
    scratch.rename(root / "record")
    disk.cut_power(Random(0))
    assert (root / "record").read_bytes() == b"old"
    replace_file(root / "record", b"new")
    disk.cut_power(Random(0))
    assert (root / "record").read_bytes() == b"new"


def test_removal_is_durable_after_a_directory_sync(root: Path, disk: VirtualDisk) -> None:
    replace_file(root / "a", b"a")
    replace_file(root / "b", b"b")
    (root / "a").unlink()
    fsync_path(root)
    (root / "b").unlink()
    disk.cut_power(Random(0))
    assert [path.name for path in root.iterdir()] == ["b"]


def test_renamed_directory_keeps_its_synced_content(root: Path, disk: VirtualDisk) -> None:
    (root / "scratch").mkdir()
    replace_file(root / "scratch" / "weights", b"w")
    (root / "scratch").rename(root / "step-1")
    fsync_path(root)
    disk.cut_power(Random(0))
    assert (root / "step-1" / "weights").read_bytes() == b"w"
    assert not (root / "scratch").exists()


def test_dangling_link_survives_a_power_cut(root: Path, disk: VirtualDisk) -> None:
    (root / "store").symlink_to(root / "shared")
    fsync_path(root)
    fsync_path(root)
    disk.cut_power(Random(0))
    assert (root / "store").is_symlink()


def test_disk_that_skips_syncs_loses_synced_content(root: Path, disk: VirtualDisk) -> None:
    chunks = ChunkStore(root / "store")
    before = chunks.write(b"before")
    replace_file(root / "notes", b"old")
    disk.skips_sync = lambda path: path.startswith("store")
    after = chunks.write(b"after")
    replace_file(root / "notes", b"new")
    lost = disk.cut_power(Random(0))
    assert chunks.has(before) and not chunks.has(after)
    assert [name for name in lost if name.endswith(after)]
    assert (root / "notes").read_bytes() == b"new"
    chunks.write(b"after")
    disk.cut_power(Random(0))
    assert chunks.has(after), "the next disk tells the truth"


def test_file_times_survive_a_power_cut(root: Path, disk: VirtualDisk) -> None:
    (root / "file").write_bytes(b"longer")
    os.utime(root / "file", (1000, 2000))
    fsync_path(root)
    disk.cut_power(Random(3))
    assert (root / "file").stat().st_mtime == 2000


@pytest.mark.parametrize("room", [0, 5])
def test_full_disk_rejects_every_writer(root: Path, disk: VirtualDisk, room: int) -> None:
    file = AppendFile(root / "ledger")
    file.write(b"abc")
    disk.max_file_bytes = room
    with disk.limit_writes():
        with pytest.raises(StorageFull):
            file.write(b"defghi")
        with pytest.raises(StorageFull):
            ChunkStore(root / "store").write(b"a chunk of something")
        with pytest.raises(OSError) as caught:
            (root / "plain").write_bytes(b"more than there is room for")
        assert caught.value.errno == errno.EFBIG
    assert (root / "ledger").read_bytes() == b"abc", "a part of it was written, and taken back"
    file.write(b"def")
    file.close()
    assert (root / "ledger").read_bytes() == b"abcdef"


def test_flip_changes_exactly_one_bit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(16))
    flip_bit(path, 5, 6)
    assert path.read_bytes() == bytes(5) + b"\x40" + bytes(10)


def test_misdirected_write_overwrites_part_of_another_file(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_bytes(b"0123456789")
    other.write_bytes(b"abcdef")
    write_misdirected(one, other, 3)
    assert other.read_bytes() == b"abc789" and one.read_bytes() == b"0123456789"
    write_misdirected(other, one, 2)
    assert one.read_bytes() == b"01abc78989"


def test_corrupted_file_records_whether_it_was_read(root: Path, tmp_path: Path) -> None:
    store = ChunkStore(root / "store")
    digest = store.write(b"something that is kept")
    when = store.chunk_path(digest).stat().st_mtime_ns
    spoiler = FileCorruptor(root, tmp_path / "links", Random(1))
    damage = spoiler.corrupt_file()
    assert damage is not None and damage.path.endswith(digest)
    assert spoiler.corrupt_file() is None, "a file is damaged once"
    assert not damage.was_read and store.chunk_path(digest).stat().st_mtime_ns == when
    store.chunk_path(digest).rename(root / "aside")
    (root / "aside").read_bytes()
    assert damage.was_read


def on_machine(root: Path, story: Story) -> list[str]:
    """Return the messages that the processes of a story logged."""
    loop = VirtualLoop()
    loop.limit_s = 1000.0
    record = EventRecord(lambda: loop.now_s, root)
    said: list[str] = []

    async def log_processes() -> list[str]:
        machine = VirtualMachine(loop, Random(1), record, root)
        machine.programs = {"talker": talker(said), "parent": parent, "echoes": echoes}
        await story(machine)
        return list(said)

    return run_on_loop(loop, record, log_processes())


def talker(said: list[str]) -> Callable[[VirtualProcess, list[str]], Awaitable[None]]:
    async def talk(process: VirtualProcess, argv: list[str]) -> None:
        host = VirtualHost(process)
        host.run_periodically(1.0, lambda: said.append("tick"), "ticker")
        try:
            async with asyncio.timeout(900):
                while True:
                    await process.machine.clock.sleep(1.0)
                    said.append("turn")
        finally:
            said.append("cleaned up")

    return talk


async def parent(process: VirtualProcess, argv: list[str]) -> None:
    host = VirtualHost(process)
    host.spawn(["talker"], name="tied")
    host.spawn(["talker"], name="free", options=SpawnOptions(die_with_parent=False))
    await process.machine.clock.sleep(900.0)


async def echoes(process: VirtualProcess, argv: list[str]) -> None:
    while (frame := await process.channel.to_child.get()) is not None:
        process.channel.to_parent.put_nowait(frame)


def test_killed_process_runs_no_cleanup(tmp_path: Path) -> None:
    async def story(machine: VirtualMachine) -> None:
        process = machine.spawn("talker", [], "talker", None, dies_with_parent=False)
        await machine.clock.sleep(2.5)
        process.kill()
        await machine.clock.sleep(10.0)
        assert process.exit_code == -9

    assert sorted(on_machine(tmp_path, story)) == ["tick", "tick", "turn", "turn"]


def test_task_started_in_the_exit_callback_never_runs(tmp_path: Path) -> None:
    async def run_and_exit(process: VirtualProcess, argv: list[str]) -> None:
        try:
            VirtualHost(process).exit(75, "its lease is lost")
        finally:
            late.append(asyncio.ensure_future(process.machine.clock.sleep(1.0)))

    late: list[asyncio.Future[None]] = []

    async def story(machine: VirtualMachine) -> None:
        machine.programs["quits"] = run_and_exit
        process = machine.spawn("quits", [], "quits", None, dies_with_parent=False)
        await machine.clock.sleep(10.0)
        assert process.exit_code == 75
        assert not late[0].done() and late[0] in machine.dead_tasks

    on_machine(tmp_path, story)


def test_terminated_process_runs_its_cleanup(tmp_path: Path) -> None:
    async def story(machine: VirtualMachine) -> None:
        process = machine.spawn("talker", [], "talker", None, dies_with_parent=False)
        await machine.clock.sleep(0.5)
        process.terminate()
        await machine.clock.sleep(1.0)
        assert process.exit_code == 0

    assert on_machine(tmp_path, story) == ["cleaned up"]


def test_stopped_process_resumes_at_the_same_point(tmp_path: Path) -> None:
    seen: list[int] = []

    async def story(machine: VirtualMachine) -> None:
        process = machine.spawn("talker", [], "talker", None, dies_with_parent=False)
        await machine.clock.sleep(2.5)
        process.stop()
        await machine.clock.sleep(50.0)
        seen.append(machine.clock.monotonic() > 52 and process.is_stopped)
        process.resume()
        await machine.clock.sleep(1.1)
        process.kill()

    said = on_machine(tmp_path, story)
    assert seen == [True]
    assert said.count("turn") == said.count("tick") == 4  # the due turn came once, and one more


def test_children_die_with_their_parent_unless_detached(tmp_path: Path) -> None:
    async def story(machine: VirtualMachine) -> None:
        process = machine.spawn("parent", [], "parent", None, dies_with_parent=False)
        await machine.clock.sleep(0.5)
        process.kill()
        assert [one.name for one in machine.live_processes] == ["free"]

    on_machine(tmp_path, story)


def test_channel_closes_with_its_process(tmp_path: Path) -> None:
    heard: list[object] = []

    async def story(machine: VirtualMachine) -> None:
        process = machine.spawn("echoes", [], "echoes", None, dies_with_parent=False)
        child = VirtualChild(process, machine.clock, is_adopted=False)
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


def test_log_target_is_restored_after_a_simulation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def nothing(machine: VirtualMachine) -> None:
        structlog.get_logger().warning("within")

    on_machine(tmp_path, nothing)
    structlog.get_logger().warning("afterwards")
    output = "".join(capsys.readouterr())
    assert "afterwards" in output and "within" not in output
