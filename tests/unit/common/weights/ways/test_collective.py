"""Versions that are broadcast: to all who ask in time, whole or in part, and to nobody else."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from meshrl.common.api.trainer import BroadcastPlace, Gather
from meshrl.common.base.errors import PeerLost, StorageFull
from meshrl.common.weights.ways import broadcasting
from tests.load import scaled
from tests.unit.common.weights.ways.bench import MANIFEST, benched

MEMBER = "tests.unit.common.weights.ways.member"


@pytest.fixture(autouse=True)
def window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give receivers of a busy machine longer to ask, within the deadline of their call."""
    monkeypatch.setattr(broadcasting, "WINDOW_S", min(3.0, scaled(broadcasting.WINDOW_S)))


async def test_all_hosts_that_ask_get_every_chunk(tmp_path: Path) -> None:
    async with benched(tmp_path) as bench:
        hosts = [await bench.receiver(f"host{n}") for n in range(3)]
        await asyncio.gather(*(way.receive(bench.version, into) for way, into in hosts))
        assert all(bench.whole(into) for _, into in hosts)
        assert bench.mesh.telemetry.counters["broadcasts"] == 1
        assert bench.mesh.telemetry.counters["broadcast_bytes"] == bench.version.bytes
        left = [p.name for _, into in hosts for p in into.directory.rglob(".*.*")]
        assert not left, "files in the making"


async def test_one_process_of_a_host_receives_and_the_others_find_it_there(tmp_path: Path) -> None:
    async with benched(tmp_path) as bench:
        ways = [await bench.receiver("far", f"engine{n}") for n in range(3)]
        await asyncio.gather(*(way.receive(bench.version, into) for way, into in ways))
        assert bench.whole(ways[0][1]) and bench.core.asked == 1


async def test_each_host_is_sent_what_another_lacks_and_keeps_what_it_lacks(tmp_path: Path) -> None:
    async with benched(tmp_path) as bench:
        (one, ones), (other, others) = await bench.receiver("one_"), await bench.receiver("other")
        digests = list(bench.version.lacking)
        some = {d: bench.version.lacking[d] for d in digests[:3]}
        rest = {d: bench.version.lacking[d] for d in digests[2:]}
        await asyncio.gather(
            one.receive(replace(bench.version, lacking=some), ones),
            other.receive(replace(bench.version, lacking=rest), others),
        )
        assert [ones.has(d) for d in digests] == [True, True, True, False, False]
        assert [others.has(d) for d in digests] == [False, False, True, True, True]


async def test_old_chunks_make_room_in_the_hosts_cache(tmp_path: Path) -> None:
    async with benched(tmp_path) as bench:
        size = bench.version.bytes
        way, into = await bench.receiver("far", chunks_bytes=size + 1000)
        old = into.write(b"old" * 5000)
        await way.receive(bench.version, into)
        assert bench.whole(into) and not into.has(old)
        small, nothing = await bench.receiver("small", chunks_bytes=size - 1)
        with pytest.raises(StorageFull):
            await small.receive(bench.version, nothing)
        assert bench.core.asked == 1, "nobody waits for one that has no room"


async def test_another_version_than_the_published_one_is_left_to_other_ways(tmp_path: Path) -> None:
    async with benched(tmp_path) as bench:
        way, into = await bench.receiver("far")
        await way.receive(replace(bench.version, manifest="6" * 32), into)
        assert not any(into.has(d) for d in bench.version.lacking)
        await bench.broadcasts.publish("6" * 32)
        await way.receive(replace(bench.version, manifest="6" * 32), into)
        assert bench.whole(into)


async def test_who_comes_when_a_broadcast_has_begun_is_told_at_once(tmp_path: Path) -> None:
    async with benched(tmp_path) as bench:
        asked = Gather(MANIFEST, dict(bench.version.lacking))
        first = await bench.broadcasts.gather(asked)  # nobody comes to meet it: it still waits
        assert first.where and first.members == 2
        assert await bench.broadcasts.gather(asked) == BroadcastPlace()


async def test_what_the_core_does_not_have_is_left_to_other_ways(tmp_path: Path) -> None:
    async with benched(tmp_path) as bench:
        lost, *there = bench.version.lacking
        bench.chunks.path(lost).unlink()
        way, into = await bench.receiver("far")
        await way.receive(bench.version, into)
        assert [into.has(d) for d in (lost, *there)] == [False] + [True] * len(there)
        for digest in there:
            bench.chunks.path(digest).unlink()
        empty, nothing = await bench.receiver("farther")
        await empty.receive(bench.version, nothing)
        assert not any(nothing.has(d) for d in bench.version.lacking)


async def test_a_chunk_that_is_damaged_at_the_core_is_not_kept(tmp_path: Path) -> None:
    async with benched(tmp_path) as bench:
        wrong, *right = bench.version.lacking
        path = bench.chunks.path(wrong)
        path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
        way, into = await bench.receiver("far")
        await way.receive(bench.version, into)
        assert not into.has(wrong) and all(into.has(d) for d in right)


@pytest.mark.deep
async def test_a_member_that_is_killed_ends_it_for_all_and_what_came_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the next attempt, in a group of another name, brings the rest."""
    async with benched(tmp_path, [2 << 20] * 16) as bench:  # more than sockets hold
        way, into = await bench.receiver("far")
        root = Path(__file__).parents[5]
        stranger = await asyncio.create_subprocess_exec(
            sys.executable, "-m", MEMBER, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert stranger.stdin is not None and stranger.stdout is not None
        assert await stranger.stdout.readline() == b"ready\n"  # it takes seconds to load torch
        asked = Gather(MANIFEST, dict(bench.version.lacking))
        joining = asyncio.create_task(bench.broadcasts.gather(asked))
        receiving = asyncio.create_task(way.receive(bench.version, into))
        told = await joining
        assert told.members == 3
        stranger.stdin.write(json.dumps(asdict(told)).encode() + b"\n")
        await stranger.stdin.drain()
        with pytest.raises(PeerLost):
            await receiving
        assert await stranger.wait() == -9
        assert not bench.whole(into)
        while bench.broadcasts._tasks:  # the core finds out by itself
            await asyncio.sleep(0.05)
        assert bench.mesh.telemetry.counters["broadcasts_failed"] == 1
        await way.receive(bench.version, into)
        assert bench.whole(into)


async def test_a_member_that_never_comes_keeps_the_others_for_a_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broadcasting, "WAIT_S", min(5.0, scaled(1.0)))
    async with benched(tmp_path) as bench:
        way, into = await bench.receiver("far")
        asked = Gather(MANIFEST, dict(bench.version.lacking))
        absent = asyncio.create_task(bench.broadcasts.gather(asked))
        async with asyncio.timeout(scaled(20.0)):
            with pytest.raises(PeerLost):
                await way.receive(bench.version, into)
            assert (await absent).members == 3


async def test_a_core_that_ends_ends_its_broadcast(tmp_path: Path) -> None:
    async with benched(tmp_path) as bench:
        asked = Gather(MANIFEST, dict(bench.version.lacking))
        told = asyncio.create_task(bench.broadcasts.gather(asked))
        await asyncio.sleep(0.05)
        await bench.broadcasts.stop()
        assert await told == BroadcastPlace()
