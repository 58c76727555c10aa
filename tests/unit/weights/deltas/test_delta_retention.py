"""Retention of delta data: blobs while their target version lives, anchors while a host has one."""

from __future__ import annotations

import itertools
import json

import pytest

from meshrl.common.api.transfer.deltas import (
    BeginDelta,
    ChunkDelta,
    DeltaQuery,
    DeltaSet,
    StageDelta,
    VersionAcknowledgement,
    VersionRef,
)
from meshrl.common.api.weights import STORE_NAME, Weights
from meshrl.common.base.errors import BadMessage
from meshrl.common.base.files import documents
from meshrl.common.weights.store.weight_store_client import put_chunk
from meshrl.services.weights.deltas import MAX_BASES, MAX_PARTS, VersionHolder, choose_bases
from meshrl.services.weights.versions.run_versions import RunVersions
from tests.stories import story_on
from tests.unit.weights.store_bench import JOB, StoreBench, on_store

LONG_S = 80.0  # longer than every grace period but that of orphans
SILENT_S = 3700.0  # longer than a silent host counts
ANCHORS = 2


async def begun(
    store: StoreBench, version: int, manifest: str, parts: int = 1, host: str = ""
) -> list[VersionRef]:
    """Request the base versions of deltas to a version, as the trainer does."""
    asked = BeginDelta(JOB, VersionRef(0, version, manifest), ANCHORS, parts=parts, host=host)
    return list((await store.trainer.ref(STORE_NAME).call(Weights.begin_deltas, asked)).bases)


async def received(store: StoreBench, version: int, manifest: str, host: str = "two") -> None:
    told = VersionAcknowledgement(host, VersionRef(0, version, manifest), JOB)
    await store.trainer.ref(STORE_NAME).call(Weights.acknowledge_version, told)


async def made(store: StoreBench, base: VersionRef, version: int, manifest: str) -> str:
    """Publish a delta to a version and return its blob."""
    blob = await put_chunk(
        store.trainer, store.bulk, store.random.hex_token(64).encode(), "a delta"
    )
    deltas = DeltaSet(base, VersionRef(0, version, manifest), [ChunkDelta("a", "b", blob, 0, 64)])
    told = StageDelta(deltas, is_last=True)
    assert await store.trainer.ref(STORE_NAME).call(Weights.stage_deltas, told)
    return blob


@story_on(on_store, "tmp_path")
async def test_blobs_stay_as_long_as_the_version_that_they_make(store: StoreBench) -> None:
    await store.submit()
    first = await store.begin()
    name = await store.save(1, second := await store.stage(1))
    await received(store, 0, first)
    [base] = await begun(store, 1, second)
    blob = await made(store, base, 1, second)
    await store.commit(1, second, name)
    await store.clock.sleep(LONG_S)
    assert store.chunks.has(blob)
    third = await store.step(2, name)
    fourth = await store.step(3, name)
    await store.clock.sleep(LONG_S)
    assert await store.stored(fourth) and not await store.stored(third)
    assert store.chunks.has(blob), "a checkpoint is of its version"
    for number in range(4, 8):
        last = await store.stage(number)
        await store.commit(number, last, await store.save(number, last))
    await store.clock.sleep(LONG_S)
    assert await store.stored(last) and not await store.stored(second)
    assert not store.chunks.has(blob)


def why(store: StoreBench, version: int, manifest: str) -> dict[int, list[str]]:
    """Return the reasons for which each version is retained, as users see them; the last version
    was committed.
    """
    documents.write(store.run_dir / "job.json", {"job": JOB, "document": store.document})
    fields = {"version": version, "manifest": manifest}
    event = {"id": "1-0", "ms": 0, "kind": "step", "fields": fields}
    (store.run_dir / "events.jsonl").write_text(json.dumps(event) + "\n")
    return {one.version: one.why for one in RunVersions.read(store.run_dir).versions}


@pytest.mark.parametrize("parts", [1, 2])
@story_on(on_store, "tmp_path")
async def test_a_host_that_has_only_some_of_the_chunks_wants_the_deltas_of_the_others(
    store: StoreBench, parts: int
) -> None:
    await store.submit()
    first = await store.begin()
    await received(store, 0, first)
    found = await begun(store, 1, await store.stage(1), parts, host="two")
    assert found == ([] if parts == 1 else [VersionRef(0, 0, first)])


@pytest.mark.rotating(3)
@story_on(on_store, "tmp_path")
async def test_an_anchor_stays_while_a_host_holds_it(store: StoreBench) -> None:
    await store.submit()
    await begun(store, 0, await store.begin())
    name, manifests = "", [""]
    for number in range(1, 6):
        manifests.append(manifest := await store.stage(number))
        name = name or await store.save(number, manifest)
        await begun(store, number, manifest)
        await store.commit(number, manifest, name)
        if number < 4:
            await received(store, number, manifest)
    await store.clock.sleep(LONG_S)
    assert await store.stored(manifests[2]), "who fell behind gets deltas from there"
    assert not await store.stored(manifests[3])
    assert why(store, 5, manifests[5])[2] == ["anchor"]
    assert "anchor" not in why(store, 5, manifests[5])[5]
    await store.clock.sleep(SILENT_S)
    assert not await store.stored(manifests[2])
    assert sorted(why(store, 5, manifests[5])) == [0, 1, 4, 5]


@story_on(on_store, "tmp_path")
async def test_who_makes_deltas_and_is_silent_is_not_waited_for(store: StoreBench) -> None:
    await store.submit()
    await received(store, 0, await store.begin())
    second = await store.stage(1)
    assert await begun(store, 1, second, parts=2)
    clock, ref = store.clock, store.trainer.ref(STORE_NAME)

    async def asked(host: str) -> tuple[bool, float]:
        began = clock.monotonic()
        told = await ref.call(Weights.fetch_deltas, DeltaQuery(second, host, wait_s=5.0))
        return told.has_more, clock.monotonic() - began

    assert (await asked("three"))[0] is False, "it holds nothing that they are from"
    more, took_s = await asked("two")
    assert more and 4.9 < took_s < 6.0
    await made(store, VersionRef(0, 0, "whichever"), 1, second)
    assert (await asked("two"))[0] is True, "the other part goes on"
    await clock.sleep(60.0)
    more, took_s = await asked("two")
    assert not more and took_s < 1.0


@pytest.mark.parametrize(
    ("parts", "part", "anchors"), [(1 << 40, 0, 2), (0, 0, 2), (2, 2, 2), (2, -1, 2), (1, 0, -1)]
)
@story_on(on_store, "tmp_path")
async def test_parts_that_there_cannot_be_are_refused(
    store: StoreBench, parts: int, part: int, anchors: int
) -> None:
    await store.submit()
    await received(store, 0, await store.begin())
    target = VersionRef(0, 1, await store.stage(1))
    asked = BeginDelta(JOB, target, anchors, part, parts)
    with pytest.raises(BadMessage, match="of a delta"):
        await store.trainer.ref(STORE_NAME).call(Weights.begin_deltas, asked)
    assert await begun(store, 1, target.manifest, parts=MAX_PARTS)


@story_on(on_store, "tmp_path")
async def test_of_a_job_that_nobody_knows_nothing_is_remembered(store: StoreBench) -> None:
    await store.submit()
    await received(store, 0, await store.begin())
    for number in range(3):
        asked = BeginDelta(f"another {number}", VersionRef(0, 1, "0" * 64), ANCHORS)
        assert not (await store.trainer.ref(STORE_NAME).call(Weights.begin_deltas, asked)).bases
    assert not store.store.delta_registry._anchor_intervals
    assert await begun(store, 1, await store.stage(1))
    assert list(store.store.delta_registry._anchor_intervals) == [JOB]


@story_on(on_store, "tmp_path")
async def test_a_newer_version_ends_the_wait_for_an_older_one(store: StoreBench) -> None:
    await store.submit()
    await received(store, 0, await store.begin())
    second, third = await store.stage(1), await store.stage(2)
    base = (await begun(store, 1, second))[0]
    await begun(store, 2, third)
    ref = store.trainer.ref(STORE_NAME)
    assert not (
        await ref.call(Weights.fetch_deltas, DeltaQuery(second, "two", wait_s=5.0))
    ).has_more
    late = StageDelta(DeltaSet(base, VersionRef(0, 1, second), []))
    assert not await ref.call(Weights.stage_deltas, late)
    assert (await ref.call(Weights.fetch_deltas, DeltaQuery(third, "two"))).has_more


@story_on(on_store, "tmp_path")
async def test_what_a_host_tells_of_that_is_not_on_record_keeps_nothing(store: StoreBench) -> None:
    await store.submit()
    await begun(store, 0, await store.begin())
    manifest = await store.stage(1)
    await received(store, 2, manifest)  # by a number that is not its own
    await received(store, 2, "0" * 64)
    assert await begun(store, 4, "f" * 32) == []
    await received(store, 1, manifest)
    assert await begun(store, 4, "f" * 32) == [VersionRef(0, 1, manifest)]


@story_on(on_store, "tmp_path")
async def test_a_host_that_reads_an_older_version_holds_the_newer_too(store: StoreBench) -> None:
    await store.submit()
    first = await store.begin()
    await begun(store, 0, first)
    second = await store.stage(1)
    await received(store, 1, second)
    await received(store, 0, first)
    assert await begun(store, 4, "f" * 32) == [VersionRef(0, 1, second)]


def version(number: int, lineage: int = 0) -> VersionRef:
    return VersionRef(lineage, number, f"{lineage}-{number}")


def held(*numbers: int, anchor: int | None = None) -> list[VersionHolder]:
    mark = None if anchor is None else version(anchor)
    return [VersionHolder(0.0, version(number), mark) for number in numbers]


def test_nobody_receives() -> None:
    assert choose_bases([], 16) == []


def test_all_have_the_last_one() -> None:
    assert choose_bases(held(7, 7, 7), 16) == [version(7)]


def test_most_have_the_last_one() -> None:
    assert choose_bases(held(7, 7, 6), 0) == [version(7)]
    assert choose_bases(held(7, 7) + held(5, 6, anchor=4), 4) == [version(7), version(4)]
    assert choose_bases(held(7, 7, 6, 6, 5), 4) == [
        version(7),
        version(6),
    ]  # a host without an anchor yet


def test_of_as_many_the_newest_is_first() -> None:
    assert choose_bases(held(6, 7), 16)[0] == version(7)
    newer = VersionHolder(0.0, version(2, lineage=1))
    assert choose_bases([*held(7), newer], 16)[0] == version(2, lineage=1)


def test_whatever_hosts_hold_few_are_made_and_the_commonest_is_among_them() -> None:
    for numbers in itertools.product(range(4), repeat=4):
        for anchors in (0, 2):
            found = choose_bases(held(*numbers, anchor=0), anchors)
            assert 1 <= len(found) <= MAX_BASES and len(set(map(repr, found))) == len(found)
            most = max(numbers.count(number) for number in numbers)
            assert numbers.count(found[0].version) == most
