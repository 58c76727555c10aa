"""Retention of delta data: blobs as long as their target version, anchors as long as a host has
one.
"""

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


async def request_bases(
    store: StoreBench, version: int, manifest: str, parts: int = 1, host: str = ""
) -> list[VersionRef]:
    """Request the base versions of deltas to a version, as the trainer does."""
    request = BeginDelta(JOB, VersionRef(0, version, manifest), ANCHORS, parts=parts, host=host)
    return list((await store.trainer.ref(STORE_NAME).call(Weights.begin_deltas, request)).bases)


async def acknowledge(store: StoreBench, version: int, manifest: str, host: str = "two") -> None:
    acknowledgement = VersionAcknowledgement(host, VersionRef(0, version, manifest), JOB)
    await store.trainer.ref(STORE_NAME).call(Weights.acknowledge_version, acknowledgement)


async def publish_delta(store: StoreBench, base: VersionRef, version: int, manifest: str) -> str:
    """Publish a delta to a version and return its blob."""
    blob = await put_chunk(
        store.trainer, store.bulk, store.random.hex_token(64).encode(), "a delta"
    )
    deltas = DeltaSet(base, VersionRef(0, version, manifest), [ChunkDelta("a", "b", blob, 0, 64)])
    staging = StageDelta(deltas, is_last=True)
    assert await store.trainer.ref(STORE_NAME).call(Weights.stage_deltas, staging)
    return blob


@story_on(on_store, "tmp_path")
async def test_delta_blobs_are_retained_with_their_target_version(store: StoreBench) -> None:
    await store.submit()
    first = await store.begin()
    name = await store.save(1, second := await store.stage(1))
    await acknowledge(store, 0, first)
    [base] = await request_bases(store, 1, second)
    blob = await publish_delta(store, base, 1, second)
    await store.commit(1, second, name)
    await store.clock.sleep(LONG_S)
    assert store.chunks.has(blob)
    third = await store.step(2, name)
    fourth = await store.step(3, name)
    await store.clock.sleep(LONG_S)
    assert await store.is_stored(fourth) and not await store.is_stored(third)
    assert store.chunks.has(blob), "a checkpoint has this version"
    for number in range(4, 8):
        last = await store.stage(number)
        await store.commit(number, last, await store.save(number, last))
    await store.clock.sleep(LONG_S)
    assert await store.is_stored(last) and not await store.is_stored(second)
    assert not store.chunks.has(blob)


def list_retention_reasons(store: StoreBench, version: int, manifest: str) -> dict[int, list[str]]:
    """Return the retention reasons by version as users see them; the last version is committed."""
    documents.write(store.run_dir / "job.json", {"job": JOB, "document": store.document})
    fields = {"version": version, "manifest": manifest}
    event = {"id": "1-0", "ms": 0, "kind": "step", "fields": fields}
    (store.run_dir / "events.jsonl").write_text(json.dumps(event) + "\n")
    return {one.version: one.why for one in RunVersions.read(store.run_dir).versions}


@pytest.mark.parametrize("parts", [1, 2])
@story_on(on_store, "tmp_path")
async def test_bases_include_the_sending_host_only_if_it_sends_in_parts(
    store: StoreBench, parts: int
) -> None:
    await store.submit()
    first = await store.begin()
    await acknowledge(store, 0, first)
    bases = await request_bases(store, 1, await store.stage(1), parts, host="two")
    assert bases == ([] if parts == 1 else [VersionRef(0, 0, first)])


@pytest.mark.rotating(3)
@story_on(on_store, "tmp_path")
async def test_anchor_is_retained_while_a_host_has_it(store: StoreBench) -> None:
    await store.submit()
    await request_bases(store, 0, await store.begin())
    name, manifests = "", [""]
    for number in range(1, 6):
        manifests.append(manifest := await store.stage(number))
        name = name or await store.save(number, manifest)
        await request_bases(store, number, manifest)
        await store.commit(number, manifest, name)
        if number < 4:
            await acknowledge(store, number, manifest)
    await store.clock.sleep(LONG_S)
    assert await store.is_stored(manifests[2]), (
        "a host that fell behind gets deltas from this version"
    )
    assert not await store.is_stored(manifests[3])
    assert list_retention_reasons(store, 5, manifests[5])[2] == ["anchor"]
    assert "anchor" not in list_retention_reasons(store, 5, manifests[5])[5]
    await store.clock.sleep(SILENT_S)
    assert not await store.is_stored(manifests[2])
    assert sorted(list_retention_reasons(store, 5, manifests[5])) == [0, 1, 4, 5]


@story_on(on_store, "tmp_path")
async def test_silent_delta_sender_is_not_awaited(store: StoreBench) -> None:
    await store.submit()
    await acknowledge(store, 0, await store.begin())
    second = await store.stage(1)
    assert await request_bases(store, 1, second, parts=2)
    clock, ref = store.clock, store.trainer.ref(STORE_NAME)

    async def query_deltas(host: str) -> tuple[bool, float]:
        start_s = clock.monotonic()
        batch = await ref.call(Weights.fetch_deltas, DeltaQuery(second, host, wait_s=5.0))
        return batch.has_more, clock.monotonic() - start_s

    assert (await query_deltas("three"))[0] is False, "the host has no base of the deltas"
    more, took_s = await query_deltas("two")
    assert more and 4.9 < took_s < 6.0
    await publish_delta(store, VersionRef(0, 0, "whichever"), 1, second)
    assert (await query_deltas("two"))[0] is True, "the other part is not finished"
    await clock.sleep(60.0)
    more, took_s = await query_deltas("two")
    assert not more and took_s < 1.0


@pytest.mark.parametrize(
    ("parts", "part", "anchors"), [(1 << 40, 0, 2), (0, 0, 2), (2, 2, 2), (2, -1, 2), (1, 0, -1)]
)
@story_on(on_store, "tmp_path")
async def test_invalid_part_counts_are_rejected(
    store: StoreBench, parts: int, part: int, anchors: int
) -> None:
    await store.submit()
    await acknowledge(store, 0, await store.begin())
    target = VersionRef(0, 1, await store.stage(1))
    request = BeginDelta(JOB, target, anchors, part, parts)
    with pytest.raises(BadMessage, match="invalid delta"):
        await store.trainer.ref(STORE_NAME).call(Weights.begin_deltas, request)
    assert await request_bases(store, 1, target.manifest, parts=MAX_PARTS)


@story_on(on_store, "tmp_path")
async def test_unknown_jobs_are_not_recorded(store: StoreBench) -> None:
    await store.submit()
    await acknowledge(store, 0, await store.begin())
    for number in range(3):
        request = BeginDelta(f"another {number}", VersionRef(0, 1, "0" * 64), ANCHORS)
        assert not (await store.trainer.ref(STORE_NAME).call(Weights.begin_deltas, request)).bases
    assert not store.store.delta_registry._anchor_intervals
    assert await request_bases(store, 1, await store.stage(1))
    assert list(store.store.delta_registry._anchor_intervals) == [JOB]


@story_on(on_store, "tmp_path")
async def test_newer_version_ends_the_wait_for_an_older_one(store: StoreBench) -> None:
    await store.submit()
    await acknowledge(store, 0, await store.begin())
    second, third = await store.stage(1), await store.stage(2)
    base = (await request_bases(store, 1, second))[0]
    await request_bases(store, 2, third)
    ref = store.trainer.ref(STORE_NAME)
    assert not (
        await ref.call(Weights.fetch_deltas, DeltaQuery(second, "two", wait_s=5.0))
    ).has_more
    late = StageDelta(DeltaSet(base, VersionRef(0, 1, second), []))
    assert not await ref.call(Weights.stage_deltas, late)
    assert (await ref.call(Weights.fetch_deltas, DeltaQuery(third, "two"))).has_more


@story_on(on_store, "tmp_path")
async def test_acknowledged_versions_without_a_record_are_ignored(store: StoreBench) -> None:
    await store.submit()
    await request_bases(store, 0, await store.begin())
    manifest = await store.stage(1)
    await acknowledge(store, 2, manifest)  # the number of another version
    await acknowledge(store, 2, "0" * 64)
    assert await request_bases(store, 4, "f" * 32) == []
    await acknowledge(store, 1, manifest)
    assert await request_bases(store, 4, "f" * 32) == [VersionRef(0, 1, manifest)]


@story_on(on_store, "tmp_path")
async def test_host_that_reads_an_older_version_still_has_the_newer(store: StoreBench) -> None:
    await store.submit()
    first = await store.begin()
    await request_bases(store, 0, first)
    second = await store.stage(1)
    await acknowledge(store, 1, second)
    await acknowledge(store, 0, first)
    assert await request_bases(store, 4, "f" * 32) == [VersionRef(0, 1, second)]


def version(number: int, lineage: int = 0) -> VersionRef:
    return VersionRef(lineage, number, f"{lineage}-{number}")


def make_holders(*numbers: int, anchor: int | None = None) -> list[VersionHolder]:
    anchor_version = None if anchor is None else version(anchor)
    return [VersionHolder(0.0, version(number), anchor_version) for number in numbers]


def test_no_bases_without_receivers() -> None:
    assert choose_bases([], 16) == []


def test_single_base_if_all_hosts_have_the_last_version() -> None:
    assert choose_bases(make_holders(7, 7, 7), 16) == [version(7)]


def test_bases_cover_hosts_that_fell_behind() -> None:
    assert choose_bases(make_holders(7, 7, 6), 0) == [version(7)]
    assert choose_bases(make_holders(7, 7) + make_holders(5, 6, anchor=4), 4) == [
        version(7),
        version(4),
    ]
    # a host without an anchor yet
    assert choose_bases(make_holders(7, 7, 6, 6, 5), 4) == [
        version(7),
        version(6),
    ]


def test_newest_base_comes_first_among_equally_common_ones() -> None:
    assert choose_bases(make_holders(6, 7), 16)[0] == version(7)
    newer = VersionHolder(0.0, version(2, lineage=1))
    assert choose_bases([*make_holders(7), newer], 16)[0] == version(2, lineage=1)


def test_bases_are_bounded_and_start_with_the_most_common() -> None:
    for numbers in itertools.product(range(4), repeat=4):
        for anchors in (0, 2):
            bases = choose_bases(make_holders(*numbers, anchor=0), anchors)
            assert 1 <= len(bases) <= MAX_BASES and len(set(map(repr, bases))) == len(bases)
            max_count = max(numbers.count(number) for number in numbers)
            assert numbers.count(bases[0].version) == max_count
