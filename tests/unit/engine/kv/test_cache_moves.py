"""Cache moves of sessions between engine processes over a faulty network, under virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loadtests.measuring.meshed import own_keys, unrenewed
from meshrl.common.api.engine import (
    AttachStream,
    CacheFrame,
    CacheHeader,
    CacheMove,
    CacheMoveResult,
    ChunkLookup,
    Engine,
    SamplingParams,
    SubmitRequests,
    TokenBatch,
)
from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import BadMessage, PeerLost
from meshrl.common.base.random import Random
from meshrl.common.generation.prefix_loading import CHUNK_TOKENS
from meshrl.common.mesh.runtime.dependencies import MeshDependencies
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.state import registry
from meshrl.common.state.registry import RegistryEntry
from meshrl.common.weights.bulk.port import serve_chunks
from meshrl.services.engine.kv import peers as asking
from meshrl.services.engine.kv.cache_moves import (
    MOVE_TIMEOUT_S,
    CacheMoves,
    _assemble_chunks,
    _check_head,
    _ReceivedCache,
)
from meshrl.services.engine.kv.chunk_files import ChunkHeader, compute_chunk_names, compute_domain
from meshrl.services.engine.kv.host_cache import HostCache
from meshrl.services.engine.kv.kv_tier import KVTier
from meshrl.services.engine.kv.peers import MAX_EMPTY_ANSWERS, QUERY_EVERY, PeerEngines
from meshrl.services.engine.service import EngineService
from meshrl.sim.engines.simulated_engine import SimulatedEngine
from meshrl.sim.redis.simulated_state import open_simulated_state
from meshrl.sim.virtual_loop import VirtualClock, run_virtual
from meshrl.sim.virtual_network import MemoryNetwork, MemoryTransport
from tests.load import scaled
from tests.simulated_host import SimulatedHost
from tests.stories import story_on
from tests.unit.common.generation.engines_under_test import ManualClock, built_in, decoder
from tests.unit.common.generation.test_builtin_engine import words
from tests.unit.engine.kv.test_host_cache import raise_error

SHARD = "rollout/job/0"
SESSION = 7
SLOTS = 4
STEP_S = 0.01
Story = Callable[["Bench"], Coroutine[Any, Any, None]]


class Bench:
    """Shard with two engines, both at version 0 of one manifest."""

    def __init__(self, clock: VirtualClock, random: Random) -> None:
        self.clock, self.random = clock, random
        self.network = MemoryNetwork(clock, random.child("network"))
        self.state = open_simulated_state(clock)
        self.shard = self._mesh(SHARD)
        self.engines = {name: built_in("eager", SLOTS, 700) for name in ("engine/a", "engine/b")}
        self.services = {name: self._service(name) for name in self.engines}
        self.turns = 0
        self._tasks: list[asyncio.Task[Any]] = []
        self._flushes: dict[int, list[TokenBatch]] = {}
        self._over: dict[int, asyncio.Future[None]] = {}

    def _mesh(self, name: str) -> Mesh:
        return Mesh(
            name,
            name.partition("/")[0],
            MeshDependencies(
                state=self.state,
                transport=MemoryTransport(self.network, f"mem://{name}"),
                clock=self.clock,
                random=self.random.child(name),
                host=SimulatedHost(self.clock, self.random.child("host " + name)),
            ),
        )

    def _service(self, name: str) -> EngineService:
        service = EngineService(self._mesh(name), self.engines[name], lambda action: action())
        service.cache_moves.frame_bytes = 3_000
        return service

    async def start(self) -> None:
        await self.shard.join(None)
        for name, service in self.services.items():
            await service.mesh.join(service)
            self._begin(self._drive(service))
            self._begin(self._listen(name))
            await service.weights.update_weights(decoder().state_dict(), 0, "manifest")
        await self.clock.sleep(0.1)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(work))

    async def _drive(self, service: EngineService) -> None:
        while True:
            service.run_once()
            await self.clock.sleep(STEP_S)

    async def _listen(self, name: str) -> None:
        attach = AttachStream(SHARD, self.shard.incarnation)
        with suppress(PeerLost):
            async for flush in self.shard.ref(name).stream(Engine.attach, attach):
                for request, finish in zip(
                    flush.request_ids.tolist(), flush.finish_reasons.tolist(), strict=True
                ):
                    self._flushes[request].append(flush)
                    if finish:
                        self._over[request].set_result(None)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def turn(self, name: str, context: list[int]) -> tuple[list[int], list[float]]:
        """Return tokens and log-probabilities of the session's next turn on an engine."""
        self.turns += 1
        request = self.turns
        self._flushes[request] = []
        self._over[request] = asyncio.get_running_loop().create_future()
        one = {k: np.array([v]) for k, v in (("request_ids", request), ("sessions", SESSION))}
        await self.shard.ref(name).call(
            Engine.submit,
            SubmitRequests(
                owner=SHARD,
                incarnation=self.shard.incarnation,
                lengths=np.array([len(context)], np.int32),
                tokens=np.array(context, np.int32),
                turn_starts=np.array([len(context)], np.int32),
                max_new_tokens=np.array([5], np.int32),
                temperature=np.array([1.0], np.float32),
                top_p=np.array([1.0]),
                seeds=np.array([3]),
                sampling=SamplingParams([], []),
                ended_sessions=np.zeros(0, np.int64),
                **one,
            ),
        )
        await self._over[request]
        flushes = self._flushes[request]
        tokens = np.concatenate([flush.tokens for flush in flushes])
        return tokens.tolist(), np.concatenate([flush.logprobs for flush in flushes]).tolist()

    async def move(self, **more: Any) -> CacheMoveResult:
        move = CacheMove(**{"owner": SHARD, "session": SESSION, "source": "engine/a", **more})
        return await self.shard.ref("engine/b").call(Engine.move_cache, move)


def run_on_bench(story: Story) -> None:
    async def main(clock: VirtualClock, random: Random) -> None:
        bench = Bench(clock, random)
        await bench.start()
        try:
            await story(bench)
        finally:
            await bench.stop()

    run_virtual(main, limit_s=600.0)


async def run_first_turn(bench: Bench) -> list[int]:
    """Run a first turn at engine a and return the session's context after it."""
    context = words(1, 500)
    tokens, _ = await bench.turn("engine/a", context)
    return [*context, *tokens, 9]


def count_computed(bench: Bench, name: str) -> int:
    return bench.engines[name].tokens_computed


async def assert_recomputed(bench: Bench, context: list[int], at_least: int) -> None:
    """Check that the session's next turn succeeds at engine b, which computes that many tokens."""
    before = count_computed(bench, "engine/b")
    there = await bench.turn("engine/b", context)
    assert count_computed(bench, "engine/b") - before >= at_least
    here = await bench.turn("engine/a", context)
    assert there[0] == here[0]
    np.testing.assert_allclose(there[1], here[1], atol=2e-4)


@story_on(run_on_bench)
async def test_moved_session_continues_with_equal_results(bench: Bench) -> None:
    context = await run_first_turn(bench)
    moved = await bench.move()
    assert (moved.tokens, moved.is_complete) == (504, True)
    assert moved.size_bytes == 512 * bench.engines["engine/a"].cache_bytes_per_token
    assert 0 < moved.duration_s < 10.0
    before = count_computed(bench, "engine/b")
    there = await bench.turn("engine/b", context)
    assert count_computed(bench, "engine/b") - before == len(context) - 504 + 4
    assert there == await bench.turn("engine/a", context), "the source kept its copy"


@story_on(run_on_bench)
async def test_tokens_missing_at_the_source_are_recomputed(bench: Bench) -> None:
    context = await run_first_turn(bench)
    for nothing in (
        await bench.move(session=SESSION + 1),
        await bench.move(owner="rollout/9"),
    ):
        assert (nothing.tokens, nothing.size_bytes, nothing.is_complete) == (0, 0, False)
    bench.services["engine/b"].draining = True
    assert not (await bench.move()).is_complete
    bench.services["engine/b"].draining = False
    await assert_recomputed(bench, context, 500)


@story_on(run_on_bench)
async def test_engine_without_a_cache_sends_nothing(bench: Bench) -> None:
    simulated = SimulatedEngine(bench.clock, SLOTS, 100.0)
    service = EngineService(bench._mesh("engine/s"), simulated, lambda action: action())
    await service.mesh.join(service)
    bench._begin(bench._drive(service))
    assert (await bench.move(source="engine/s")).tokens == 0


@story_on(run_on_bench)
async def test_equal_versions_of_two_lineages_are_different_weights(bench: Bench) -> None:
    context = await run_first_turn(bench)
    await bench.services["engine/b"].weights.update_weights(
        decoder(1).state_dict(), 0, "another lineage"
    )
    assert (await bench.move()).tokens == 0
    await bench.services["engine/b"].weights.update_weights(decoder().state_dict(), 0, "manifest")
    await assert_recomputed(bench, context, 500)


@story_on(run_on_bench)
async def test_unknown_source_fails_the_move_within_seconds(bench: Bench) -> None:
    began = bench.clock.monotonic()
    assert (await bench.move(source="engine/gone")).tokens == 0
    assert bench.clock.monotonic() - began < 10.0


@story_on(run_on_bench)
async def test_request_computes_while_its_cache_arrives(bench: Bench) -> None:
    """Start a request before the cache arrives; tokens that it computes are not sent."""
    context = await run_first_turn(bench)
    expected = await bench.turn("engine/a", context)
    before = count_computed(bench, "engine/b")
    turn, move = bench.turn("engine/b", context), bench.move()
    there, moved = await asyncio.gather(turn, move)
    assert count_computed(bench, "engine/b") - before <= len(context) + 4
    assert moved.is_complete or not moved.tokens
    assert there[0] == expected[0]
    np.testing.assert_allclose(there[1], expected[1], atol=2e-4)


@story_on(run_on_bench)
async def test_source_that_dies_during_a_move_leaves_the_received_part(bench: Bench) -> None:
    context = await run_first_turn(bench)
    expected = await bench.turn("engine/a", context)
    later = asyncio.create_task(bench.move())
    while not has_received(bench):
        await bench.clock.sleep(STEP_S / 10)
    await bench.services["engine/a"].mesh.transport.close()
    moved = await later
    assert 0 < moved.tokens < 504 and not moved.is_complete
    before = count_computed(bench, "engine/b")
    there = await bench.turn("engine/b", context)
    beyond = 510 - (len(context) - 1)  # also received: the turn that the source had computed
    used = moved.tokens - beyond
    assert count_computed(bench, "engine/b") - before == len(context) - used + 4
    np.testing.assert_allclose(there[1], expected[1], atol=2e-4)
    assert there[0] == expected[0]


def has_received(bench: Bench) -> bool:
    """Return True if engine b has received a part of the session."""
    return any(
        load.received_bytes
        for load in bench.engines["engine/b"].scheduler.prefix_loads.offered_loads.values()
    )


@story_on(run_on_bench)
async def test_move_from_a_silent_source_times_out(bench: Bench) -> None:
    context = await run_first_turn(bench)
    later = asyncio.create_task(bench.move())
    while not has_received(bench):
        await bench.clock.sleep(STEP_S / 10)
    bench.network.partition("mem://engine/a", "mem://engine/b")
    began = bench.clock.monotonic()
    turn = asyncio.create_task(bench.turn("engine/b", context))
    await turn
    assert bench.clock.monotonic() - began < 5.0, "nobody waits for it"
    moved = await later
    assert bench.clock.monotonic() - began < MOVE_TIMEOUT_S
    assert 0 < moved.tokens < 504 and not moved.is_complete
    await assert_recomputed(bench, context, 0)


@story_on(run_on_bench)
async def test_cancelled_move_ends_at_both_engines(bench: Bench) -> None:
    context = await run_first_turn(bench)
    later = asyncio.create_task(bench.move())
    while not has_received(bench):
        await bench.clock.sleep(STEP_S / 10)
    later.cancel()
    await bench.clock.sleep(0.5)
    (load,) = bench.engines["engine/b"].scheduler.prefix_loads.offered_loads.values()
    assert load.is_finished and load.received_bytes
    assert bench.services["engine/a"].mesh._server.running_count == 1, "the shard's own stream"
    await assert_recomputed(bench, context, 1)


@story_on(run_on_bench)
async def test_move_of_a_computed_session_releases_the_source(bench: Bench) -> None:
    context = await run_first_turn(bench)
    await bench.turn("engine/b", context)
    moved = await bench.move()
    assert not moved.tokens or moved.tokens <= 504
    await bench.clock.sleep(0.5)
    assert bench.services["engine/a"].mesh._server.running_count == 1


@story_on(run_on_bench)
async def test_requests_continue_during_concurrent_moves(bench: Bench) -> None:
    context = await run_first_turn(bench)
    moves = asyncio.gather(*(bench.move() for _ in range(9)))
    concurrent_turn = await bench.turn("engine/b", context)
    assert (await bench.turn("engine/a", context))[0] == concurrent_turn[0]
    assert all(moved.size_bytes or not moved.is_complete for moved in await moves)


def test_frames_without_a_chunk_are_rejected() -> None:
    ten = np.zeros(10, np.uint8)

    def frame(content: Any = ten, **more: Any) -> CacheFrame:
        about = {"header": None, "start": 0, "end": 16, "size_bytes": 20, **more}
        return CacheFrame(content=content, **about)

    head = CacheHeader(np.zeros(16, np.int32), "layout", 0, 16, 0, "")
    for wrong in (
        [frame(np.zeros(21, np.uint8))],
        [frame(), frame(end=17)],
        [frame(), frame(), frame(size_bytes=1 << 40)],
        [frame(size_bytes=0)],
        [frame(ten.astype(np.int32)[:2])],
        [frame(), frame(np.zeros(0, np.uint8))],
        [frame(start=1)],
        [frame(end=CHUNK_TOKENS + 1)],
        [frame(header=head)],
    ):
        assert asyncio.run(is_rejected(wrong))
    for one in (frame(), frame(header=CacheHeader(np.zeros(16), "", 0, 16, 0, ""))):
        with pytest.raises(BadMessage):
            _check_head(one)


async def is_rejected(frames: list[CacheFrame]) -> bool:
    async def stream_frames() -> AsyncIterator[CacheFrame]:
        for frame in frames:
            yield frame

    try:
        async for _ in _assemble_chunks(stream_frames(), _ReceivedCache()):
            pass
    except BadMessage:
        return True
    return False


class SlowEngine:
    """Engine that copies a hundred chunks per second of a session that never ends."""

    def __init__(self) -> None:
        self.clock = ManualClock()

    def copy_session_cache(self, session: int, start: int, end: int) -> Any:
        self.clock.advance(0.002)
        return np.zeros(4, np.uint8)


def test_chunks_per_stop_follow_the_pause_limit() -> None:
    slow_engine = SlowEngine()
    unused: Any = lambda *_: ""  # noqa: E731
    moves = CacheMoves(slow_engine, slow_engine, slow_engine, *[unused] * 4)  # type: ignore[arg-type]
    for first in (1, 64):
        moves.chunks_per_stop = first
        for _ in range(6):
            starts = list(range(0, moves.chunks_per_stop * CHUNK_TOKENS, CHUNK_TOKENS))
            moves._copy_chunks(SESSION, 1 << 20, starts)
        assert abs(moves.chunks_per_stop - 5) <= 1


JOB, SECRET = "j", "ab" * 32
DOMAIN = compute_domain("weights", "", "layout", "keep")
NAMES = dict(enumerate(compute_chunk_names(DOMAIN, np.arange(128 * 12))))
CONTENT = np.arange(70_000, dtype=np.uint32).view(np.uint8)


class EmptyCache:
    """Cache of an engine that computes nothing."""

    cache_layout, cache_bytes_per_token, prefill_tokens_per_s = "layout", 100, 0.0

    def offload_all(self) -> None:
        """Offload nothing."""


@asynccontextmanager
async def two_hosts(tmp_path: Path) -> AsyncIterator[tuple[PeerEngines, KVTier, EngineService]]:
    """Yield the peers of one host, and the KV tier and the engine of the other."""
    clock = SystemClock()
    keys = own_keys()
    here, there = (unrenewed(f"engine/{name}", keys) for name in ("here", "there"))
    tier = KVTier("memory", tmp_path / "kv", 64 << 20, clock.wall)
    engine = SimulatedEngine(clock, 4)
    service = EngineService(there, engine, lambda action: action())
    cache = HostCache([tier], clock, EmptyCache(), "keep", lambda: None, raise_error)
    service.use_host_cache(cache)
    bulk = serve_chunks(there, cache.chunk_store, accepts_uploads=False)
    here.start()
    await there.join(service, bulk_address=bulk.address)
    entry = RegistryEntry(
        there.name,
        "engine",
        address=there.transport.address,
        bulk=bulk.address,
        host="another",
        incarnation=there.incarnation,
        stats={"job": JOB},
    )
    await registry.register(here.state, entry, 10**9)
    try:
        yield PeerEngines(here, JOB, asyncio.get_running_loop()), tier, service
    finally:
        bulk.close()
        await asyncio.to_thread(cache.close)
        await here.leave()
        await there.leave()


@pytest.fixture
def long_query_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a host of a busy machine longer to answer."""
    monkeypatch.setattr(
        asking, "QUERY_TIMEOUT_S", min(asking.CHUNK_TIMEOUT_S, scaled(asking.QUERY_TIMEOUT_S))
    )


def put(tier: KVTier, at: int) -> Path:
    head = ChunkHeader(128 * at, 128, 1.0, 0)
    assert tier.put(DOMAIN, NAMES[at], head, CONTENT)
    return tier.files.path(DOMAIN, NAMES[at])


async def test_chunks_of_another_host_are_found_and_read(
    long_query_timeout: None, tmp_path: Path
) -> None:
    async with two_hosts(tmp_path) as (peers, tier, _):
        for at in (3, 7):
            put(tier, at)
        assert sorted(await asyncio.to_thread(peers.look_up, DOMAIN, NAMES)) == [3, 7]
        for at in (7, 3, 7):
            found = await asyncio.to_thread(peers.read, DOMAIN, NAMES[at])
            assert found is not None
            tier_name, head, content = found
            assert (tier_name, head.start_token) == ("peers", 128 * at) and (
                content == CONTENT
            ).all()
        assert await asyncio.to_thread(peers.read, DOMAIN, NAMES[4]) is None


async def test_corrupt_or_missing_chunk_of_a_peer_is_a_miss(
    long_query_timeout: None, tmp_path: Path
) -> None:
    async with two_hosts(tmp_path) as (peers, tier, _):
        corrupt, missing = put(tier, 1), put(tier, 2)
        assert len(await asyncio.to_thread(peers.look_up, DOMAIN, NAMES)) == 2
        raw = bytearray(corrupt.read_bytes())
        raw[-1] ^= 1
        corrupt.write_bytes(raw)
        missing.unlink()
        for at in (1, 2):
            assert await asyncio.to_thread(peers.read, DOMAIN, NAMES[at]) is None


async def test_unresponsive_host_fails_the_lookup_within_seconds(tmp_path: Path) -> None:
    async with two_hosts(tmp_path) as (peers, tier, service):
        put(tier, 1)
        await service.mesh.transport.close()
        began = asyncio.get_running_loop().time()
        assert not await asyncio.to_thread(peers.look_up, DOMAIN, NAMES)
        assert asyncio.get_running_loop().time() - began < min(
            asking.LOOP_TIMEOUT_S - 1, scaled(5.0)
        )


async def test_engines_of_other_jobs_and_this_host_are_no_peers(tmp_path: Path) -> None:
    async with two_hosts(tmp_path) as (peers, tier, _):
        put(tier, 1)
        (entry,) = [e for e in await registry.list_entries(peers._mesh.state, "engine") if e.bulk]
        own = peers._mesh.settings.host
        assert peers._is_peer(entry)
        for other in ({"host": own}, {"stats": {"job": "k"}}, {"bulk": ""}, {"alive": False}):
            assert not peers._is_peer(replace(entry, **other))


async def test_lookups_become_rare_after_empty_answers(
    long_query_timeout: None, tmp_path: Path
) -> None:
    async with two_hosts(tmp_path) as (peers, _, service):
        lookup = 0

        def count(request: ChunkLookup) -> np.ndarray:
            nonlocal lookup
            lookup += 1
            return np.zeros(len(NAMES), np.bool_)

        assert service.host_cache is not None
        service.host_cache.look_up_chunks = count  # type: ignore[method-assign]
        for _ in range(MAX_EMPTY_ANSWERS + 4 * QUERY_EVERY):
            await asyncio.to_thread(peers.look_up, DOMAIN, NAMES)
        assert MAX_EMPTY_ANSWERS <= lookup <= MAX_EMPTY_ANSWERS + 5


async def test_invalid_domain_name_is_rejected(tmp_path: Path) -> None:
    async with two_hosts(tmp_path) as (peers, _, service):
        lookup = ChunkLookup("../../etc", np.zeros(16, np.uint8))
        with pytest.raises(BadMessage):
            await peers._mesh.ref(service.mesh.name).call(Engine.look_up_chunks, lookup)
