"""Transports of versions: chosen by speed, broadcast, completed by a pull."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
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
from tests.unit.common.weights.transports.bench import MANIFEST, Bench, open_bench

SIZE = 1 << 30
TRANSPORTS = ["pull", "collective"]
MEMBER = "tests.unit.common.weights.transports.member"


class FolderTransport:
    """Transport that copies files of a folder at a given speed, and may fail after some."""

    def __init__(self, name: str, source: ChunkStore, s_per_chunk: float = 0.0) -> None:
        self.name, self._source, self.s_per_chunk = name, source, s_per_chunk
        self.fails_after, self.receive_count = -1, 0

    async def publish(self, manifest: str) -> None:
        """Do nothing: the folder is complete."""

    async def receive(self, version: VersionToFetch, target_store: ChunkStore) -> None:
        self.receive_count += 1
        for number, digest in enumerate(version.missing):
            if number == self.fails_after:
                raise PeerLost("a member was lost")
            await asyncio.sleep(self.s_per_chunk)
            target_store.write(self._source.read(digest))


def make_fetcher(
    bench: Bench, transport_name: str = "auto"
) -> tuple[VersionFetcher, FolderTransport, FolderTransport]:
    pull, collective = (
        FolderTransport("pull", bench.chunks),
        FolderTransport("collective", bench.chunks),
    )
    return VersionFetcher(bench.mesh, [pull, collective], transport_name), pull, collective


@pytest.mark.parametrize("transport_name", ["pull", "collective"])
async def test_transport_named_by_the_job_is_used(tmp_path: Path, transport_name: str) -> None:
    async with open_bench(tmp_path) as bench:
        fetcher, pull, collective = make_fetcher(bench, transport_name)
        for number in range(4):
            target = ChunkStore(tmp_path / f"into{number}")
            await fetcher.fetch(bench.version, target)
            assert bench.has_version(target)
        assert (pull.receive_count, collective.receive_count) == (
            (4, 0) if transport_name == "pull" else (0, 4)
        )
        assert (fetcher.last_report or {})["way"] == transport_name


async def test_chunks_that_a_transport_misses_are_pulled(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        fetcher, pull, collective = make_fetcher(bench, "collective")
        collective.fails_after = 2
        target = ChunkStore(tmp_path / "into")
        await fetcher.fetch(bench.version, target)
        assert bench.has_version(target) and (pull.receive_count, collective.receive_count) == (
            1,
            1,
        )
        report = fetcher.last_report or {}
        assert "a member was lost" in report["verdict"] and report["way"] == "collective"
        (event,) = [e for e in await events.read_all(bench.state) if e.kind == TRANSPORT_EVENT]
        assert event.fields["verdict"] == report["verdict"] and event.fields["host"] == "one"


async def test_slow_network_uses_only_pulls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FAST_BYTES_PER_S", 1e12)
    async with open_bench(tmp_path) as bench:
        fetcher, _, collective = make_fetcher(bench)
        for number in range(5):
            await fetcher.fetch(bench.version, ChunkStore(tmp_path / f"into{number}"))
        assert collective.receive_count == 0


async def test_faster_transport_is_found_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FAST_BYTES_PER_S", 1.0)
    async with open_bench(tmp_path) as bench:
        fetcher, pull, collective = make_fetcher(bench)
        # for five chunks; the other transport copies them within milliseconds
        pull.s_per_chunk = scaled(0.2)
        for number in range(5):
            target = ChunkStore(tmp_path / f"into{number}")
            await fetcher.fetch(bench.version, target)
            assert bench.has_version(target)
        assert (pull.receive_count, collective.receive_count) == (2, 3)
        assert (fetcher.last_report or {})["verdict"].startswith("it took")
        transports = [
            e.fields["way"] for e in await events.read_all(bench.state) if e.kind == TRANSPORT_EVENT
        ]
        assert transports == ["pull", "collective"]


async def test_chunk_missing_from_the_store_raises_not_found(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        fetcher, _, _ = make_fetcher(bench)
        bench.chunks.chunk_path(next(iter(bench.version.missing))).unlink()
        with pytest.raises(NotFound):
            await fetcher.fetch(bench.version, ChunkStore(tmp_path / "into"))


def run_choice(selector: TransportSelector, rates: dict[str, float], size: int = SIZE) -> str:
    """Choose a transport for one version, record its time, and return the choice."""
    choice = selector.choose(size, TRANSPORTS)
    selector.record_success(choice, size, size / rates[choice.transport])
    return choice.transport


def test_pull_is_measured_before_another_transport_is_tried() -> None:
    selector, rates = TransportSelector(), {"pull": 1e9, "collective": 3e9}
    assert [run_choice(selector, rates) for _ in range(6)] == ["pull"] * 2 + ["collective"] * 4
    assert selector.current_transport == "collective"
    assert selector.rates_bytes_per_s()["collective"] == 3e9


def test_unprofitable_change_is_undone_and_retried_ever_more_rarely() -> None:
    selector, rates = TransportSelector(), {"pull": 1e9, "collective": 1e9}
    choices = [run_choice(selector, rates) for _ in range(400)]
    assert choices.count("collective") == 1 and selector.current_transport in ("", "pull")
    selector = TransportSelector()
    retried_at = []
    for number in range(2000):
        choice = selector.choose(SIZE, TRANSPORTS)
        if choice.replaced_transport:
            retried_at.append(number)
            selector.record_failure(choice, "a member was lost")
        else:
            selector.record_success(choice, SIZE, 1.0)
    cooldowns = [later - earlier for earlier, later in pairwise(retried_at)]
    assert (
        cooldowns[0] == INITIAL_COOLDOWN_VERSIONS + 1
        and cooldowns == sorted(cooldowns)
        and cooldowns[-1] == MAX_COOLDOWN_VERSIONS + 1
    )


def test_reasons_and_verdicts_have_figures() -> None:
    selector = TransportSelector()
    for _ in range(2):
        first = selector.choose(SIZE, TRANSPORTS)
        assert selector.record_success(first, SIZE, 2.0) == "it took 2 s"
    assert "is unknown" in first.reason
    change = selector.choose(SIZE, TRANSPORTS)
    assert (change.transport, change.replaced_transport, change.replaced_predicted_s) == (
        "collective",
        "pull",
        2.0,
    )
    assert selector.record_success(change, SIZE, 1.9) == "it took 1.9 s instead of 2 s: undone"
    next_choice = selector.choose(SIZE, TRANSPORTS)
    assert next_choice.transport == "pull" and next_choice.predicted_s == 2.0
    assert "1.9 s by collective, which is paused for 3 more versions" in next_choice.reason


def test_selector_follows_a_changed_network() -> None:
    selector = TransportSelector()
    for _ in range(10):
        run_choice(selector, {"pull": 1e9, "collective": 4e9})
    assert selector.current_transport == "collective"
    slow = {"pull": 1e9, "collective": 0.1e9}
    choices = [run_choice(selector, slow) for _ in range(10)]
    assert choices[-1] == "pull" and selector.current_transport == "pull"


def test_small_versions_and_single_transports_leave_no_choice() -> None:
    selector = TransportSelector()
    for _ in range(5):
        assert (
            run_choice(selector, {"pull": 1e9, "collective": 9e9}, MIN_MEASURED_BYTES - 1) == "pull"
        )
    assert not selector.rates_bytes_per_s()
    assert "no other transport" in selector.choose(SIZE, ["pull"]).reason


@settings(max_examples=40)
@given(
    pull=st.floats(1e7, 1e10),
    collective=st.floats(1e7, 1e10),
    sizes=st.lists(st.integers(MIN_MEASURED_BYTES, 64 << 30), min_size=40, max_size=60),
)
def test_selector_settles_near_the_best_transport_under_steady_rates(
    pull: float, collective: float, sizes: list[int]
) -> None:
    selector, rates = TransportSelector(), {"pull": pull, "collective": collective}
    choices = [run_choice(selector, rates, size) for size in sizes]
    later_choices = choices[10:]
    fastest = max(rates, key=lambda transport: rates[transport])
    if rates[fastest] * (1 - MIN_PREDICTED_GAIN) > min(rates.values()) * 1.0001:
        assert set(later_choices) == {fastest}
    assert len(set(later_choices)) == 1


@pytest.fixture(autouse=True)
def window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give receivers of a busy machine longer to ask, within the deadline of their call."""
    window_s = min(3.0, scaled(broadcaster.GROUPING_WINDOW_S))
    monkeypatch.setattr(broadcaster, "GROUPING_WINDOW_S", window_s)


async def test_all_requesting_hosts_receive_every_chunk(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        hosts = [await bench.receiver(f"host{n}") for n in range(3)]
        await asyncio.gather(
            *(transport.receive(bench.version, target) for transport, target in hosts)
        )
        assert all(bench.has_version(target) for _, target in hosts)
        assert bench.mesh.telemetry.counters["broadcasts"] == 1
        assert bench.mesh.telemetry.counters["broadcast_bytes"] == bench.version.missing_bytes
        partial_files = [p.name for _, target in hosts for p in target.directory.rglob(".*.*")]
        assert not partial_files, "partial files are left"


async def test_one_process_per_host_receives_the_broadcast(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        transports = [await bench.receiver("far", f"engine{n}") for n in range(3)]
        await asyncio.gather(
            *(transport.receive(bench.version, target) for transport, target in transports)
        )
        assert bench.has_version(transports[0][1]) and bench.core.request_count == 1


async def test_each_host_stores_only_its_missing_chunks(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        (one, one_target), (other, other_target) = (
            await bench.receiver("one_"),
            await bench.receiver("other"),
        )
        digests = list(bench.version.missing)
        some = {d: bench.version.missing[d] for d in digests[:3]}
        rest = {d: bench.version.missing[d] for d in digests[2:]}
        await asyncio.gather(
            one.receive(replace(bench.version, missing=some), one_target),
            other.receive(replace(bench.version, missing=rest), other_target),
        )
        assert [one_target.has(d) for d in digests] == [True, True, True, False, False]
        assert [other_target.has(d) for d in digests] == [False, False, True, True, True]


async def test_old_chunks_are_evicted_for_a_broadcast(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        size = bench.version.missing_bytes
        transport, target = await bench.receiver("far", chunks_bytes=size + 1000)
        old = target.write(b"old" * 5000)
        await transport.receive(bench.version, target)
        assert bench.has_version(target) and not target.has(old)
        small, empty_target = await bench.receiver("small", chunks_bytes=size - 1)
        with pytest.raises(StorageFull):
            await small.receive(bench.version, empty_target)
        assert bench.core.request_count == 1, "the core does not wait for a host without space"


async def test_unpublished_version_is_left_to_other_transports(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        transport, target = await bench.receiver("far")
        await transport.receive(replace(bench.version, manifest_digest="6" * 32), target)
        assert not any(target.has(d) for d in bench.version.missing)
        await bench.broadcaster.set_version("6" * 32)
        await transport.receive(replace(bench.version, manifest_digest="6" * 32), target)
        assert bench.has_version(target)


async def test_late_receiver_is_rejected_at_once(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        request = BroadcastRequest(MANIFEST, dict(bench.version.missing))
        # no receiver joins: the broadcast still waits
        first = await bench.broadcaster.join_broadcast(request)
        assert first.rendezvous_url and first.world_size == 2
        assert await bench.broadcaster.join_broadcast(request) == BroadcastPlan()


async def test_chunks_missing_at_the_core_are_left_to_other_transports(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        lost, *present = bench.version.missing
        bench.chunks.chunk_path(lost).unlink()
        transport, target = await bench.receiver("far")
        await transport.receive(bench.version, target)
        assert [target.has(d) for d in (lost, *present)] == [False] + [True] * len(present)
        for digest in present:
            bench.chunks.chunk_path(digest).unlink()
        empty, empty_target = await bench.receiver("farther")
        await empty.receive(bench.version, empty_target)
        assert not any(empty_target.has(d) for d in bench.version.missing)


async def test_chunk_corrupt_at_the_core_is_not_stored(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        corrupt_digest, *valid_digests = bench.version.missing
        path = bench.chunks.chunk_path(corrupt_digest)
        path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
        transport, target = await bench.receiver("far")
        await transport.receive(bench.version, target)
        assert not target.has(corrupt_digest) and all(target.has(d) for d in valid_digests)


@pytest.mark.deep
async def test_killed_member_ends_the_broadcast_and_received_chunks_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the next attempt, in a new group, fetches the rest."""
    async with open_bench(tmp_path, [2 << 20] * 16) as bench:  # more than socket buffers hold
        transport, target = await bench.receiver("far")
        root = Path(__file__).parents[5]
        member = await asyncio.create_subprocess_exec(
            sys.executable, "-m", MEMBER, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert member.stdin is not None and member.stdout is not None
        assert await member.stdout.readline() == b"ready\n"  # it takes seconds to load torch
        request = BroadcastRequest(MANIFEST, dict(bench.version.missing))
        joining = asyncio.create_task(bench.broadcaster.join_broadcast(request))
        receiving = asyncio.create_task(transport.receive(bench.version, target))
        plan = await joining
        assert plan.world_size == 3
        member.stdin.write(json.dumps(asdict(plan)).encode() + b"\n")
        await member.stdin.drain()
        with pytest.raises(PeerLost):
            await receiving
        assert await member.wait() == -9
        assert not bench.has_version(target)
        # the core detects the failure by itself
        await until(lambda: not bench.broadcaster._tasks)
        assert bench.mesh.telemetry.counters["broadcasts_failed"] == 1
        await transport.receive(bench.version, target)
        assert bench.has_version(target)


async def test_wait_for_a_missing_member_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broadcaster, "MEMBER_TIMEOUT_S", min(5.0, scaled(1.0)))
    async with open_bench(tmp_path) as bench:
        transport, target = await bench.receiver("far")
        request = BroadcastRequest(MANIFEST, dict(bench.version.missing))
        pending = asyncio.create_task(bench.broadcaster.join_broadcast(request))
        async with asyncio.timeout(scaled(20.0)):
            with pytest.raises(PeerLost):
                await transport.receive(bench.version, target)
            assert (await pending).world_size == 3


async def test_stopping_core_ends_its_broadcast(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        request = BroadcastRequest(MANIFEST, dict(bench.version.missing))
        pending = asyncio.create_task(bench.broadcaster.join_broadcast(request))
        await asyncio.sleep(0.05)
        await bench.broadcaster.stop()
        assert await pending == BroadcastPlan()
