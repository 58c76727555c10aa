"""Requests of role processes for memory segments of their worker."""

from __future__ import annotations

import pytest

from meshrl.common.api.node import CreateSegment, Worker
from meshrl.common.base.errors import Refused
from meshrl.common.base.files.offload_media import make_segment_key
from meshrl.common.state.pool.workers.rows import TierBytes
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
