"""Versions and checkpoints that stay: pins, quotas, and the table `[weights]` of a job."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrl.common.api.weights import Manifest, TensorPiece
from meshrl.common.base.errors import AlreadyCommitted, NotFound, QuotaExceeded, from_wire, to_wire
from meshrl.common.mesh.runtime.retry_policy import describe_wait
from meshrl.common.state import events, jobs
from meshrl.common.state.events import Event
from meshrl.common.state.job_lifecycle import deletion
from meshrl.common.state.jobs import COUNT_FIELDS, JobRow
from meshrl.services.weights.retention.pins import (
    VersionPin,
    list_chunks,
    pin_version,
    read_all_pins,
    read_pins,
    unpin_version,
)
from meshrl.services.weights.retention.policy import (
    VersionNumber,
    find_ancestors,
    find_awaited,
    find_expired,
    find_permanent,
    find_requested,
)
from meshrl.services.weights.retention.sweeper import DELETION_GRACE_S, SWEEP_INTERVAL_S
from meshrl.view.history import event_text
from tests.stories import story_on
from tests.unit.weights.store_bench import JOB, StoreBench, on_store

LONG_S = DELETION_GRACE_S + 4 * SWEEP_INTERVAL_S


async def begun(store: StoreBench, **weights: float) -> str:
    """Start a run with a checkpoint at version 1, and return its name."""
    await store.submit()
    if weights:
        await asked(store, **weights)
    await store.begin()
    name = await store.save(1, first := await store.stage(1))
    await store.commit(1, first, name)
    return name


async def asked(store: StoreBench, **weights: float) -> None:
    """Change the `[weights]` section of the job."""
    document = store.document | {"weights": store.document["weights"] | weights}
    await jobs.change_document(store.state, JOB, document, {}, f"change {weights}")


def held(store: StoreBench, manifest: str, version: int) -> None:
    made = VersionPin(str(store.run_dir), 0, version, "for the paper", 12.0)
    pin_version(store.chunks, JOB, manifest, made)


@story_on(on_store, "tmp_path")
async def test_a_pinned_version_stays_until_it_is_unpinned(store: StoreBench) -> None:
    name = await begun(store)
    second = await store.step(2, name)
    held(store, second, 2)
    await store.step(3, name)
    await store.clock.sleep(LONG_S)
    await store.restart_store()
    await store.clock.sleep(LONG_S)
    assert await store.stored(second)
    assert read_pins(store.chunks.directory, JOB)[second].note == "for the paper"
    assert unpin_version(store.chunks.directory, JOB, second)
    assert not unpin_version(store.chunks.directory, JOB, second), "there is nothing left to do"
    await store.clock.sleep(LONG_S)
    assert not await store.stored(second)


@story_on(on_store, "tmp_path")
async def test_a_version_that_is_about_to_go_can_still_be_pinned(store: StoreBench) -> None:
    name = await begun(store)
    second = await store.step(2, name)
    await store.step(3, name)
    await store.clock.sleep(
        DELETION_GRACE_S - SWEEP_INTERVAL_S
    )  # it is struck off, and its chunks are there
    held(store, second, 2)
    await store.clock.sleep(LONG_S)
    assert await store.stored(second)
    unpin_version(store.chunks.directory, JOB, second)
    await store.clock.sleep(LONG_S)
    assert not await store.stored(second)
    with pytest.raises(NotFound, match=second):
        held(store, second, 2)
    assert read_all_pins(store.chunks.directory) == {}, "what is not there is not pinned"


@story_on(on_store, "tmp_path")
async def test_a_version_that_has_lost_a_chunk_is_not_pinned(store: StoreBench) -> None:
    name = await begun(store)
    second = await store.step(2, name)
    [chunk] = list_chunks(await store.store._read_manifest(second))
    store.chunks.chunk_path(chunk).unlink()
    with pytest.raises(NotFound, match="meshrl weights list"):
        held(store, second, 2)
    assert read_all_pins(store.chunks.directory) == {}


@story_on(on_store, "tmp_path")
async def test_pins_outlive_the_job_and_redis(store: StoreBench) -> None:
    name = await begun(store)
    second = await store.step(2, name)
    held(store, second, 2)
    await store.step(3, name)
    await store.lose_redis()
    await store.clock.sleep(LONG_S)
    assert await store.stored(second)
    await store.submit()
    await jobs.cancel(store.state, JOB, "stop")
    await deletion.delete_job(store.state, JOB, "delete")
    await store.clock.sleep(LONG_S)
    assert await store.stored(second)


@story_on(on_store, "tmp_path")
async def test_a_pin_whose_file_is_damaged_still_holds(store: StoreBench) -> None:
    name = await begun(store)
    second = await store.step(2, name)
    held(store, second, 2)
    (path,) = (store.chunks.directory / "pins").rglob("*.json")
    path.write_text("{")
    await store.step(3, name)
    await store.clock.sleep(LONG_S)
    assert await store.stored(second)


@story_on(on_store, "tmp_path")
async def test_the_newest_and_each_kth_version_stay(store: StoreBench) -> None:
    name = await begun(store, keep=2, keep_every=3)
    made = {n: await store.step(n, name) for n in range(2, 8)}
    await store.clock.sleep(LONG_S)
    stays = [n for n, manifest in made.items() if await store.stored(manifest)]
    # 4 is that of the checkpoint that may still be written
    assert stays == [3, 4, 6, 7]


@story_on(on_store, "tmp_path")
async def test_a_version_beyond_the_quota_waits_and_is_told_before(store: StoreBench) -> None:
    four = 4 * 32 / (1 << 30)
    name = await begun(store, quota_gb=four)
    second = await store.step(2, name)
    held(store, second, 2)
    await store.clock.sleep(2 * SWEEP_INTERVAL_S)
    assert not await told(store)
    await store.step(3, name)
    await store.clock.sleep(2 * SWEEP_INTERVAL_S)
    [near] = await told(store)
    assert (near["held"], near["next"], near["quota"]) == (128, 32, 128)
    assert "128" not in store.store.stats()["quota_trouble"]
    assert "the next one needs" in store.store.stats()["quota_trouble"]
    staging = asyncio.create_task(store.stage(4))
    await store.clock.sleep(LONG_S)
    assert not staging.done() and store.store.stats()["quota_refused"] > 0
    assert unpin_version(store.chunks.directory, JOB, second)
    await store.commit(4, await staging, name)
    await store.clock.sleep(2 * SWEEP_INTERVAL_S)
    assert len(await told(store)) == 1, "once each time"


async def told(store: StoreBench, kind: str = "weights_quota") -> list[dict[str, object]]:
    found = await events.read_all(store.state)
    return [dict(event.fields) for event in found if event.kind == kind]


def test_a_version_refused_for_long_is_told_once_and_swept_ever_more_rarely(tmp_path: Path) -> None:
    async def story(store: StoreBench) -> None:
        name = await begun(store, quota_gb=4 * 32 / (1 << 30))
        for version in (2, 3):
            held(store, await store.step(version, name), version)
        before = store.store.stats()["sweeps"]
        staging = asyncio.create_task(store.stage(4))
        await store.clock.sleep(LONG_S)
        stats = store.store.stats()
        assert stats["quota_refused"] > 100, "its trainer has asked again and again"
        assert stats["sweeps"] - before <= LONG_S / SWEEP_INTERVAL_S + 8
        assert "with version 4" in stats["quota_trouble"] and "waits" in stats["quota_trouble"]
        [refused] = await told(store, "weights_refused")
        assert (refused["job"], refused["version"], refused["held"]) == (JOB, 4, 160)
        assert "unpin" in str(refused["fix"])
        assert "version 4" in line(store, refused) and "unpin" in line(store, refused)
        await asked(store, quota_gb=1.0)
        await store.commit(4, await staging, name)
        await store.clock.sleep(2 * SWEEP_INTERVAL_S)
        assert store.store.stats()["quota_trouble"] == ""

    def line(store: StoreBench, fields: dict[str, object]) -> str:
        return event_text.format_event(Event("1-0", 0, "weights_refused", fields))

    on_store(tmp_path, story)


@story_on(on_store, "tmp_path")
async def test_what_a_job_that_is_over_was_refused_is_no_trouble(store: StoreBench) -> None:
    name = await begun(store, quota_gb=3 * 32 / (1 << 30))
    held(store, await store.step(2, name), 2)
    staging = asyncio.create_task(store.stage(3))
    await store.clock.sleep(SWEEP_INTERVAL_S)
    assert "waits" in store.store.stats()["quota_trouble"]
    staging.cancel()
    await jobs.cancel(store.state, JOB, "stop")
    await store.clock.sleep(2 * SWEEP_INTERVAL_S)
    assert store.store.stats()["quota_trouble"] == ""


@story_on(on_store, "tmp_path")
async def test_a_version_committed_otherwise_does_not_wait_for_room(store: StoreBench) -> None:
    second = await store.step(2, await begun(store))
    await asked(store, quota_gb=32 / (1 << 30))
    with pytest.raises(AlreadyCommitted, match=second):
        await store.store.stage_version(offered(store, 2))


@story_on(on_store, "tmp_path")
async def test_a_version_of_a_job_that_is_over_is_refused(store: StoreBench) -> None:
    held(store, await store.step(2, await begun(store)), 2)
    await asked(store, quota_gb=32 / (1 << 30))
    await jobs.cancel(store.state, JOB, "stop")
    with pytest.raises(QuotaExceeded, match="with version 3 the versions of"):
        await store.store.stage_version(offered(store, 3))


def offered(store: StoreBench, version: int) -> Manifest:
    """Stage weights that no step made, beside the versions of the bench."""
    chunk = store.chunks.write(bytes(32))
    return Manifest(JOB, 0, version, [TensorPiece("other", "F32", [8], chunk, 0, 32, 0, 0, 8)])


def test_who_waits_for_a_quota_says_so() -> None:
    code, text = to_wire(QuotaExceeded("with version 4 the versions of j have 5 GiB"))
    what, on = describe_wait(from_wire(code, text))
    assert on == "quota" and "versions of j have 5 GiB" in what


LINEAR = {f"0.{n}": VersionNumber(0, n) for n in range(13)}


def test_the_newest_and_each_kth_stay() -> None:
    kept = find_requested(LINEAR, VersionNumber(0, 11), {"keep": 2, "keep_every": 4})
    assert kept == {"0.10": "keep", "0.11": "keep", "0.4": "keep_every", "0.8": "keep_every"}


def test_without_the_table_the_current_one_stays() -> None:
    assert find_requested(LINEAR, VersionNumber(0, 5), {}) == {"0.5": "keep"}
    assert find_requested({}, VersionNumber(0, -1), {"keep": 3}) == {}


def test_what_a_new_lineage_has_left_behind_counts_no_more() -> None:
    versions = LINEAR | {"1.5": VersionNumber(1, 5), "1.6": VersionNumber(1, 6)}
    kept = find_requested(versions, VersionNumber(1, 6), {"keep": 3, "keep_every": 4})
    assert set(kept) == {"0.4", "1.5", "1.6"}, "8 and 12 of the lineage before lead nowhere"


def test_a_version_that_was_staged_twice_stays_twice() -> None:
    versions = {"a": VersionNumber(0, 1), "b": VersionNumber(0, 1)}
    assert find_ancestors(versions, VersionNumber(0, 1)) == {1: ["a", "b"]}


numbers = st.builds(VersionNumber, st.integers(0, 3), st.integers(0, 20))


@given(st.dictionaries(st.text(min_size=1, max_size=3), numbers), numbers, st.integers(1, 6))
def test_of_each_number_up_to_the_current_one_the_last_lineage_counts(
    versions: dict[str, VersionNumber], current: VersionNumber, keep: int
) -> None:
    led = find_ancestors(versions, current)
    reachable = {
        m: n
        for m, n in versions.items()
        if n.version <= current.version and n.lineage <= current.lineage
    }
    assert sorted(led) == sorted({n.version for n in reachable.values()})
    for number, manifests in led.items():
        best = max(n.lineage for n in reachable.values() if n.version == number)
        assert set(manifests) == {
            m for m, n in reachable.items() if n == VersionNumber(best, number)
        }
    kept = find_requested(versions, current, {"keep": keep})
    assert {versions[m].version for m in kept} == set(sorted(led)[-keep:])


NAMES = [f"step-000-{n:06d}" for n in range(6)]


def test_the_committed_checkpoint_and_those_just_before_it_stay() -> None:
    assert find_expired(NAMES[:5], NAMES[4], keep_count=3) == NAMES[:2]


def test_a_checkpoint_whose_step_is_being_committed_stays() -> None:
    assert NAMES[5] not in find_expired(NAMES, NAMES[4], keep_count=1)


def test_nothing_goes_while_nothing_is_committed() -> None:
    assert find_expired(NAMES, "", keep_count=1) == []


def test_the_committed_one_stays_even_if_none_is_asked_for() -> None:
    assert find_expired(NAMES, NAMES[5], keep_count=0) == NAMES[:5]


def row(reference: str, lineage: int = 0, version: int = 0, **more: str) -> JobRow:
    document = {
        "models": {"reference": {"path": reference}},
        "training": {"checkpoint_every": 4},
        "budget": {"steps": 10},
    }
    whole: dict[str, Any] = dict.fromkeys(
        ("lineage", "version", "steps_done", "cursor", "admitted", *COUNT_FIELDS), 0
    )
    text: dict[str, Any] = {
        "id": "j",
        "phase": "training",
        "run_dir": "",
        "checkpoint": "",
        "error": "",
    }
    whole |= {"lineage": lineage, "version": version}
    text |= {"manifest": "now", **more}
    return JobRow(document=document, **text, **whole)


def test_the_current_the_best_and_a_first_version_that_is_the_reference_stay() -> None:
    assert find_permanent(row("initial", initial_manifest="first", best_manifest="best")) == {
        "now",
        "best",
        "first",
    }


def test_a_first_version_that_nobody_compares_with_may_go() -> None:
    assert find_permanent(row("", initial_manifest="first")) == {"now"}
    assert find_permanent(row("initial", manifest="")) == set()


VERSIONS = {f"{lineage}.{n}": VersionNumber(lineage, n) for lineage in range(3) for n in range(11)}


def test_staged_versions_and_the_newest_that_a_checkpoint_is_written_of_are_awaited() -> None:
    later = {f"2.{n}" for n in range(11)}
    assert find_awaited(row("", 1, 6), VERSIONS) == {"1.4", "1.7", "1.8", "1.9", "1.10"} | later
    assert find_awaited(row("", 1, 8), VERSIONS) == {"1.8", "1.9", "1.10"} | later
    assert find_awaited(row("", 1, 10), VERSIONS) == {"1.10"} | later, (
        "the last step's is written too"
    )


def test_before_the_first_commit_all_that_was_staged_is_awaited() -> None:
    assert find_awaited(row("", 0, -1), VERSIONS) == set(VERSIONS)
