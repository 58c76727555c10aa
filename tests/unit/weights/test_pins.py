"""Retention by pins, quotas and the `[weights]` section of a job."""

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


async def start_run(store: StoreBench, **weights: float) -> str:
    """Start a run with a checkpoint at version 1 and return the checkpoint's name."""
    await store.submit()
    if weights:
        await change_weights(store, **weights)
    await store.begin()
    name = await store.save(1, first := await store.stage(1))
    await store.commit(1, first, name)
    return name


async def change_weights(store: StoreBench, **weights: float) -> None:
    """Change the `[weights]` section of the job."""
    document = store.document | {"weights": store.document["weights"] | weights}
    await jobs.change_document(store.state, JOB, document, {}, f"change {weights}")


def pin(store: StoreBench, manifest: str, version: int) -> None:
    version_pin = VersionPin(str(store.run_dir), 0, version, "for the paper", 12.0)
    pin_version(store.chunks, JOB, manifest, version_pin)


@story_on(on_store, "tmp_path")
async def test_pinned_version_is_retained_until_it_is_unpinned(store: StoreBench) -> None:
    name = await start_run(store)
    second = await store.step(2, name)
    pin(store, second, 2)
    await store.step(3, name)
    await store.clock.sleep(LONG_S)
    await store.restart_store()
    await store.clock.sleep(LONG_S)
    assert await store.is_stored(second)
    assert read_pins(store.chunks.directory, JOB)[second].note == "for the paper"
    assert unpin_version(store.chunks.directory, JOB, second)
    assert not unpin_version(store.chunks.directory, JOB, second), (
        "the version is not pinned any more"
    )
    await store.clock.sleep(LONG_S)
    assert not await store.is_stored(second)


@story_on(on_store, "tmp_path")
async def test_version_in_its_deletion_grace_period_can_be_pinned(store: StoreBench) -> None:
    name = await start_run(store)
    second = await store.step(2, name)
    await store.step(3, name)
    # removed from the record; its chunks are still stored
    await store.clock.sleep(DELETION_GRACE_S - SWEEP_INTERVAL_S)
    pin(store, second, 2)
    await store.clock.sleep(LONG_S)
    assert await store.is_stored(second)
    unpin_version(store.chunks.directory, JOB, second)
    await store.clock.sleep(LONG_S)
    assert not await store.is_stored(second)
    with pytest.raises(NotFound, match=second):
        pin(store, second, 2)
    assert read_all_pins(store.chunks.directory) == {}, "a missing version is not pinned"


@story_on(on_store, "tmp_path")
async def test_version_with_a_missing_chunk_cannot_be_pinned(store: StoreBench) -> None:
    name = await start_run(store)
    second = await store.step(2, name)
    [chunk] = list_chunks(await store.store._read_manifest(second))
    store.chunks.chunk_path(chunk).unlink()
    with pytest.raises(NotFound, match="meshrl weights list"):
        pin(store, second, 2)
    assert read_all_pins(store.chunks.directory) == {}


@story_on(on_store, "tmp_path")
async def test_pins_outlive_the_job_and_redis(store: StoreBench) -> None:
    name = await start_run(store)
    second = await store.step(2, name)
    pin(store, second, 2)
    await store.step(3, name)
    await store.lose_redis()
    await store.clock.sleep(LONG_S)
    assert await store.is_stored(second)
    await store.submit()
    await jobs.cancel(store.state, JOB, "stop")
    await deletion.delete_job(store.state, JOB, "delete")
    await store.clock.sleep(LONG_S)
    assert await store.is_stored(second)


@story_on(on_store, "tmp_path")
async def test_pin_with_a_corrupt_file_still_retains_its_version(store: StoreBench) -> None:
    name = await start_run(store)
    second = await store.step(2, name)
    pin(store, second, 2)
    (path,) = (store.chunks.directory / "pins").rglob("*.json")
    path.write_text("{")
    await store.step(3, name)
    await store.clock.sleep(LONG_S)
    assert await store.is_stored(second)


@story_on(on_store, "tmp_path")
async def test_newest_and_each_kth_version_are_retained(store: StoreBench) -> None:
    name = await start_run(store, keep=2, keep_every=3)
    manifests = {n: await store.step(n, name) for n in range(2, 8)}
    await store.clock.sleep(LONG_S)
    retained = [n for n, manifest in manifests.items() if await store.is_stored(manifest)]
    # the checkpoint of version 4 may still be written
    assert retained == [3, 4, 6, 7]


@story_on(on_store, "tmp_path")
async def test_version_beyond_the_quota_waits_after_a_warning(store: StoreBench) -> None:
    four = 4 * 32 / (1 << 30)
    name = await start_run(store, quota_gb=four)
    second = await store.step(2, name)
    pin(store, second, 2)
    await store.clock.sleep(2 * SWEEP_INTERVAL_S)
    assert not await list_events(store)
    await store.step(3, name)
    await store.clock.sleep(2 * SWEEP_INTERVAL_S)
    [warning] = await list_events(store)
    assert (warning["held"], warning["next"], warning["quota"]) == (128, 32, 128)
    assert "128" not in store.store.stats()["quota_trouble"]
    assert "the next one needs" in store.store.stats()["quota_trouble"]
    staging = asyncio.create_task(store.stage(4))
    await store.clock.sleep(LONG_S)
    assert not staging.done() and store.store.stats()["quota_refused"] > 0
    assert unpin_version(store.chunks.directory, JOB, second)
    await store.commit(4, await staging, name)
    await store.clock.sleep(2 * SWEEP_INTERVAL_S)
    assert len(await list_events(store)) == 1, "one event per occurrence"


async def list_events(store: StoreBench, kind: str = "weights_quota") -> list[dict[str, object]]:
    all_events = await events.read_all(store.state)
    return [dict(event.fields) for event in all_events if event.kind == kind]


def test_long_rejected_version_is_reported_once_and_rarely_swept(tmp_path: Path) -> None:
    async def story(store: StoreBench) -> None:
        name = await start_run(store, quota_gb=4 * 32 / (1 << 30))
        for version in (2, 3):
            pin(store, await store.step(version, name), version)
        before = store.store.stats()["sweeps"]
        staging = asyncio.create_task(store.stage(4))
        await store.clock.sleep(LONG_S)
        stats = store.store.stats()
        assert stats["quota_refused"] > 100, "the trainer has retried many times"
        assert stats["sweeps"] - before <= LONG_S / SWEEP_INTERVAL_S + 8
        assert "with version 4" in stats["quota_trouble"] and "waits" in stats["quota_trouble"]
        [event] = await list_events(store, "weights_refused")
        assert (event["job"], event["version"], event["held"]) == (JOB, 4, 160)
        assert "Unpin" in str(event["fix"])
        assert "version 4" in format_line(store, event) and "Unpin" in format_line(store, event)
        await change_weights(store, quota_gb=1.0)
        await store.commit(4, await staging, name)
        await store.clock.sleep(2 * SWEEP_INTERVAL_S)
        assert store.store.stats()["quota_trouble"] == ""

    def format_line(store: StoreBench, fields: dict[str, object]) -> str:
        return event_text.format_event(Event("1-0", 0, "weights_refused", fields))

    on_store(tmp_path, story)


@story_on(on_store, "tmp_path")
async def test_quota_error_is_cleared_when_its_job_ends(store: StoreBench) -> None:
    name = await start_run(store, quota_gb=3 * 32 / (1 << 30))
    pin(store, await store.step(2, name), 2)
    staging = asyncio.create_task(store.stage(3))
    await store.clock.sleep(SWEEP_INTERVAL_S)
    assert "waits" in store.store.stats()["quota_trouble"]
    staging.cancel()
    await jobs.cancel(store.state, JOB, "stop")
    await store.clock.sleep(2 * SWEEP_INTERVAL_S)
    assert store.store.stats()["quota_trouble"] == ""


@story_on(on_store, "tmp_path")
async def test_conflicting_version_fails_without_waiting_for_quota(store: StoreBench) -> None:
    second = await store.step(2, await start_run(store))
    await change_weights(store, quota_gb=32 / (1 << 30))
    with pytest.raises(AlreadyCommitted, match=second):
        await store.store.stage_version(make_manifest(store, 2))


@story_on(on_store, "tmp_path")
async def test_version_of_an_ended_job_is_rejected(store: StoreBench) -> None:
    pin(store, await store.step(2, await start_run(store)), 2)
    await change_weights(store, quota_gb=32 / (1 << 30))
    await jobs.cancel(store.state, JOB, "stop")
    with pytest.raises(QuotaExceeded, match="with version 3 the versions of"):
        await store.store.stage_version(make_manifest(store, 3))


def make_manifest(store: StoreBench, version: int) -> Manifest:
    """Store a chunk that no step made, and return a manifest of it."""
    chunk = store.chunks.write(bytes(32))
    return Manifest(JOB, 0, version, [TensorPiece("other", "F32", [8], chunk, 0, 32, 0, 0, 8)])


def test_wait_for_a_quota_is_described() -> None:
    code, wire_text = to_wire(QuotaExceeded("with version 4 the versions of j have 5 GiB"))
    text, kind = describe_wait(from_wire(code, wire_text))
    assert kind == "quota" and "versions of j have 5 GiB" in text


LINEAR = {f"0.{n}": VersionNumber(0, n) for n in range(13)}


def test_find_requested_selects_newest_and_each_kth() -> None:
    requested = find_requested(LINEAR, VersionNumber(0, 11), {"keep": 2, "keep_every": 4})
    assert requested == {"0.10": "keep", "0.11": "keep", "0.4": "keep_every", "0.8": "keep_every"}


def test_find_requested_defaults_to_the_current_version() -> None:
    assert find_requested(LINEAR, VersionNumber(0, 5), {}) == {"0.5": "keep"}
    assert find_requested({}, VersionNumber(0, -1), {"keep": 3}) == {}


def test_versions_of_an_abandoned_lineage_are_not_requested() -> None:
    versions = LINEAR | {"1.5": VersionNumber(1, 5), "1.6": VersionNumber(1, 6)}
    requested = find_requested(versions, VersionNumber(1, 6), {"keep": 3, "keep_every": 4})
    assert set(requested) == {"0.4", "1.5", "1.6"}, (
        "versions 8 and 12 of the old lineage are abandoned"
    )


def test_version_staged_twice_has_two_ancestor_manifests() -> None:
    versions = {"a": VersionNumber(0, 1), "b": VersionNumber(0, 1)}
    assert find_ancestors(versions, VersionNumber(0, 1)) == {1: ["a", "b"]}


numbers = st.builds(VersionNumber, st.integers(0, 3), st.integers(0, 20))


@given(st.dictionaries(st.text(min_size=1, max_size=3), numbers), numbers, st.integers(1, 6))
def test_ancestors_are_of_the_last_lineage_of_each_number(
    versions: dict[str, VersionNumber], current: VersionNumber, keep: int
) -> None:
    ancestors = find_ancestors(versions, current)
    reachable = {
        m: n
        for m, n in versions.items()
        if n.version <= current.version and n.lineage <= current.lineage
    }
    assert sorted(ancestors) == sorted({n.version for n in reachable.values()})
    for number, manifests in ancestors.items():
        newest = max(n.lineage for n in reachable.values() if n.version == number)
        assert set(manifests) == {
            m for m, n in reachable.items() if n == VersionNumber(newest, number)
        }
    requested = find_requested(versions, current, {"keep": keep})
    assert {versions[m].version for m in requested} == set(sorted(ancestors)[-keep:])


NAMES = [f"step-000-{n:06d}" for n in range(6)]


def test_committed_checkpoint_and_its_predecessors_are_retained() -> None:
    assert find_expired(NAMES[:5], NAMES[4], keep_count=3) == NAMES[:2]


def test_checkpoint_of_a_pending_commit_is_retained() -> None:
    assert NAMES[5] not in find_expired(NAMES, NAMES[4], keep_count=1)


def test_no_checkpoint_expires_before_the_first_commit() -> None:
    assert find_expired(NAMES, "", keep_count=1) == []


def test_committed_checkpoint_is_retained_with_a_limit_of_zero() -> None:
    assert find_expired(NAMES, NAMES[5], keep_count=0) == NAMES[:5]


def row(reference: str, lineage: int = 0, version: int = 0, **more: str) -> JobRow:
    document = {
        "models": {"reference": {"path": reference}},
        "training": {"checkpoint_every": 4},
        "budget": {"steps": 10},
    }
    counts: dict[str, Any] = dict.fromkeys(
        ("lineage", "version", "steps_done", "cursor", "admitted", *COUNT_FIELDS), 0
    )
    texts: dict[str, Any] = {
        "id": "j",
        "phase": "training",
        "run_dir": "",
        "checkpoint": "",
        "error": "",
    }
    counts |= {"lineage": lineage, "version": version}
    texts |= {"manifest": "now", **more}
    return JobRow(document=document, **texts, **counts)


def test_current_best_and_reference_versions_are_permanent() -> None:
    assert find_permanent(row("initial", initial_manifest="first", best_manifest="best")) == {
        "now",
        "best",
        "first",
    }


def test_initial_version_without_reference_use_is_not_permanent() -> None:
    assert find_permanent(row("", initial_manifest="first")) == {"now"}
    assert find_permanent(row("initial", manifest="")) == set()


VERSIONS = {f"{lineage}.{n}": VersionNumber(lineage, n) for lineage in range(3) for n in range(11)}


def test_staged_and_checkpointed_versions_are_awaited() -> None:
    later_lineages = {f"2.{n}" for n in range(11)}
    assert (
        find_awaited(row("", 1, 6), VERSIONS)
        == {"1.4", "1.7", "1.8", "1.9", "1.10"} | later_lineages
    )
    assert find_awaited(row("", 1, 8), VERSIONS) == {"1.8", "1.9", "1.10"} | later_lineages
    assert find_awaited(row("", 1, 10), VERSIONS) == {"1.10"} | later_lineages, (
        "the last step's checkpoint is written as well"
    )


def test_all_staged_versions_are_awaited_before_the_first_commit() -> None:
    assert find_awaited(row("", 0, -1), VERSIONS) == set(VERSIONS)
