"""Restaging of a version that the store has lost, while other processes still request it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
import torch

from loadtests.weights.contents import staged_whole
from meshrl.common.api.trainer import RestageResult
from meshrl.common.base.errors import CorruptData, NotFound
from meshrl.common.state.pool.workers.placement import Placement
from meshrl.common.weights.layout.chunk_builder import StagedRows, StagingOptions
from meshrl.common.weights.receiver import WeightReceiver
from meshrl.services.trainer.core.core import TrainerCore
from meshrl.services.trainer.gang.gang_compute import GangCompute
from meshrl.services.trainer.gang.state_writers import GangStaging
from meshrl.services.trainer.ranks.rank import Rank
from meshrl.services.trainer.versions.publishing import VersionIdentity
from tests.stories import story_on
from tests.unit.common.base.files.harms import Harm, delete, flip
from tests.unit.trainer.versions.test_restoring import TrainedJob, run_with_trained_job
from tests.unit.weights.store_bench import JOB

PIECE_S = 200.0  # twice this is longer than a caller's timeout


class SlowGang(GangCompute):
    """Gang that stages slowly and is lost when staging is cancelled."""

    stagings, cancelled = 0, False

    def create_staging(self, options: StagingOptions, description: str) -> GangStaging:
        return SlowStaging(self, super().create_staging(options, description))


class SlowStaging(GangStaging):
    def __init__(self, compute: SlowGang, inner: GangStaging) -> None:
        self._compute, self._inner = compute, inner

    async def wait_until_written(self) -> None:
        await self._inner.wait_until_written()

    async def close(self) -> None:
        await self._inner.close()

    async def copy(self, names: Sequence[str], part_index: int, part_count: int) -> None:
        try:
            await self._compute._mesh.clock.sleep(PIECE_S)
        except asyncio.CancelledError:
            self._compute.cancelled = True
            raise
        await self._inner.copy(names, part_index, part_count)

    async def finish(self) -> list[StagedRows]:
        self._compute.stagings += 1
        return await self._inner.finish()


async def create_core(bench: TrainedJob) -> tuple[TrainerCore, SlowGang]:
    """Return a core at the last version, of which the store has nothing any more."""
    compute = SlowGang(bench.store.trainer, JOB, Rank.for_single_rank(bench.learner))
    seat = Placement("g0", "g0.0", JOB, 1, core=True)
    core = TrainerCore(bench.store.trainer, bench.data, seat, compute)
    last = len(bench.manifests) - 1
    core.is_ready, core.position.version, core.position.weights = (
        True,
        last,
        VersionIdentity(bench.manifests[last]),
    )
    core.checkpoints.last_name, core.checkpoints.last_step = bench.names[last], last
    for path in await bench.chunks(last):
        path.unlink()
    await bench.store.restart_store()
    return core, compute


@story_on(run_with_trained_job, "tmp_path")
async def test_restaging_continues_without_its_caller_and_later_callers_join(
    bench: TrainedJob,
) -> None:
    core, compute = await create_core(bench)
    restage = bench.manifests[1]
    cancelled_call = asyncio.create_task(core.restage_version(restage))
    await bench.store.clock.sleep(PIECE_S / 2)
    cancelled_call.cancel()
    await asyncio.gather(cancelled_call, return_exceptions=True)
    assert await core.restage_version(restage) == RestageResult(False, retry_later=True), (
        "it goes on"
    )
    both = await asyncio.gather(core.restage_version(restage), core.restage_version(restage))
    assert list(both) == [RestageResult(True)] * 2
    assert (compute.stagings, compute.cancelled) == (2, False), "compared once, and written once"
    assert await bench.store.is_stored(bench.manifests[1])


@story_on(run_with_trained_job, "tmp_path")
async def test_restaging_ends_with_the_core(bench: TrainedJob) -> None:
    core, compute = await create_core(bench)
    pending_call = asyncio.create_task(core.restage_version(bench.manifests[1]))
    await bench.store.clock.sleep(PIECE_S / 2)
    await core.stop()
    await asyncio.wait([pending_call])
    assert compute.cancelled


@story_on(run_with_trained_job, "tmp_path")
async def test_version_with_another_layout_is_restaged_from_its_checkpoint(
    bench: TrainedJob,
) -> None:
    """Check restaging of a version whose chunk layout differs, as after a resume with another
    number of ranks.
    """
    await bench.checkpoint(2, max_chunk_bytes=64)
    core, _ = await create_core(bench)
    restage = bench.manifests[2]
    while (corruption := await core.restage_version(restage)).retry_later:
        pass
    assert corruption == RestageResult(True)
    assert await bench.store.is_stored(bench.manifests[2])


@pytest.mark.parametrize("cancelled_call", ["a chunk", "all chunks", "its manifest too"])
@story_on(run_with_trained_job, "tmp_path")
async def test_version_after_the_checkpoint_is_restaged_in_its_manifests_layout(
    bench: TrainedJob, cancelled_call: str
) -> None:
    """Check that restaging follows the chunk layout of the manifest, also where other writers chose
    it.
    """
    store, step = bench.store, 2
    torch.manual_seed(step)
    bench.learner.apply_gradient(torch.randn(bench.learner.parameter_count), 1.0, 1.0)
    weights = bench.learner.copy_weights()
    manifest = await staged_whole(store.trainer, store.bulk, JOB, 0, step, weights, most=100)
    await store.commit(step, manifest, bench.names[1])
    bench.manifests.append(manifest)
    bench.names.append(bench.names[1])
    core = TrainerCore(
        store.trainer,
        bench.data,
        Placement("g0", "g0.0", JOB, 1, core=True),
        GangCompute(store.trainer, JOB, Rank.for_single_rank(bench.learner)),
    )
    core.is_ready, core.position.version, core.position.weights = (
        True,
        step,
        VersionIdentity(manifest),
    )
    await core.publisher.load_version(manifest)
    its_own, *chunks = await bench.chunks(step)
    before = {path: path.read_bytes() for path in chunks}
    lost = {"a chunk": chunks[1:2], "all chunks": chunks}.get(cancelled_call, [its_own, *chunks])
    for path in lost:
        path.unlink()
    await store.restart_store()
    while (corruption := await core.restage_version(manifest)).retry_later:
        pass
    assert corruption == RestageResult(True) and len(chunks) > 3
    assert await store.is_stored(manifest)
    assert {path: path.read_bytes() for path in chunks} == before
    image = await WeightReceiver(store.trainer, store.bulk).receive(manifest)
    assert all(torch.equal(image.tensors[name], weights[name]) for name in weights)


@story_on(run_with_trained_job, "tmp_path")
async def test_changed_weights_do_not_follow_an_old_layout(bench: TrainedJob) -> None:
    await bench.checkpoint(2, max_chunk_bytes=64)
    bench.model(2).unlink()
    its_own, *_ = await bench.chunks(2)
    content = its_own.read_bytes()
    core, _ = await create_core(bench)
    its_own.write_bytes(content)
    bench.learner.apply_gradient(torch.randn(bench.learner.parameter_count), 1.0, 1.0)
    restage = bench.manifests[2]
    while (corruption := await core.restage_version(restage)).retry_later:
        pass
    assert corruption == RestageResult(False)


@story_on(run_with_trained_job, "tmp_path")
async def test_version_missing_in_its_checkpoint_is_not_restaged(bench: TrainedJob) -> None:
    await bench.checkpoint(2, max_chunk_bytes=64)
    bench.model(2).unlink()
    core, _ = await create_core(bench)
    restage = bench.manifests[2]
    while (corruption := await core.restage_version(restage)).retry_later:
        pass
    assert corruption == RestageResult(False)


async def stage_step_2(bench: TrainedJob) -> None:
    """Stage the weights of step 2 in the store."""
    bench.learner.apply_gradient(torch.ones(bench.learner.parameter_count), 1.0, 1.0)
    bench.manifests.append((await bench.publisher.stage_version(0, 2, bench.manifests[-1])).digest)
    bench.weights.append(bench.learner.copy_weights())


async def write_checkpoint(bench: TrainedJob) -> None:
    await bench.checkpoints.begin_checkpoint(
        0, 2, VersionIdentity(bench.manifests[2]), {"version": 2}
    )
    await bench.checkpoints.wait_until_written(required=True)
    bench.names.append(bench.checkpoints.last_name)


@pytest.mark.parametrize("harm", [flip, delete], ids=lambda harm: harm.__name__)
@story_on(run_with_trained_job, "tmp_path")
async def test_corrupt_version_is_restaged_before_its_use(bench: TrainedJob, harm: Harm) -> None:
    await stage_step_2(bench)
    for path in await bench.chunks(2):
        harm(path, b"of another")
    await bench.store.restart_store()  # it caches manifests
    await write_checkpoint(bench)
    chunks = await bench.chunks(2)
    assert await bench.store.is_stored(bench.manifests[2])
    for path in chunks:
        path.unlink()
    await bench.store.restart_store()
    assert await bench.restore() == 2, "the checkpoint's own model is that version"


@story_on(run_with_trained_job, "tmp_path")
async def test_changed_weights_are_not_staged_as_the_version(bench: TrainedJob) -> None:
    await stage_step_2(bench)
    for path in await bench.chunks(2):
        path.unlink()
    await bench.store.restart_store()
    bench.learner.load_weights(bench.weights[1])
    with pytest.raises((CorruptData, NotFound)):
        await write_checkpoint(bench)
    assert bench.checkpoints.last_name == bench.names[-1], "the one before"
