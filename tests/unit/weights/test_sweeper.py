"""Deletion and retention of a running weight store."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from meshrl.common.api.transfer.bulk_permissions import GROUPS
from meshrl.common.api.weights import (
    STORE_NAME,
    Checkpoint,
    CheckpointName,
    ChunkVerification,
    ManifestRequest,
    Weights,
)
from meshrl.common.base.errors import CorruptData, DeadlineExceeded, NotFound, StorageFull
from meshrl.common.records.checkpoints import find_committed
from meshrl.common.state import events, jobs, steps
from meshrl.common.state.job_lifecycle import deletion
from meshrl.common.weights.receiver import WeightReceiver
from meshrl.services.weights.retention.job_records import JobRecords
from tests.simulated_host import SimulatedHost
from tests.stories import story_on
from tests.unit.common.base.files.harms import HARMS, Harm, delete, flip, older_copy
from tests.unit.weights.store_bench import EVERY, JOB, STEPS, StoreBench, on_store

SOON_S = 15.0  # two sweeps and a margin
LONG_S = 80.0  # longer than every grace period but that of orphans
HOUR_S = 3600.0


def on_job(root: Path, story: Callable[[StoreBench], Awaitable[None]]) -> None:
    """Run a story on a store that has the first version of a job."""

    async def run_story(store: StoreBench) -> None:
        await store.submit()
        await store.begin()
        await story(store)

    on_store(root, run_story)


@story_on(on_job, "tmp_path")
async def test_superseded_version_is_deleted_after_a_grace_period(store: StoreBench) -> None:
    [(name, first)] = await commit_checkpoints(store, 1)
    second, third = await store.step(2, name), await store.step(3, name)
    await store.clock.sleep(SOON_S)
    assert await store.is_stored(second), "engines may be fetching it"
    await store.clock.sleep(60.0)
    assert not await store.is_stored(second)
    assert await store.is_stored(third) and await store.is_stored(first)


@story_on(on_job, "tmp_path")
async def test_restarted_store_knows_its_versions(store: StoreBench) -> None:
    [(name, _)] = await commit_checkpoints(store, 1)
    second = await store.step(2, name)
    staged = await store.stage(3)
    await store.restart_store()
    await store.clock.sleep(LONG_S)
    assert await store.is_stored(staged)
    await store.commit(3, staged, name)
    await store.restart_store()
    await store.clock.sleep(LONG_S)
    assert not await store.is_stored(second)


@story_on(on_job, "tmp_path")
async def test_versions_of_a_deleted_job_are_deleted(store: StoreBench) -> None:
    [(_, first)] = await commit_checkpoints(store, 1)
    state = store.state
    await jobs.cancel(state, JOB, "stop")
    await deletion.delete_job(state, JOB, "delete")
    await store.clock.sleep(SOON_S)
    assert await deletion.read_pending_store_deletions(state) == []
    await store.clock.sleep(LONG_S)
    assert not await store.is_stored(first)
    assert not [path for path in store.chunks.directory.parent.rglob(f"{JOB}.json")]


@story_on(on_job, "tmp_path")
async def test_staged_version_is_retained_until_its_commit(store: StoreBench) -> None:
    staged = await store.stage(1)
    await store.clock.sleep(LONG_S)
    await store.commit(1, staged, "")
    await store.clock.sleep(SOON_S)
    assert await store.is_stored(staged)


@story_on(on_job, "tmp_path")
async def test_version_is_retained_while_its_checkpoint_is_written(store: StoreBench) -> None:
    for version in range(1, EVERY):
        await store.step(version, "")
    due = await store.step(EVERY, "")
    unneeded = await store.step(EVERY + 1, "")
    await store.step(EVERY + 2, "")
    await store.clock.sleep(LONG_S)
    assert not await store.is_stored(unneeded)
    name = await store.save(EVERY, due)
    await store.step(EVERY + 3, name)
    await store.clock.sleep(LONG_S)
    assert await store.is_stored(due)


@story_on(on_store, "tmp_path")
async def test_first_and_last_versions_are_retained_for_their_checkpoints(
    store: StoreBench,
) -> None:
    await store.submit()
    first = await store.stage(0)
    await store.clock.sleep(LONG_S)
    await store.save(0, first)
    await steps.commit_initial(
        store.state,
        JOB,
        store.trainer.name,
        store.trainer.token,
        0,
        steps.VersionReferences(first, ""),
    )
    for version in range(1, STEPS):
        await store.step(version, "")
    last = await store.stage(STEPS)
    await store.clock.sleep(LONG_S)
    await store.commit(STEPS, last, await store.save(STEPS, last))


@story_on(on_job, "tmp_path")
async def test_unreferenced_bytes_outlive_a_loss_of_redis_for_a_day(store: StoreBench) -> None:
    early, store_group = store.chunks.write(b"of a large model"), await store.store_group()
    store.age(HOUR_S)
    await store.clock.sleep(LONG_S)
    assert store.chunks.has(early)
    await store.ready(store_group)
    store.age(24 * HOUR_S)
    await store.clock.sleep(LONG_S)
    assert store.chunks.open_space(GROUPS).has(store_group), "a step will request the group"
    assert not store.chunks.has(early), "unreferenced for a day"


@story_on(on_job, "tmp_path")
async def test_group_is_deleted_after_the_step_that_used_it(store: StoreBench) -> None:
    await store.ready(store_group := await store.store_group())
    await store.clock.sleep(SOON_S)
    await store.end_groups(1)
    await store.clock.sleep(SOON_S + 60.0)
    assert not store.chunks.open_space(GROUPS).has(store_group)


@story_on(on_job, "tmp_path")
async def test_data_needed_to_resume_outlive_redis(store: StoreBench) -> None:
    weights = await store.stage(1)
    name = await store.save(1, weights)
    await store.commit(1, weights, name)
    current = await store.step(2, name)
    await store.clock.sleep(LONG_S)
    await store.lose_redis()
    store.age(24 * HOUR_S)
    await store.clock.sleep(LONG_S)
    assert await store.is_stored(weights)
    snapshot = {"version": 1, "lineage": 0, "cursor": 0, "next_group": 0, "requeue": []}
    snapshot |= {"in_flight": 0, "counts": dict.fromkeys(jobs.COUNT_FIELDS, 0)}
    snapshot |= {"manifest": weights, "checkpoint": name}
    await steps.restore_job(store.state, JOB, store.document, str(store.run_dir), snapshot)
    await store.clock.sleep(LONG_S)
    assert await store.is_stored(weights)
    assert not await store.is_stored(current), "its lineage is abandoned"


@story_on(on_store, "tmp_path")
async def test_checkpoint_with_a_manifest_file_outlives_redis(
    store: StoreBench, tmp_path: Path
) -> None:
    store.run_dir = tmp_path / "elsewhere"
    await store.submit()
    await store.begin()
    weights = await store.stage(1)
    name = await store.save(1, weights)
    path = store.run_dir / "checkpoints" / f"{name}.json"
    content = path.read_bytes()
    path.unlink()
    await store.commit(1, weights, "")
    await store.step(2, "")
    path.write_bytes(content)
    await store.clock.sleep(SOON_S)
    await store.lose_redis()
    store.age(24 * HOUR_S)
    await store.clock.sleep(LONG_S)
    assert await store.is_stored(weights)


@story_on(on_store, "tmp_path")
async def test_lost_version_does_not_block_deletion_of_others(store: StoreBench) -> None:
    for job in (JOB, "other"):
        await store.submit(job)
    lost = await store.begin("other")
    await store.begin()
    first = await store.step(1, "")
    store.chunks.chunk_path(lost).unlink()
    await store.restart_store()
    await store.step(2, "")
    await store.clock.sleep(LONG_S)
    assert not await store.is_stored(first)


@story_on(on_store, "tmp_path")
async def test_nothing_is_deleted_while_the_run_directory_is_missing(
    store: StoreBench, tmp_path: Path
) -> None:
    store.run_dir = tmp_path / "mounted"
    await store.submit()
    await store.begin()
    weights = await store.stage(1)
    name = await store.save(1, weights)
    await store.commit(1, weights, name)
    await store.step(2, name)
    store.run_dir.rename(tmp_path / "away")
    await store.clock.sleep(LONG_S)
    (tmp_path / "away").rename(store.run_dir)
    await store.clock.sleep(LONG_S)
    assert await store.is_stored(weights)


class SlowDisk(SimulatedHost):
    """Disk on which directories take longer to remove than any caller waits."""

    async def run_blocking(self, fn: Any, *args: Any, deadline_s: float) -> Any:
        if fn is shutil.rmtree:
            await self._clock.sleep(deadline_s)
            raise DeadlineExceeded("a removal took too long")
        return await super().run_blocking(fn, *args, deadline_s=deadline_s)


async def commit_checkpoints(store: StoreBench, count: int) -> list[tuple[str, str]]:
    """Commit checkpoints with a directory each, and return their names and manifests."""
    committed = []
    for version in range(1, count + 1):
        manifest = await store.stage(version)
        name = await store.save(version, manifest)
        directory = store.run_dir / "checkpoints" / name
        directory.mkdir(exist_ok=True)
        (directory / "config.json").write_text("{}")
        await store.commit(version, manifest, name)
        committed.append((name, manifest))
    return committed


@story_on(on_store, "tmp_path")
async def test_checkpoints_beyond_the_limit_are_deleted_with_directories(store: StoreBench) -> None:
    await store.submit(keep_checkpoints=2)
    await store.begin()
    committed = await commit_checkpoints(store, 4)
    await store.clock.sleep(LONG_S)
    names = {path.name for path in (store.run_dir / "checkpoints").iterdir()}
    assert names == {name + end for name, _ in committed[2:] for end in ("", ".json")}
    assert [await store.is_stored(manifest) for _, manifest in committed] == [
        False,
        False,
        True,
        True,
    ]


@story_on(on_store, "tmp_path")
async def test_slow_removal_does_not_block_the_sweeps_and_is_completed(store: StoreBench) -> None:
    original_host = store.host
    store.host = SlowDisk(store.clock, store.random)
    await store.restart_store()
    await store.submit(keep_checkpoints=1)
    await store.begin()
    committed = await commit_checkpoints(store, 3)
    await store.clock.sleep(LONG_S)
    assert [await store.is_stored(manifest) for _, manifest in committed] == [False, False, True]
    directory = store.run_dir / "checkpoints"
    assert [path.stem for path in directory.glob("step-*.json")] == [committed[2][0]]
    assert not any((directory / name).exists() for name, _ in committed[:2])
    assert len(list(directory.iterdir())) == 5, "the three directories under removal remain"
    store.host = original_host
    await store.restart_store()
    await store.clock.sleep(SOON_S)
    assert {path.name for path in directory.iterdir()} == {
        committed[2][0],
        f"{committed[2][0]}.json",
    }


@story_on(on_job, "tmp_path")
async def test_unreadable_file_does_not_end_the_sweeps(store: StoreBench) -> None:
    committed = await commit_checkpoints(store, 1)
    directory = store.run_dir / "checkpoints"
    (directory / "step-000-000000-garbled.json").write_text("[")
    unneeded = await store.step(2, committed[0][0])
    await store.step(3, committed[0][0])
    await store.clock.sleep(LONG_S)
    assert not await store.is_stored(unneeded) and await store.is_stored(committed[0][1])


async def list_corruption_fields(store: StoreBench) -> list[dict[str, Any]]:
    """Return the fields of the corruption events."""
    all_events = await events.read_all(store.state)
    return [event.fields for event in all_events if event.kind == "damaged"]


@pytest.mark.parametrize("harm", HARMS, ids=lambda harm: harm.__name__)
@story_on(on_store, "tmp_path")
async def test_corrupt_record_is_rebuilt(store: StoreBench, harm: Harm) -> None:
    path = store.chunks.directory / "jobs" / "job.json"
    await store.submit()
    await store.begin()
    older = path.read_bytes()
    for version in range(1, EVERY):
        await store.step(version, "")
    due = await store.step(EVERY, "")
    unneeded = await store.step(EVERY + 1, "")
    await store.step(EVERY + 2, "")
    harm(path, older)
    await store.restart_store()
    store.age(24 * HOUR_S)
    await store.clock.sleep(LONG_S)
    assert not await store.is_stored(unneeded)
    await store.step(EVERY + 3, await store.save(EVERY, due))
    assert await store.is_stored(due), "its checkpoint was being written"
    record = JobRecords(store.host, path.parent)
    assert await record.load() == [] and record.get_or_create(JOB).versions
    reported = [(one["what"], one["job"]) for one in await list_corruption_fields(store)]
    assert reported == ([] if harm in (delete, older_copy) else [("versions", JOB)])
    quarantined_path = store.chunks.directory / "quarantine/jobs/job.json"
    assert quarantined_path.is_file() == bool(reported)


@story_on(on_job, "tmp_path")
async def test_nothing_is_deleted_while_the_job_of_a_corrupt_record_is_unknown(
    store: StoreBench,
) -> None:
    weights = await store.step(1, "")
    await store.lose_redis()
    flip(store.chunks.directory / "jobs" / "job.json", b"")
    for _ in range(2):
        await store.restart_store()
        store.age(24 * HOUR_S)
        await store.clock.sleep(LONG_S)
        assert await store.is_stored(weights), "after a second restart as well"
    await store.submit()
    await store.clock.sleep(LONG_S)
    assert not await store.is_stored(weights)


@pytest.mark.parametrize("harm", HARMS, ids=lambda harm: harm.__name__)
@story_on(on_job, "tmp_path")
async def test_corrupt_chunk_is_quarantined_and_can_be_written_again(
    store: StoreBench, harm: Harm
) -> None:
    first = await store.step(1, "")
    for digest in await list_digests(store, first):
        path = store.chunks.chunk_path(digest)
        harm(path, b"another chunk's")
        await store.restart_store()
        with pytest.raises((CorruptData, NotFound)):
            await WeightReceiver(store.trainer, store.bulk).receive(first)
        assert await store.stage(1) == first
        assert await store.is_stored(first)
        quarantined_path = store.chunks.directory / "quarantine" / digest[:2] / digest
        assert quarantined_path.is_file() == (harm is not delete)
        assert (
            str(path) in [one["path"] for one in await list_corruption_fields(store)]
            or harm is delete
        )


@story_on(on_store, "tmp_path")
async def test_corruption_found_during_an_outage_of_redis_is_reported_later(
    store: StoreBench,
) -> None:
    await store.submit()
    path = store.chunks.chunk_path(await store.begin())
    flip(path, b"")
    store.redis.faults.is_unreachable = True
    verification = ChunkVerification(path.name, "weights", JOB)
    assert not await store.store.verify_chunk(verification)
    store.redis.faults.is_unreachable = False
    await store.clock.sleep(SOON_S)
    assert str(path) in [one["path"] for one in await list_corruption_fields(store)]


class FullHost(SimulatedHost):
    """Host whose disk is full."""

    def replace_file(self, path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


@story_on(on_job, "tmp_path")
async def test_corrupt_record_stays_while_the_disk_is_full(store: StoreBench) -> None:
    path = store.chunks.directory / "jobs" / "job.json"
    flip(path, b"")
    full = FullHost(store.clock, store.random.child("full"))
    with pytest.raises(StorageFull):
        await JobRecords(full, path.parent).load()
    records = JobRecords(store.host, path.parent)
    assert [lost.job for lost in await records.load()] == [JOB] and records.has_unknown_jobs


async def list_digests(store: StoreBench, manifest: str) -> list[str]:
    """Return the digests of a version's manifest and of its chunks."""
    manifest_reply = await store.trainer.ref(STORE_NAME).call(
        Weights.fetch_manifest, ManifestRequest(manifest)
    )
    return [manifest, *(tensor.chunk for tensor in manifest_reply.tensors)]


@pytest.mark.parametrize("harm", HARMS, ids=lambda harm: harm.__name__)
@story_on(on_store, "tmp_path")
async def test_corrupt_checkpoint_is_reported_and_the_previous_one_used(
    store: StoreBench, harm: Harm
) -> None:
    await store.submit(keep_checkpoints=1)
    await store.begin()
    [(before, kept_manifest), (last, manifest)] = await commit_checkpoints(store, 2)
    directory = store.run_dir / "checkpoints"
    older = (directory / f"{before}.json").read_bytes()
    harm(directory / f"{last}.json", older)
    with pytest.raises((CorruptData, NotFound)):
        await store.trainer.ref(STORE_NAME).call(Weights.load_checkpoint, CheckpointName(JOB, last))
    await store.clock.sleep(LONG_S)
    assert (directory / f"{before}.json").read_bytes() == older, (
        "the previous checkpoint is unchanged"
    )
    assert await store.is_stored(kept_manifest) and await store.is_stored(manifest)
    if harm is not delete:
        [one] = await list_corruption_fields(store)
        assert (one["what"], Path(one["path"]).stem) == ("checkpoint", last)
        assert (store.run_dir / "quarantine/checkpoints" / last / "config.json").is_file()
    committed_path = find_committed(store.run_dir)
    assert committed_path is not None and committed_path.stem == before


@story_on(on_store, "tmp_path")
async def test_checkpoint_that_is_written_again_beside_a_sweep_stays(store: StoreBench) -> None:
    await store.submit(keep_checkpoints=1)
    await store.begin()
    [(name, _)] = await commit_checkpoints(store, 1)
    manifest_path = store.run_dir / "checkpoints" / f"{name}.json"
    whole = manifest_path.read_bytes()
    async with store.store.checkpoint_lock:  # a sweep has read the corrupt one, and waits
        flip(manifest_path, whole)
        await store.clock.sleep(SOON_S)
        manifest_path.write_bytes(whole)
    await store.clock.sleep(SOON_S)
    assert manifest_path.read_bytes() == whole and manifest_path.with_suffix("").is_dir()
    assert not await list_corruption_fields(store)


@story_on(on_store, "tmp_path")
async def test_checkpoint_without_its_directory_is_rejected(store: StoreBench) -> None:
    await store.submit()
    manifest = await store.stage(0)
    name = await store.save(0, manifest)
    directory = store.run_dir / "checkpoints" / name
    directory.rmdir()
    request = Checkpoint(JOB, 0, 0, manifest, {"version": 0}, {})
    with pytest.raises(NotFound, match=f"checkpoint {directory} is missing"):
        await store.trainer.ref(STORE_NAME).call(Weights.save_checkpoint, request)
