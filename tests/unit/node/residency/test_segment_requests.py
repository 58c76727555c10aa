"""Requests of role processes for memory segments of their worker."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from meshrl.common.api.node import CreateSegment, Worker
from meshrl.common.base.errors import Refused, StorageFull
from meshrl.common.base.files.offload_media import MemorySegment, make_segment_key
from meshrl.common.state.pool.workers.rows import TierBytes
from meshrl.services.node.instances.segments import SPARE_BYTES
from tests.unit.node.residency.shared_worker import A, B, SharedWorker, run_worker


def test_only_the_process_of_a_segment_may_request_it() -> None:
    async def story(shared: SharedWorker) -> None:
        shared.set_desired(A, B)
        await shared.until_steps(A, 1)
        await shared.until_steps(B, 1)
        key = make_segment_key(f"engine/{A.id}", "optimizer")
        own, other = (shared.meshes[one.id].ref(shared.mesh.name) for one in (A, B))
        await own.call(Worker.create_segment, CreateSegment(key, 4096))
        for method in (Worker.commit_segment, Worker.discard_segment, Worker.delete_segment):
            with pytest.raises(Refused, match=f"belongs to engine/{A.id}"):
                await other.call(method, key)
        await own.call(Worker.commit_segment, key)
        with pytest.raises(Refused, match="the requester is another process"):
            await other.call(Worker.find_segment, key)
        with pytest.raises(Refused, match="the requester is another process"):
            await other.call(Worker.create_segment, CreateSegment(key, 8192))
        unknown = make_segment_key("trainer/elsewhere")
        with pytest.raises(Refused, match="belongs to trainer/elsewhere"):
            await own.call(Worker.find_segment, unknown)
        assert (await own.call(Worker.find_segment, key)).size_bytes == 4096
        assert shared.segments.keys == [key]
        await own.call(Worker.delete_segment, key)
        incarnation, instances = shared.meshes[A.id].incarnation, shared.worker.instances
        assert await instances.is_process(f"engine/{A.id}", incarnation, b"its connection")
        assert not await instances.is_process(f"engine/{A.id}", incarnation, "another key")

    run_worker(story, TierBytes(), SharedWorker)


def test_restarted_process_requests_its_segments_while_redis_is_away() -> None:
    async def story(shared: SharedWorker) -> None:
        shared.set_desired(A)
        await shared.until_steps(A, 1)
        key = make_segment_key(f"engine/{A.id}")
        before = shared.meshes[A.id]
        await shared.worker.instances.kill(A.id, A.generation, "a test")
        await shared.until("restarted", lambda: shared.meshes[A.id] is not before, 30.0)
        await shared.until("ready", lambda: shared.process(A).is_ready, 30.0)
        shared.redis.faults.is_unreachable = True
        own = shared.meshes[A.id].ref(shared.mesh.name)
        await own.call(Worker.create_segment, CreateSegment(key, 4096))
        await own.call(Worker.commit_segment, key)
        assert not await shared.worker.instances.is_process("engine/g0.9", "", b"")
        shared.redis.faults.is_unreachable = False

    run_worker(story, TierBytes(), SharedWorker)


SIZE = 1 << 20  # bytes of a segment


async def pin_unused_segments(shared: SharedWorker, *sizes: int) -> Any:
    """Let A leave pinned segments unused on a full host; return B's reference to the worker.

    Their memory is free once A has unmapped them.
    """
    shared.set_desired(A, B)
    await shared.until_steps(A, 1)
    await shared.until_steps(B, 1)
    own, other = (shared.meshes[one.id].ref(shared.mesh.name) for one in (A, B))
    left = list(sizes)
    for number, size in enumerate(sizes):
        key = make_segment_key(f"engine/{A.id}", f"kind{number}")
        made = await own.call(Worker.create_segment, CreateSegment(key, size))
        await own.call(Worker.commit_segment, key)
        MemorySegment(made.path).open_chunk(0, size)[:] = 1
    for number in range(len(sizes)):
        await own.call(Worker.delete_segment, make_segment_key(f"engine/{A.id}", f"kind{number}"))
    shared.free_bytes = SPARE_BYTES

    async def unpin() -> None:
        await shared.clock.sleep(0.5)
        shared.free_bytes += left.pop(0)

    shared.roles[A.id].faults["unmap"] = unpin
    return other


def request_for_b(part: str) -> CreateSegment:
    return CreateSegment(make_segment_key(f"engine/{B.id}", part), SIZE)


def test_only_as_many_pinned_segments_are_freed_as_another_process_needs() -> None:
    async def story(shared: SharedWorker) -> None:
        other = await pin_unused_segments(shared, SIZE, SIZE)
        await other.call(Worker.create_segment, request_for_b("kind0"))
        assert shared.segments.unused_bytes == SIZE
        await other.call(Worker.create_segment, request_for_b("kind1"))
        assert shared.segments.unused_bytes == 0

    run_worker(story, TierBytes(), SharedWorker)


def test_concurrent_requests_share_the_memory_of_a_segment_that_is_being_unmapped() -> None:
    async def story(shared: SharedWorker) -> None:
        other = await pin_unused_segments(shared, 2 * SIZE)
        requests = [request_for_b("kind0"), request_for_b("kind1")]
        await asyncio.gather(*(other.call(Worker.create_segment, one) for one in requests))

    run_worker(story, TierBytes(), SharedWorker)


def test_failed_unmap_is_repeated_for_the_next_request() -> None:
    async def story(shared: SharedWorker) -> None:
        other = await pin_unused_segments(shared, SIZE)
        faults = shared.roles[A.id].faults
        unpin = faults["unmap"]

        async def reject() -> None:
            faults["unmap"] = unpin
            raise Refused("the process is busy")

        faults["unmap"] = reject
        with pytest.raises(StorageFull, match="the host has"):
            await other.call(Worker.create_segment, request_for_b("kind0"))
        await other.call(Worker.create_segment, request_for_b("kind0"))
        assert not shared.segments.freed

    run_worker(story, TierBytes(), SharedWorker)
