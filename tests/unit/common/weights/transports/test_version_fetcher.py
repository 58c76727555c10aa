"""Ways of bringing versions: chosen by speed, broadcast, completed by the plainest."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrl.common.api.trainer import BroadcastPlan, BroadcastRequest
from meshrl.common.base.errors import NotFound, PeerLost, StorageFull
from meshrl.common.state import events
from meshrl.common.weights.chunks.chunk_store import ChunkStore
from meshrl.common.weights.store.chunk_cache import VersionToFetch
from meshrl.common.weights.transports import broadcaster
from meshrl.common.weights.transports import version_fetcher as module
from meshrl.common.weights.transports.selector import (
    INITIAL_COOLDOWN_VERSIONS,
    MAX_COOLDOWN_VERSIONS,
    MIN_MEASURED_BYTES,
    MIN_PREDICTED_GAIN,
    TransportSelector,
)
from meshrl.common.weights.transports.version_fetcher import TRANSPORT_EVENT, VersionFetcher
from tests.load import scaled
from tests.unit.common.mesh.runtime.talking import until
from tests.unit.common.weights.transports.bench import MANIFEST, Bench, benched

SIZE = 1 << 30
WAYS = ["pull", "collective"]
MEMBER = "tests.unit.common.weights.transports.member"


class FromFolder:
    """A way: copies files of a folder, at a pace; it can be made to break off."""

    def __init__(self, name: str, source: ChunkStore, s_per_chunk: float = 0.0) -> None:
        self.name, self._source, self.s_per_chunk = name, source, s_per_chunk
        self.breaks_after, self.received = -1, 0

    async def publish(self, manifest: str) -> None:
        """The folder is there."""

    async def receive(self, version: VersionToFetch, target_store: ChunkStore) -> None:
        self.received += 1
        for number, digest in enumerate(version.missing):
            if number == self.breaks_after:
                raise PeerLost("a member was lost")
            await asyncio.sleep(self.s_per_chunk)
            target_store.write(self._source.read(digest))


def brought(bench: Bench, how: str = "auto") -> tuple[VersionFetcher, FromFolder, FromFolder]:
    plain, other = FromFolder("pull", bench.chunks), FromFolder("collective", bench.chunks)
    return VersionFetcher(bench.mesh, [plain, other], how), plain, other


@pytest.mark.parametrize("how", ["pull", "collective"])
async def test_the_way_that_the_job_names_is_taken(tmp_path: Path, how: str) -> None:
    async with benched(tmp_path) as bench:
        bringing, plain, other = brought(bench, how)
        for number in range(4):
            into = ChunkStore(tmp_path / f"into{number}")
            await bringing.fetch(bench.version, into)
            assert bench.whole(into)
        assert (plain.received, other.received) == ((4, 0) if how == "pull" else (0, 4))
        assert (bringing.last_report or {})["way"] == how


async def test_what_a_way_does_not_bring_comes_by_the_plainest(tmp_path: Path) -> None:
    async with benched(tmp_path) as bench:
        bringing, plain, other = brought(bench, "collective")
        other.breaks_after = 2
        into = ChunkStore(tmp_path / "into")
        await bringing.fetch(bench.version, into)
        assert bench.whole(into) and (plain.received, other.received) == (1, 1)
        told = bringing.last_report or {}
        assert "a member was lost" in told["verdict"] and told["way"] == "collective"
        (event,) = [e for e in await events.read_all(bench.state) if e.kind == TRANSPORT_EVENT]
        assert event.fields["verdict"] == told["verdict"] and event.fields["host"] == "one"


async def test_a_slow_network_keeps_to_pulling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FAST_BYTES_PER_S", 1e12)
    async with benched(tmp_path) as bench:
        bringing, _, other = brought(bench)
        for number in range(5):
            await bringing.fetch(bench.version, ChunkStore(tmp_path / f"into{number}"))
        assert other.received == 0


async def test_a_faster_way_is_found_and_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FAST_BYTES_PER_S", 1.0)
    async with benched(tmp_path) as bench:
        bringing, plain, other = brought(bench)
        plain.s_per_chunk = scaled(0.2)  # of five chunks; the other copies them within milliseconds
        for number in range(5):
            into = ChunkStore(tmp_path / f"into{number}")
            await bringing.fetch(bench.version, into)
            assert bench.whole(into)
        assert (plain.received, other.received) == (2, 3)
        assert (bringing.last_report or {})["verdict"].startswith("it took")
        ways = [
            e.fields["way"] for e in await events.read_all(bench.state) if e.kind == TRANSPORT_EVENT
        ]
        assert ways == ["pull", "collective"]


async def test_what_the_store_lacks_is_said_as_it_is(tmp_path: Path) -> None:
    async with benched(tmp_path) as bench:
        bringing, _, _ = brought(bench)
        bench.chunks.chunk_path(next(iter(bench.version.missing))).unlink()
        with pytest.raises(NotFound):
            await bringing.fetch(bench.version, ChunkStore(tmp_path / "into"))


def take(choosing: TransportSelector, rates: dict[str, float], size: int = SIZE) -> str:
    """One version, of which each way brings so many bytes a second; the way that was chosen."""
    choice = choosing.choose(size, WAYS)
    choosing.record_success(choice, size, size / rates[choice.transport])
    return choice.transport


def test_the_plainest_way_is_measured_before_another_is_tried() -> None:
    choosing, rates = TransportSelector(), {"pull": 1e9, "collective": 3e9}
    assert [take(choosing, rates) for _ in range(6)] == ["pull"] * 2 + ["collective"] * 4
    assert choosing.current_transport == "collective"
    assert choosing.rates_bytes_per_s()["collective"] == 3e9


def test_a_change_that_does_not_pay_is_undone_and_tried_ever_more_rarely() -> None:
    choosing, rates = TransportSelector(), {"pull": 1e9, "collective": 1e9}
    taken = [take(choosing, rates) for _ in range(400)]
    assert taken.count("collective") == 1 and choosing.current_transport in ("", "pull")
    choosing = TransportSelector()
    tries = []
    for number in range(2000):
        choice = choosing.choose(SIZE, WAYS)
        if choice.replaced_transport:
            tries.append(number)
            choosing.record_failure(choice, "a member was lost")
        else:
            choosing.record_success(choice, SIZE, 1.0)
    rests = [later - earlier for earlier, later in pairwise(tries)]
    assert (
        rests[0] == INITIAL_COOLDOWN_VERSIONS + 1
        and rests == sorted(rests)
        and rests[-1] == MAX_COOLDOWN_VERSIONS + 1
    )


def test_what_follows_is_told_with_figures() -> None:
    choosing = TransportSelector()
    for _ in range(2):
        first = choosing.choose(SIZE, WAYS)
        assert choosing.record_success(first, SIZE, 2.0) == "it took 2 s"
    assert "not known yet" in first.reason
    change = choosing.choose(SIZE, WAYS)
    assert (change.transport, change.replaced_transport, change.replaced_predicted_s) == (
        "collective",
        "pull",
        2.0,
    )
    assert choosing.record_success(change, SIZE, 1.9) == "it took 1.9 s instead of 2 s: undone"
    stays = choosing.choose(SIZE, WAYS)
    assert stays.transport == "pull" and stays.predicted_s == 2.0
    assert "1.9 s by collective, which rests for 3 versions more" in stays.reason


def test_a_network_that_changes_is_followed() -> None:
    choosing = TransportSelector()
    for _ in range(10):
        take(choosing, {"pull": 1e9, "collective": 4e9})
    assert choosing.current_transport == "collective"
    slow = {"pull": 1e9, "collective": 0.1e9}
    taken = [take(choosing, slow) for _ in range(10)]
    assert taken[-1] == "pull" and choosing.current_transport == "pull"


def test_small_versions_and_single_ways_leave_no_choice() -> None:
    choosing = TransportSelector()
    for _ in range(5):
        assert take(choosing, {"pull": 1e9, "collective": 9e9}, MIN_MEASURED_BYTES - 1) == "pull"
    assert not choosing.rates_bytes_per_s()
    assert "no other way" in choosing.choose(SIZE, ["pull"]).reason


@given(
    pull=st.floats(1e7, 1e10),
    collective=st.floats(1e7, 1e10),
    sizes=st.lists(st.integers(MIN_MEASURED_BYTES, 64 << 30), min_size=40, max_size=60),
)
def test_with_steady_rates_it_ends_within_the_gain_of_the_best_way(
    pull: float, collective: float, sizes: list[int]
) -> None:
    """Beside the one trial, which costs what that way takes."""
    choosing, rates = TransportSelector(), {"pull": pull, "collective": collective}
    taken = [take(choosing, rates, size) for size in sizes]
    settled = taken[10:]
    best = max(rates, key=lambda way: rates[way])
    if rates[best] * (1 - MIN_PREDICTED_GAIN) > min(rates.values()) * 1.0001:
        assert set(settled) == {best}
    assert len(set(settled)) == 1


@pytest.fixture(autouse=True)
def window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give receivers of a busy machine longer to ask, within the deadline of their call."""
    window_s = min(3.0, scaled(broadcaster.GROUPING_WINDOW_S))
    monkeypatch.setattr(broadcaster, "GROUPING_WINDOW_S", window_s)


async def test_all_hosts_that_ask_get_every_chunk(tmp_path: Path) -> None:
    async with benched(tmp_path) as bench:
        hosts = [await bench.receiver(f"host{n}") for n in range(3)]
        await asyncio.gather(*(way.receive(bench.version, into) for way, into in hosts))
        assert all(bench.whole(into) for _, into in hosts)
        assert bench.mesh.telemetry.counters["broadcasts"] == 1
        assert bench.mesh.telemetry.counters["broadcast_bytes"] == bench.version.missing_bytes
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
        digests = list(bench.version.missing)
        some = {d: bench.version.missing[d] for d in digests[:3]}
        rest = {d: bench.version.missing[d] for d in digests[2:]}
        await asyncio.gather(
            one.receive(replace(bench.version, missing=some), ones),
            other.receive(replace(bench.version, missing=rest), others),
        )
        assert [ones.has(d) for d in digests] == [True, True, True, False, False]
        assert [others.has(d) for d in digests] == [False, False, True, True, True]


async def test_old_chunks_make_room_in_the_hosts_cache(tmp_path: Path) -> None:
    async with benched(tmp_path) as bench:
        size = bench.version.missing_bytes
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
        await way.receive(replace(bench.version, manifest_digest="6" * 32), into)
        assert not any(into.has(d) for d in bench.version.missing)
        await bench.broadcasts.set_version("6" * 32)
        await way.receive(replace(bench.version, manifest_digest="6" * 32), into)
        assert bench.whole(into)


async def test_who_comes_when_a_broadcast_has_begun_is_told_at_once(tmp_path: Path) -> None:
    async with benched(tmp_path) as bench:
        asked = BroadcastRequest(MANIFEST, dict(bench.version.missing))
        first = await bench.broadcasts.join_broadcast(
            asked
        )  # nobody comes to meet it: it still waits
        assert first.rendezvous_url and first.world_size == 2
        assert await bench.broadcasts.join_broadcast(asked) == BroadcastPlan()


async def test_what_the_core_does_not_have_is_left_to_other_ways(tmp_path: Path) -> None:
    async with benched(tmp_path) as bench:
        lost, *there = bench.version.missing
        bench.chunks.chunk_path(lost).unlink()
        way, into = await bench.receiver("far")
        await way.receive(bench.version, into)
        assert [into.has(d) for d in (lost, *there)] == [False] + [True] * len(there)
        for digest in there:
            bench.chunks.chunk_path(digest).unlink()
        empty, nothing = await bench.receiver("farther")
        await empty.receive(bench.version, nothing)
        assert not any(nothing.has(d) for d in bench.version.missing)


async def test_a_chunk_that_is_damaged_at_the_core_is_not_kept(tmp_path: Path) -> None:
    async with benched(tmp_path) as bench:
        wrong, *right = bench.version.missing
        path = bench.chunks.chunk_path(wrong)
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
        asked = BroadcastRequest(MANIFEST, dict(bench.version.missing))
        joining = asyncio.create_task(bench.broadcasts.join_broadcast(asked))
        receiving = asyncio.create_task(way.receive(bench.version, into))
        told = await joining
        assert told.world_size == 3
        stranger.stdin.write(json.dumps(asdict(told)).encode() + b"\n")
        await stranger.stdin.drain()
        with pytest.raises(PeerLost):
            await receiving
        assert await stranger.wait() == -9
        assert not bench.whole(into)
        # the core finds out by itself
        await until(lambda: not bench.broadcasts._tasks)
        assert bench.mesh.telemetry.counters["broadcasts_failed"] == 1
        await way.receive(bench.version, into)
        assert bench.whole(into)


async def test_a_member_that_never_comes_keeps_the_others_for_a_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broadcaster, "MEMBER_TIMEOUT_S", min(5.0, scaled(1.0)))
    async with benched(tmp_path) as bench:
        way, into = await bench.receiver("far")
        asked = BroadcastRequest(MANIFEST, dict(bench.version.missing))
        absent = asyncio.create_task(bench.broadcasts.join_broadcast(asked))
        async with asyncio.timeout(scaled(20.0)):
            with pytest.raises(PeerLost):
                await way.receive(bench.version, into)
            assert (await absent).world_size == 3


async def test_a_core_that_ends_ends_its_broadcast(tmp_path: Path) -> None:
    async with benched(tmp_path) as bench:
        asked = BroadcastRequest(MANIFEST, dict(bench.version.missing))
        told = asyncio.create_task(bench.broadcasts.join_broadcast(asked))
        await asyncio.sleep(0.05)
        await bench.broadcasts.stop()
        assert await told == BroadcastPlan()
