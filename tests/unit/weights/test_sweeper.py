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

SOON_S = 15.0  # two sweeps and something
LONG_S = 80.0  # longer than every grace period but that of orphans
HOUR_S = 3600.0


def on_job(root: Path, story: Callable[[StoreBench], Awaitable[None]]) -> None:
    """Run a story on a store that has the first version of a job."""

    async def on(store: StoreBench) -> None:
        await store.submit()
        await store.begin()
        await story(store)

    on_store(root, on)


@story_on(on_job, "tmp_path")
async def test_a_version_that_another_has_followed_goes_after_a_grace(store: StoreBench) -> None:
    [(name, first)] = await checkpoints(store, 1)
    second, third = await store.step(2, name), await store.step(3, name)
    await store.clock.sleep(SOON_S)
    assert await store.stored(second), "engines may be fetching it"
    await store.clock.sleep(60.0)
    assert not await store.stored(second)
    assert await store.stored(third) and await store.stored(first)


@story_on(on_job, "tmp_path")
async def test_a_store_that_starts_anew_knows_what_it_had(store: StoreBench) -> None:
    [(name, _)] = await checkpoints(store, 1)
    second = await store.step(2, name)
    staged = await store.stage(3)
    await store.restart_store()
    await store.clock.sleep(LONG_S)
    assert await store.stored(staged)
    await store.commit(3, staged, name)
    await store.restart_store()
    await store.clock.sleep(LONG_S)
    assert not await store.stored(second)


@story_on(on_job, "tmp_path")
async def test_the_store_lets_go_of_a_job_that_was_deleted(store: StoreBench) -> None:
    [(_, first)] = await checkpoints(store, 1)
    state = store.state
    await jobs.cancel(state, JOB, "stop")
    await deletion.delete_job(state, JOB, "delete")
    await store.clock.sleep(SOON_S)
    assert await deletion.read_pending_store_deletions(state) == []
    await store.clock.sleep(LONG_S)
    assert not await store.stored(first)
    assert not [path for path in store.chunks.directory.parent.rglob(f"{JOB}.json")]


@story_on(on_job, "tmp_path")
async def test_a_staged_version_waits_for_its_commit(store: StoreBench) -> None:
    staged = await store.stage(1)
    await store.clock.sleep(LONG_S)
    await store.commit(1, staged, "")
    await store.clock.sleep(SOON_S)
    assert await store.stored(staged)


@story_on(on_job, "tmp_path")
async def test_a_version_whose_checkpoint_is_being_written_waits_for_it(store: StoreBench) -> None:
    for version in range(1, EVERY):
        await store.step(version, "")
    due = await store.step(EVERY, "")
    passed = await store.step(EVERY + 1, "")
    await store.step(EVERY + 2, "")
    await store.clock.sleep(LONG_S)
    assert not await store.stored(passed)
    name = await store.save(EVERY, due)
    await store.step(EVERY + 3, name)
    await store.clock.sleep(LONG_S)
    assert await store.stored(due)


@story_on(on_store, "tmp_path")
async def test_the_first_and_the_last_version_wait_for_their_checkpoints(store: StoreBench) -> None:
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
async def test_bytes_put_before_redis_went_are_there_for_what_names_them(store: StoreBench) -> None:
    early, group = store.chunks.write(b"of a large model"), await store.group()
    store.age(HOUR_S)
    await store.clock.sleep(LONG_S)
    assert store.chunks.has(early)
    await store.ready(group)
    store.age(24 * HOUR_S)
    await store.clock.sleep(LONG_S)
    assert store.chunks.open_space(GROUPS).has(group), "a step will ask for it"
    assert not store.chunks.has(early), "nobody has named it for a day"


@story_on(on_job, "tmp_path")
async def test_a_group_goes_once_a_step_has_ended_it(store: StoreBench) -> None:
    await store.ready(group := await store.group())
    await store.clock.sleep(SOON_S)
    await store.end_groups(1)
    await store.clock.sleep(SOON_S + 60.0)
    assert not store.chunks.open_space(GROUPS).has(group)


@story_on(on_job, "tmp_path")
async def test_what_a_resume_needs_outlives_redis(store: StoreBench) -> None:
    weights = await store.stage(1)
    name = await store.save(1, weights)
    await store.commit(1, weights, name)
    current = await store.step(2, name)
    await store.clock.sleep(LONG_S)
    await store.lose_redis()
    store.age(24 * HOUR_S)
    await store.clock.sleep(LONG_S)
    assert await store.stored(weights)
    held = {"version": 1, "lineage": 0, "cursor": 0, "next_group": 0, "requeue": []}
    held |= {"in_flight": 0, "counts": dict.fromkeys(jobs.COUNT_FIELDS, 0)}
    held |= {"manifest": weights, "checkpoint": name}
    await steps.restore_job(store.state, JOB, store.document, str(store.run_dir), held)
    await store.clock.sleep(LONG_S)
    assert await store.stored(weights)
    assert not await store.stored(current), "its lineage is abandoned"


@story_on(on_store, "tmp_path")
async def test_a_checkpoint_that_a_file_names_outlives_redis_even_if_it_was_given_up(
    store: StoreBench, tmp_path: Path
) -> None:
    store.run_dir = tmp_path / "elsewhere"
    await store.submit()
    await store.begin()
    weights = await store.stage(1)
    name = await store.save(1, weights)
    path = store.run_dir / "checkpoints" / f"{name}.json"
    kept = path.read_bytes()
    path.unlink()
    await store.commit(1, weights, "")
    await store.step(2, "")
    path.write_bytes(kept)
    await store.clock.sleep(SOON_S)
    await store.lose_redis()
    store.age(24 * HOUR_S)
    await store.clock.sleep(LONG_S)
    assert await store.stored(weights)


@story_on(on_store, "tmp_path")
async def test_a_lost_version_does_not_keep_what_others_are_done_with(store: StoreBench) -> None:
    for job in (JOB, "other"):
        await store.submit(job)
    lost = await store.begin("other")
    await store.begin()
    first = await store.step(1, "")
    store.chunks.chunk_path(lost).unlink()
    await store.restart_store()
    await store.step(2, "")
    await store.clock.sleep(LONG_S)
    assert not await store.stored(first)


@story_on(on_store, "tmp_path")
async def test_nothing_of_a_job_goes_while_its_run_directory_is_away(
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
    assert await store.stored(weights)


class SlowDisk(SimulatedHost):
    """Disk on which directories take longer to remove than any caller waits."""

    async def run_blocking(self, fn: Any, *args: Any, deadline_s: float) -> Any:
        if fn is shutil.rmtree:
            await self._clock.sleep(deadline_s)
            raise DeadlineExceeded("a removal took too long")
        return await super().run_blocking(fn, *args, deadline_s=deadline_s)


async def checkpoints(store: StoreBench, count: int) -> list[tuple[str, str]]:
    """(name, manifest) of some that were committed, each with its directory."""
    made = []
    for version in range(1, count + 1):
        manifest = await store.stage(version)
        name = await store.save(version, manifest)
        directory = store.run_dir / "checkpoints" / name
        directory.mkdir()
        (directory / "config.json").write_text("{}")
        await store.commit(version, manifest, name)
        made.append((name, manifest))
    return made


@story_on(on_store, "tmp_path")
async def test_checkpoints_beyond_the_limit_go_with_their_directories(store: StoreBench) -> None:
    await store.submit(keep_checkpoints=2)
    await store.begin()
    made = await checkpoints(store, 4)
    await store.clock.sleep(LONG_S)
    found = {path.name for path in (store.run_dir / "checkpoints").iterdir()}
    assert found == {name + end for name, _ in made[2:] for end in ("", ".json")}
    assert [await store.stored(manifest) for _, manifest in made] == [False, False, True, True]


@story_on(on_store, "tmp_path")
async def test_a_removal_that_takes_too_long_stops_nothing_and_goes_on(store: StoreBench) -> None:
    usual = store.host
    store.host = SlowDisk(store.clock, store.random)
    await store.restart_store()
    await store.submit(keep_checkpoints=1)
    await store.begin()
    made = await checkpoints(store, 3)
    await store.clock.sleep(LONG_S)
    assert [await store.stored(manifest) for _, manifest in made] == [False, False, True]
    directory = store.run_dir / "checkpoints"
    assert [path.stem for path in directory.glob("step-*.json")] == [made[2][0]]
    assert not any((directory / name).exists() for name, _ in made[:2])
    assert len(list(directory.iterdir())) == 4, "two that are being removed are left"
    store.host = usual
    await store.restart_store()
    await store.clock.sleep(SOON_S)
    assert {path.name for path in directory.iterdir()} == {made[2][0], f"{made[2][0]}.json"}


@story_on(on_job, "tmp_path")
async def test_a_file_that_cannot_be_read_does_not_end_the_sweeps(store: StoreBench) -> None:
    made = await checkpoints(store, 1)
    directory = store.run_dir / "checkpoints"
    (directory / "step-000-000000-garbled.json").write_text("[")
    passed = await store.step(2, made[0][0])
    await store.step(3, made[0][0])
    await store.clock.sleep(LONG_S)
    assert not await store.stored(passed) and await store.stored(made[0][1])


async def told(store: StoreBench) -> list[dict[str, Any]]:
    """Return the fields of the corruption events."""
    found = await events.read_all(store.state)
    return [event.fields for event in found if event.kind == "damaged"]


@pytest.mark.parametrize("harm", HARMS, ids=lambda harm: harm.__name__)
@story_on(on_store, "tmp_path")
async def test_a_record_that_is_damaged_is_made_again(store: StoreBench, harm: Harm) -> None:
    path = store.chunks.directory / "jobs" / "job.json"
    await store.submit()
    await store.begin()
    older = path.read_bytes()
    for version in range(1, EVERY):
        await store.step(version, "")
    due = await store.step(EVERY, "")
    passed = await store.step(EVERY + 1, "")
    await store.step(EVERY + 2, "")
    harm(path, older)
    await store.restart_store()
    store.age(24 * HOUR_S)
    await store.clock.sleep(LONG_S)
    assert not await store.stored(passed)
    await store.step(EVERY + 3, await store.save(EVERY, due))
    assert await store.stored(due), "its checkpoint was being written"
    record = JobRecords(store.host, path.parent)
    assert await record.load() == [] and record.get_or_create(JOB).versions
    seen = [(one["what"], one["job"]) for one in await told(store)]
    assert seen == ([] if harm in (delete, older_copy) else [("versions", JOB)])
    aside = store.chunks.directory / "quarantine/jobs/job.json"
    assert aside.is_file() == bool(seen)


@story_on(on_job, "tmp_path")
async def test_nothing_goes_while_a_damaged_records_job_is_unknown(store: StoreBench) -> None:
    weights = await store.step(1, "")
    await store.lose_redis()
    flip(store.chunks.directory / "jobs" / "job.json", b"")
    for _ in range(2):
        await store.restart_store()
        store.age(24 * HOUR_S)
        await store.clock.sleep(LONG_S)
        assert await store.stored(weights), "also of a store that starts again"
    await store.submit()
    await store.clock.sleep(LONG_S)
    assert not await store.stored(weights)


@pytest.mark.parametrize("harm", HARMS, ids=lambda harm: harm.__name__)
@story_on(on_job, "tmp_path")
async def test_a_damaged_chunk_is_set_aside_and_can_be_written_again(
    store: StoreBench, harm: Harm
) -> None:
    first = await store.step(1, "")
    for digest in await parts(store, first):
        path = store.chunks.chunk_path(digest)
        harm(path, b"another chunk's")
        await store.restart_store()
        with pytest.raises((CorruptData, NotFound)):
            await WeightReceiver(store.trainer, store.bulk).receive(first)
        assert await store.stage(1) == first
        assert await store.stored(first)
        aside = store.chunks.directory / "quarantine" / digest[:2] / digest
        assert aside.is_file() == (harm is not delete)
        assert str(path) in [one["path"] for one in await told(store)] or harm is delete


@story_on(on_store, "tmp_path")
async def test_damage_found_while_redis_is_away_is_told_once_it_is_back(store: StoreBench) -> None:
    await store.submit()
    path = store.chunks.chunk_path(await store.begin())
    flip(path, b"")
    store.redis.faults.is_unreachable = True
    asked = ChunkVerification(path.name, "weights", JOB)
    assert not await store.store.verify_chunk(asked)
    store.redis.faults.is_unreachable = False
    await store.clock.sleep(SOON_S)
    assert str(path) in [one["path"] for one in await told(store)]


class FullHost(SimulatedHost):
    """Its disk takes no bytes."""

    def replace_file(self, path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


@story_on(on_job, "tmp_path")
async def test_a_damaged_record_stays_until_there_is_room_to_say_so(store: StoreBench) -> None:
    path = store.chunks.directory / "jobs" / "job.json"
    flip(path, b"")
    full = FullHost(store.clock, store.random.child("full"))
    with pytest.raises(StorageFull):
        await JobRecords(full, path.parent).load()
    again = JobRecords(store.host, path.parent)
    assert [lost.job for lost in await again.load()] == [JOB] and again.has_unknown_jobs


async def parts(store: StoreBench, manifest: str) -> list[str]:
    """Return the digests of a version's manifest and of its chunks."""
    held = await store.trainer.ref(STORE_NAME).call(
        Weights.fetch_manifest, ManifestRequest(manifest)
    )
    return [manifest, *(tensor.chunk for tensor in held.tensors)]


@pytest.mark.parametrize("harm", HARMS, ids=lambda harm: harm.__name__)
@story_on(on_store, "tmp_path")
async def test_a_damaged_checkpoint_is_told_and_gives_its_place_to_the_one_before(
    store: StoreBench, harm: Harm
) -> None:
    await store.submit(keep_checkpoints=1)
    await store.begin()
    [(before, kept), (last, manifest)] = await checkpoints(store, 2)
    directory = store.run_dir / "checkpoints"
    older = (directory / f"{before}.json").read_bytes()
    harm(directory / f"{last}.json", older)
    with pytest.raises((CorruptData, NotFound)):
        await store.trainer.ref(STORE_NAME).call(Weights.load_checkpoint, CheckpointName(JOB, last))
    await store.clock.sleep(LONG_S)
    assert (directory / f"{before}.json").read_bytes() == older, "nothing takes its place"
    assert await store.stored(kept) and await store.stored(manifest)
    if harm is not delete:
        [one] = await told(store)
        assert (one["what"], Path(one["path"]).stem) == ("checkpoint", last)
        assert (store.run_dir / "quarantine/checkpoints" / last / "config.json").is_file()
    found = find_committed(store.run_dir)
    assert found is not None and found.stem == before
