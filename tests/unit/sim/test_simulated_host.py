"""Simulated hosts and their disks, under virtual time."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshrl.common.base.errors import DeadlineExceeded, NotFound, PeerLost, StorageFull
from meshrl.common.base.files.append_file import AppendFile
from meshrl.common.base.files.durable import sync
from meshrl.common.base.random import Random
from meshrl.common.mesh.process.host import Host, replace_file
from meshrl.common.mesh.process.starting import Spawning
from meshrl.common.weights.chunks.chunks import ChunkStore
from meshrl.sim.disk import Disk
from meshrl.sim.loop import VirtualClock
from meshrl.sim.mesh.faults.damage import Spoiler, flip, misdirect
from tests.simulated_host import SimulatedChannel, SimulatedHost, virtual


async def echo(arguments: list[str], channel: SimulatedChannel) -> None:
    while True:
        frame = await channel.recv()
        if frame == b"fail":
            raise ValueError(frame)
        channel.send(frame + arguments[0].encode())


@virtual
async def test_a_process_is_a_task_with_a_channel_and_an_end(
    clock: VirtualClock, random: Random
) -> None:
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


@virtual
async def test_ticks_follow_the_virtual_clock_until_false(
    clock: VirtualClock, random: Random
) -> None:
    times: list[float] = []

    def tick() -> bool:
        times.append(clock.monotonic())
        return len(times) < 3

    SimulatedHost(clock, random).every(1.5, tick, "renewal")
    await clock.sleep(100)
    assert times == [1.5, 3.0, 4.5]


@virtual
async def test_a_full_disk_refuses_the_record_and_keeps_the_earlier_ones(
    clock: VirtualClock, random: Random, tmp_path: Path
) -> None:
    file = SimulatedHost(clock, random, disk_bytes=10).open_append(tmp_path / "segment")
    file.write(b"12345678")
    with pytest.raises(StorageFull, match="no room for 3 bytes after 8"):
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
def disk(root: Path) -> Iterator[Disk]:
    made = Disk(root)
    made.watch()
    yield made
    made.close()


def test_what_was_not_synced_is_there_in_part(root: Path, disk: Disk) -> None:
    left = set()
    for seed in range(20):
        file = AppendFile(root / f"{seed}.ledger")
        file.write(b"durable ")
        file.sync()
        file.write(b"not yet")
        file.close()
        disk.cut(Random(seed))
        content = (root / f"{seed}.ledger").read_bytes()
        assert b"durable not yet".startswith(content) and content.startswith(b"durable ")
        left.add(len(content))
    assert len(left) > 3, "a prefix of any length"


def test_a_file_whose_directory_and_content_were_never_synced_is_gone(
    root: Path, disk: Disk
) -> None:
    (root / "new").mkdir()
    (root / "new" / "file").write_bytes(b"content")
    assert disk.cut(Random(0)) == {"new/file"}
    assert list(root.iterdir()) == []


def test_a_rename_counts_once_its_directory_was_synced(root: Path, disk: Disk) -> None:
    replace_file(root / "record", b"old")
    scratch = root / "scratch"
    scratch.write_bytes(b"new")
    sync(scratch)
    scratch.rename(root / "record")
    disk.cut(Random(0))
    assert (root / "record").read_bytes() == b"old"
    replace_file(root / "record", b"new")
    disk.cut(Random(0))
    assert (root / "record").read_bytes() == b"new"


def test_a_removal_counts_once_its_directory_was_synced(root: Path, disk: Disk) -> None:
    replace_file(root / "a", b"a")
    replace_file(root / "b", b"b")
    (root / "a").unlink()
    sync(root)
    (root / "b").unlink()
    disk.cut(Random(0))
    assert [path.name for path in root.iterdir()] == ["b"]


def test_a_directory_that_was_renamed_brings_what_was_synced_in_it(root: Path, disk: Disk) -> None:
    (root / "scratch").mkdir()
    replace_file(root / "scratch" / "weights", b"w")
    (root / "scratch").rename(root / "step-1")
    sync(root)
    disk.cut(Random(0))
    assert (root / "step-1" / "weights").read_bytes() == b"w"
    assert not (root / "scratch").exists()


def test_a_link_to_what_is_not_there_yet_stays_one(root: Path, disk: Disk) -> None:
    (root / "store").symlink_to(root / "shared")
    sync(root)
    sync(root)
    disk.cut(Random(0))
    assert (root / "store").is_symlink()


def test_a_disk_that_lies_loses_what_it_said_was_synced(root: Path, disk: Disk) -> None:
    chunks = ChunkStore(root / "store")
    before = chunks.write(b"before")
    replace_file(root / "notes", b"old")
    disk.lies = lambda path: path.startswith("store")
    after = chunks.write(b"after")
    replace_file(root / "notes", b"new")
    lost = disk.cut(Random(0))
    assert chunks.has(before) and not chunks.has(after)
    assert [name for name in lost if name.endswith(after)]
    assert (root / "notes").read_bytes() == b"new"
    chunks.write(b"after")
    disk.cut(Random(0))
    assert chunks.has(after), "the next disk tells the truth"


def test_times_outlast_a_power_cut(root: Path, disk: Disk) -> None:
    (root / "file").write_bytes(b"longer")
    os.utime(root / "file", (1000, 2000))
    sync(root)
    disk.cut(Random(3))
    assert (root / "file").stat().st_mtime == 2000


@pytest.mark.parametrize("room", [0, 5])
def test_a_full_disk_refuses_every_writer(root: Path, disk: Disk, room: int) -> None:
    file = AppendFile(root / "ledger")
    file.write(b"abc")
    disk.room = room
    with disk.writing():
        with pytest.raises(StorageFull):
            file.write(b"defghi")
        with pytest.raises(StorageFull):
            ChunkStore(root / "store").write(b"a chunk of something")
        with pytest.raises(OSError) as refused:
            (root / "plain").write_bytes(b"more than there is room for")
        assert refused.value.errno == errno.EFBIG
    assert (root / "ledger").read_bytes() == b"abc", "a part of it was written, and taken back"
    file.write(b"def")
    file.close()
    assert (root / "ledger").read_bytes() == b"abcdef"


def test_a_flip_is_one_bit_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(16))
    flip(path, 5, 6)
    assert path.read_bytes() == bytes(5) + b"\x40" + bytes(10)


def test_a_misdirected_write_lies_over_a_part_of_another_file(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_bytes(b"0123456789")
    other.write_bytes(b"abcdef")
    misdirect(one, other, 3)
    assert other.read_bytes() == b"abc789" and one.read_bytes() == b"0123456789"
    misdirect(other, one, 2)
    assert one.read_bytes() == b"01abc78989"


def test_it_is_known_whether_a_damaged_file_was_read_since(root: Path, tmp_path: Path) -> None:
    store = ChunkStore(root / "store")
    digest = store.write(b"something that is kept")
    when = store.path(digest).stat().st_mtime_ns
    spoiler = Spoiler(root, tmp_path / "links", Random(1))
    damage = spoiler.spoil()
    assert damage is not None and damage.path.endswith(digest)
    assert spoiler.spoil() is None, "a file is damaged once"
    assert not damage.read and store.path(digest).stat().st_mtime_ns == when
    store.path(digest).rename(root / "aside")
    (root / "aside").read_bytes()
    assert damage.read
