"""What people keep in the store, and what a job may have there."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from meshrl.common.api.weights import Manifest, Tensor
from meshrl.common.base.errors import AlreadyCommitted, NotFound, QuotaExceeded, from_wire, to_wire
from meshrl.common.mesh.runtime.patience import waited_for
from meshrl.common.state import events, jobs
from meshrl.common.state.events import Event
from meshrl.common.state.lifecycle import deleting
from meshrl.services.weights.keeping.pins import Pin, all_pins, names, pin, pins, unpin
from meshrl.services.weights.keeping.sweeping import GRACE_S, SWEEP_S
from meshrl.view.history import news
from tests.unit.weights.store_bench import JOB, StoreBench, on_store

LONG_S = GRACE_S + 4 * SWEEP_S


async def begun(store: StoreBench, **weights: float) -> str:
    """A run with a checkpoint at version 1; its name."""
    await store.submit()
    if weights:
        await asked(store, **weights)
    await store.begin()
    name = await store.save(1, first := await store.stage(1))
    await store.commit(1, first, name)
    return name


async def asked(store: StoreBench, **weights: float) -> None:
    """The job asks for another `[weights]` from now on."""
    document = store.document | {"weights": store.document["weights"] | weights}
    await jobs.change(store.state, JOB, document, {}, f"change {weights}")


def held(store: StoreBench, manifest: str, version: int) -> None:
    made = Pin(str(store.run_dir), 0, version, "for the paper", 12.0)
    pin(store.chunks, JOB, manifest, made)


def test_a_pinned_version_stays_until_it_is_unpinned(tmp_path: Path) -> None:
    async def story(store: StoreBench) -> None:
        name = await begun(store)
        second = await store.step(2, name)
        held(store, second, 2)
        await store.step(3, name)
        await store.clock.sleep(LONG_S)
        await store.restart_store()
        await store.clock.sleep(LONG_S)
        assert await store.stored(second)
        assert pins(store.chunks.directory, JOB)[second].note == "for the paper"
        assert unpin(store.chunks.directory, JOB, second)
        assert not unpin(store.chunks.directory, JOB, second), "there is nothing left to do"
        await store.clock.sleep(LONG_S)
        assert not await store.stored(second)

    on_store(tmp_path, story)


def test_a_version_that_is_about_to_go_can_still_be_pinned(tmp_path: Path) -> None:
    async def story(store: StoreBench) -> None:
        name = await begun(store)
        second = await store.step(2, name)
        await store.step(3, name)
        await store.clock.sleep(GRACE_S - SWEEP_S)  # it is struck off, and its chunks are there
        held(store, second, 2)
        await store.clock.sleep(LONG_S)
        assert await store.stored(second)
        unpin(store.chunks.directory, JOB, second)
        await store.clock.sleep(LONG_S)
        assert not await store.stored(second)
        with pytest.raises(NotFound, match=second):
            held(store, second, 2)
        assert all_pins(store.chunks.directory) == {}, "what is not there is not pinned"

    on_store(tmp_path, story)


def test_a_version_that_has_lost_a_chunk_is_not_pinned(tmp_path: Path) -> None:
    async def story(store: StoreBench) -> None:
        name = await begun(store)
        second = await store.step(2, name)
        [chunk] = names(await store.store._manifest(second))
        store.chunks.path(chunk).unlink()
        with pytest.raises(NotFound, match="meshrl weights list"):
            held(store, second, 2)
        assert all_pins(store.chunks.directory) == {}

    on_store(tmp_path, story)


def test_pins_outlive_the_job_and_redis(tmp_path: Path) -> None:
    async def story(store: StoreBench) -> None:
        name = await begun(store)
        second = await store.step(2, name)
        held(store, second, 2)
        await store.step(3, name)
        await store.lose_redis()
        await store.clock.sleep(LONG_S)
        assert await store.stored(second)
        await store.submit()
        await jobs.cancel(store.state, JOB, "stop")
        await deleting.delete(store.state, JOB, "delete")
        await store.clock.sleep(LONG_S)
        assert await store.stored(second)

    on_store(tmp_path, story)


def test_a_pin_whose_file_is_damaged_still_holds(tmp_path: Path) -> None:
    async def story(store: StoreBench) -> None:
        name = await begun(store)
        second = await store.step(2, name)
        held(store, second, 2)
        (path,) = (store.chunks.directory / "pins").rglob("*.json")
        path.write_text("{")
        await store.step(3, name)
        await store.clock.sleep(LONG_S)
        assert await store.stored(second)

    on_store(tmp_path, story)


def test_the_newest_and_each_kth_version_stay(tmp_path: Path) -> None:
    async def story(store: StoreBench) -> None:
        name = await begun(store, keep=2, keep_every=3)
        made = {n: await store.step(n, name) for n in range(2, 8)}
        await store.clock.sleep(LONG_S)
        stays = [n for n, manifest in made.items() if await store.stored(manifest)]
        # 4 is that of the checkpoint that may still be written
        assert stays == [3, 4, 6, 7]

    on_store(tmp_path, story)


def test_a_version_beyond_the_quota_waits_and_is_told_before(tmp_path: Path) -> None:
    # a version of the bench has 32 bytes; 0 and 1 are those of checkpoints
    four = 4 * 32 / (1 << 30)

    async def story(store: StoreBench) -> None:
        name = await begun(store, quota_gb=four)
        second = await store.step(2, name)
        held(store, second, 2)
        await store.clock.sleep(2 * SWEEP_S)
        assert not await told(store)
        await store.step(3, name)
        await store.clock.sleep(2 * SWEEP_S)
        [near] = await told(store)
        assert (near["held"], near["next"], near["quota"]) == (128, 32, 128)
        assert "128" not in store.store.stats()["quota_trouble"]
        assert "the next one needs" in store.store.stats()["quota_trouble"]
        staging = asyncio.create_task(store.stage(4))
        await store.clock.sleep(LONG_S)
        assert not staging.done() and store.store.stats()["quota_refused"] > 0
        assert unpin(store.chunks.directory, JOB, second)
        await store.commit(4, await staging, name)
        await store.clock.sleep(2 * SWEEP_S)
        assert len(await told(store)) == 1, "once each time"

    on_store(tmp_path, story)


async def told(store: StoreBench, kind: str = "weights_quota") -> list[dict[str, object]]:
    found = await events.read_all(store.state)
    return [dict(event.fields) for event in found if event.kind == kind]


def test_a_version_that_is_refused_for_long_is_told_once_and_swept_for_ever_more_rarely(
    tmp_path: Path,
) -> None:
    async def story(store: StoreBench) -> None:
        name = await begun(store, quota_gb=4 * 32 / (1 << 30))
        for version in (2, 3):
            held(store, await store.step(version, name), version)
        before = store.store.stats()["sweeps"]
        staging = asyncio.create_task(store.stage(4))
        await store.clock.sleep(LONG_S)
        stats = store.store.stats()
        assert stats["quota_refused"] > 100, "its trainer has asked again and again"
        assert stats["sweeps"] - before <= LONG_S / SWEEP_S + 8
        assert "with version 4" in stats["quota_trouble"] and "waits" in stats["quota_trouble"]
        [refused] = await told(store, "weights_refused")
        assert (refused["job"], refused["version"], refused["held"]) == (JOB, 4, 160)
        assert "unpin" in str(refused["fix"])
        assert "version 4" in line(store, refused) and "unpin" in line(store, refused)
        await asked(store, quota_gb=1.0)
        await store.commit(4, await staging, name)
        await store.clock.sleep(2 * SWEEP_S)
        assert store.store.stats()["quota_trouble"] == ""

    def line(store: StoreBench, fields: dict[str, object]) -> str:
        return news.told(Event("1-0", 0, "weights_refused", fields))

    on_store(tmp_path, story)


def test_what_a_job_that_is_over_was_refused_is_no_trouble(tmp_path: Path) -> None:
    async def story(store: StoreBench) -> None:
        name = await begun(store, quota_gb=3 * 32 / (1 << 30))
        held(store, await store.step(2, name), 2)
        staging = asyncio.create_task(store.stage(3))
        await store.clock.sleep(SWEEP_S)
        assert "waits" in store.store.stats()["quota_trouble"]
        staging.cancel()
        await jobs.cancel(store.state, JOB, "stop")
        await store.clock.sleep(2 * SWEEP_S)
        assert store.store.stats()["quota_trouble"] == ""

    on_store(tmp_path, story)


def test_a_version_that_is_committed_otherwise_does_not_wait_for_room(tmp_path: Path) -> None:
    async def story(store: StoreBench) -> None:
        second = await store.step(2, await begun(store))
        await asked(store, quota_gb=32 / (1 << 30))
        with pytest.raises(AlreadyCommitted, match=second):
            await store.store.stage(offered(store, 2))

    on_store(tmp_path, story)


def test_a_version_of_a_job_that_is_over_is_refused_with_its_reason(tmp_path: Path) -> None:
    async def story(store: StoreBench) -> None:
        held(store, await store.step(2, await begun(store)), 2)
        await asked(store, quota_gb=32 / (1 << 30))
        await jobs.cancel(store.state, JOB, "stop")
        with pytest.raises(QuotaExceeded, match="with version 3 the versions of"):
            await store.store.stage(offered(store, 3))

    on_store(tmp_path, story)


def offered(store: StoreBench, version: int) -> Manifest:
    """Weights that no step made, beside the versions of the bench."""
    chunk = store.chunks.write(bytes(32))
    return Manifest(JOB, 0, version, [Tensor("other", "F32", [8], chunk, 0, 32, 0, 0, 8)])


def test_who_waits_for_a_quota_says_so() -> None:
    code, text = to_wire(QuotaExceeded("with version 4 the versions of j have 5 GiB"))
    what, on = waited_for(from_wire(code, text))
    assert on == "quota" and "versions of j have 5 GiB" in what
