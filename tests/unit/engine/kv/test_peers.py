"""Prefixes on another host's shelves come over its bulk port, checked, or they are computed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from loadtests.measuring.meshed import own_keys, unrenewed
from meshrl.common.api.engine import Engine, Stored
from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import BadMessage
from meshrl.common.state import registry
from meshrl.common.state.registry import Entry
from meshrl.common.weights.bulk.port import serve
from meshrl.services.engine.kv import peers as asking
from meshrl.services.engine.kv.chunk_files import ChunkHead, domain_of, names_of
from meshrl.services.engine.kv.host_cache import HostCache
from meshrl.services.engine.kv.peers import FRUITLESS, SELDOM, Peers
from meshrl.services.engine.kv.shelf import KVTier
from meshrl.services.engine.service import EngineService
from meshrl.sim.engines.simulated import SimulatedEngine
from tests.load import scaled
from tests.unit.engine.kv.cached import raised

JOB, SECRET = "j", "ab" * 32
DOMAIN = domain_of("weights", "", "layout", "keep")
NAMES = dict(enumerate(names_of(DOMAIN, np.arange(128 * 12))))
CONTENT = np.arange(70_000, dtype=np.uint32).view(np.uint8)


class Cached:
    """The cache of an engine that computes nothing."""

    cache_layout, cache_bytes_per_token, prefill_tokens_per_s = "layout", 100, 0.0

    def keep_all(self) -> None:
        """There is nothing."""


@asynccontextmanager
async def two_hosts(tmp_path: Path) -> AsyncIterator[tuple[Peers, KVTier, EngineService]]:
    """What one host asks, and the shelf and the engine of the other."""
    clock = SystemClock()
    keys = own_keys()
    here, there = (unrenewed(f"engine/{name}", keys) for name in ("here", "there"))
    shelf = KVTier("memory", tmp_path / "kv", 64 << 20, clock.wall)
    engine = SimulatedEngine(clock, 4)
    service = EngineService(there, engine, lambda action: action())
    cache = HostCache([shelf], clock, Cached(), "keep", lambda: None, raised)
    service.use(cache)
    bulk = serve(there, cache.shelved, takes=False)
    here.start()
    await there.join(service, bulk_address=bulk.address)
    entry = Entry(
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
        yield Peers(here, JOB, asyncio.get_running_loop()), shelf, service
    finally:
        bulk.close()
        await asyncio.to_thread(cache.close)
        await here.leave()
        await there.leave()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a host of a busy machine longer to answer."""
    monkeypatch.setattr(asking, "ASK_S", min(asking.CHUNK_S, scaled(asking.ASK_S)))


def put(shelf: KVTier, at: int) -> Path:
    head = ChunkHead(128 * at, 128, 1.0, 0)
    assert shelf.put(DOMAIN, NAMES[at], head, CONTENT)
    return shelf.files.path(DOMAIN, NAMES[at])


async def test_what_another_host_has_is_found_and_read(patient: None, tmp_path: Path) -> None:
    async with two_hosts(tmp_path) as (peers, shelf, _):
        for at in (3, 7):
            put(shelf, at)
        assert sorted(await asyncio.to_thread(peers.look, DOMAIN, NAMES)) == [3, 7]
        for at in (7, 3, 7):
            found = await asyncio.to_thread(peers.read, DOMAIN, NAMES[at])
            assert found is not None
            tier, head, content = found
            assert (tier, head.start) == ("peers", 128 * at) and (content == CONTENT).all()
        assert await asyncio.to_thread(peers.read, DOMAIN, NAMES[4]) is None


async def test_what_is_damaged_or_gone_there_is_a_miss(patient: None, tmp_path: Path) -> None:
    async with two_hosts(tmp_path) as (peers, shelf, _):
        damaged, gone = put(shelf, 1), put(shelf, 2)
        assert len(await asyncio.to_thread(peers.look, DOMAIN, NAMES)) == 2
        raw = bytearray(damaged.read_bytes())
        raw[-1] ^= 1
        damaged.write_bytes(raw)
        gone.unlink()
        for at in (1, 2):
            assert await asyncio.to_thread(peers.read, DOMAIN, NAMES[at]) is None


async def test_a_host_that_does_not_answer_costs_a_second_and_no_error(tmp_path: Path) -> None:
    async with two_hosts(tmp_path) as (peers, shelf, service):
        put(shelf, 1)
        await service.mesh.transport.close()
        began = asyncio.get_running_loop().time()
        assert not await asyncio.to_thread(peers.look, DOMAIN, NAMES)
        assert asyncio.get_running_loop().time() - began < min(asking.WAIT_S - 1, scaled(5.0))


async def test_engines_of_other_jobs_and_of_this_host_are_not_asked(tmp_path: Path) -> None:
    async with two_hosts(tmp_path) as (peers, shelf, _):
        put(shelf, 1)
        (entry,) = [e for e in await registry.entries(peers._mesh.state, "engine") if e.bulk]
        own = peers._mesh.settings.host
        assert peers._serves(entry)
        for other in ({"host": own}, {"stats": {"job": "k"}}, {"bulk": ""}, {"alive": False}):
            assert not peers._serves(replace(entry, **other))


async def test_who_never_finds_anything_asks_seldom(patient: None, tmp_path: Path) -> None:
    async with two_hosts(tmp_path) as (peers, _, service):
        asked = 0

        def count(request: Stored) -> np.ndarray:
            nonlocal asked
            asked += 1
            return np.zeros(len(NAMES), np.bool_)

        assert service.kv is not None
        service.kv.stored = count  # type: ignore[assignment, method-assign]
        for _ in range(FRUITLESS + 4 * SELDOM):
            await asyncio.to_thread(peers.look, DOMAIN, NAMES)
        assert FRUITLESS <= asked <= FRUITLESS + 5


async def test_a_domain_that_is_no_name_is_refused(tmp_path: Path) -> None:
    async with two_hosts(tmp_path) as (peers, _, service):
        asked = Stored("../../etc", np.zeros(16, np.uint8))
        with pytest.raises(BadMessage):
            await peers._mesh.ref(service.mesh.name).call(Engine.stored, asked)
