"""Ledger of a shard on record: each record is written once in spite of disk faults."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshrl.common.base.files.corruption import CORRUPTION_EVENT, QUARANTINE_DIRECTORY
from meshrl.common.base.random import Random
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.config import JobConfig
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.records.ledger import (
    HEADER,
    RecordKind,
    encode_record,
    iter_records,
    list_segments,
    make_trajectory_id,
)
from meshrl.common.records.token_records import MEMBER_BITS, TokenRows
from meshrl.common.state import events, groups, jobs, registry, steps
from meshrl.services.rollout.record.shard_ledger import ShardLedger
from meshrl.sim.virtual_loop import VirtualClock, run_virtual
from meshrl.view.recording.audit import find_open_groups
from tests.meshes import alone
from tests.simulated_host import SimulatedHost
from tests.stories import story_on

JOB = "j"


class Bench:
    def __init__(self, clock: VirtualClock, random: Random, directory: Path) -> None:
        self.clock, self.random = clock, random
        self.host = SimulatedHost(clock, random.child("host"))
        self.mesh = alone(f"rollout/{JOB}/0", clock, random, self.host)
        self.data = JobData(JOB, JobConfig(name=JOB), directory, directory / "run")

    async def start(self) -> ShardLedger:
        await self.mesh.join(None)
        document = self.data.config.to_document()
        await jobs.submit(self.mesh.state, JOB, document, str(self.data.run_dir), "submit")
        ledger = ShardLedger(self.mesh, self.data)
        await ledger.take_over(lambda group, member: 0)
        return ledger

    async def admit(self, want: int) -> None:
        """Open groups 0 to `want` - 1."""
        state, name, token = self.mesh.state, self.mesh.name, self.mesh.token
        await steps.commit_initial(state, JOB, name, token, 0, steps.VersionReferences("m0", "c0"))
        await jobs.set_phase(state, JOB, jobs.Phase.TRAINING, token, name)
        opened = await groups.admit_groups(state, JOB, name, token, want, "admit")
        assert [a.group for a in opened] == list(range(want))

    async def restart_shard(self) -> Mesh:
        """Replace the dead shard by a new incarnation."""
        state = self.mesh.state
        await registry.evict(state, self.mesh.name, self.mesh.incarnation)
        self.mesh = alone(f"rollout/{JOB}/0", self.clock, self.random, self.host, state=state)
        await self.mesh.join(None)
        return self.mesh


def run_on_bench(directory: Path, story: Callable[[Bench], Any]) -> None:
    async def main(clock: VirtualClock, random: Random) -> None:
        bench = Bench(clock, random, directory)
        await story(bench)
        await bench.mesh.leave()

    run_virtual(main, limit_s=3600.0)


def list_closed_groups(ledger: ShardLedger) -> list[int]:
    return [r.payload[0] for r in iter_records(ledger.directory) if r.kind is RecordKind.CLOSE]


@story_on(run_on_bench, "tmp_path")
async def test_concurrent_records_keep_their_order(bench: Bench) -> None:
    ledger = await bench.start()
    await asyncio.gather(
        *(ledger.write_records((RecordKind.CLOSE, [n, "ready"])) for n in range(50))
    )
    assert list_closed_groups(ledger) == list(range(50))
    ledger.defer_record(RecordKind.TURN, [1 << MEMBER_BITS, "said"], 1)
    await ledger.write_records((RecordKind.CLOSE, [50, "ready"]))
    assert [r.kind for r in iter_records(ledger.directory)][-2:] == [
        RecordKind.TURN,
        RecordKind.CLOSE,
    ]
    await ledger.close()


@story_on(run_on_bench, "tmp_path")
async def test_full_disk_delays_writers_without_duplicates(bench: Bench) -> None:
    ledger = await bench.start()
    await ledger.write_records((RecordKind.CLOSE, [0, "ready"]))
    bench.host.disk_bytes = ledger.bytes_written + 10
    waiting = [
        asyncio.create_task(ledger.write_records((RecordKind.CLOSE, [n, "ready"])))
        for n in range(1, 4)
    ]
    await bench.clock.sleep(5.0)
    waiting += [
        asyncio.create_task(ledger.write_records((RecordKind.CLOSE, [n, "ready"])))
        for n in range(4, 7)
    ]
    await bench.clock.sleep(5.0)
    assert not any(task.done() for task in waiting) and list_closed_groups(ledger) == [0]
    bench.host.disk_bytes = -1
    await asyncio.gather(*waiting)
    assert list_closed_groups(ledger) == list(range(7))
    await ledger.close()


@story_on(run_on_bench, "tmp_path")
async def test_shard_closes_with_a_full_disk(bench: Bench) -> None:
    ledger = await bench.start()
    bench.host.disk_bytes = 0
    waiting = asyncio.create_task(ledger.write_records((RecordKind.CLOSE, [1, "ready"])))
    await bench.clock.sleep(5.0)
    async with bench.clock.timeout(1.0, "the end"):
        await ledger.close()
    waiting.cancel()
    assert list_closed_groups(ledger) == []


@story_on(run_on_bench, "tmp_path")
async def test_full_segments_rotate_and_finished_ones_are_removed(bench: Bench) -> None:
    def tokens(group: int) -> TokenRows:
        n = 200_000  # a segment is full after six
        return TokenRows(
            trajectory_ids=np.array([group << MEMBER_BITS], np.int64),
            counts=np.array([n], np.int32),
            tokens=np.arange(n, dtype=np.int32),
            logprobs=np.zeros(n, np.float32),
            versions=np.zeros(n, np.int32),
        )

    ledger = await bench.start()
    syncing = asyncio.create_task(ledger.sync_forever())
    for group in range(20):
        await ledger.write_tokens(tokens(group))
        await bench.clock.sleep(0.1)
    assert len(list_segments(ledger.directory)) == 4
    found = [r.payload.trajectory_ids[0] >> MEMBER_BITS for r in iter_records(ledger.directory)]
    assert found == list(range(20))
    for group in range(20):
        await ledger.forget_group(group)
    list_tokens = [path.name for path in list_segments(ledger.directory)]
    on_record = await groups.claim_shard(bench.mesh.state, JOB, bench.mesh.name, bench.mesh.token)
    assert len(list_tokens) == 1 and list(on_record) == list_tokens
    syncing.cancel()
    await ledger.close()


@story_on(run_on_bench, "tmp_path")
async def test_groups_with_a_ledger_on_another_host_are_requeued_as_host_lost(
    bench: Bench, tmp_path: Path
) -> None:
    ledger = await bench.start()
    await bench.admit(2)
    await ledger.write_records((RecordKind.OPEN, [0, 0, 0, 0, [1, 2]]), groups=[0])
    await ledger.close()
    mesh = await bench.restart_shard()
    size = bench.data.config.algorithm.group_size

    bench.data = bench.data.for_remote_host(tmp_path / "bundles/b", tmp_path / "runs/j/1")
    moved = ShardLedger(mesh, bench.data)
    assert await moved.take_over(lambda group, member: 0) == {}
    row = await jobs.read_job(mesh.state, JOB)
    assert row.host_lost == 2 * size
    assert await groups.read_open_groups(mesh.state, JOB, mesh.name) == []
    restarted_groups = await groups.admit_groups(mesh.state, JOB, mesh.name, mesh.token, 2, "again")
    assert [a.prompt for a in restarted_groups] == [0, 1] and {
        a.group for a in restarted_groups
    } == {2, 3}
    recorded = await events.read_all(mesh.state)
    opened = [e.fields.get("ledger") for e in recorded if e.kind == "opened"]
    assert opened == [None, f"host {mesh.settings.host}"]
    # the head, which has no ledger of it, counts them as in flight
    assert find_open_groups(recorded, JOB, set()).keys() == {2, 3}
    assert [e.fields["reason"] for e in recorded if e.kind == "requeued"] == ["host_lost"] * 2
    assert not [e for e in recorded if e.kind == CORRUPTION_EVENT]
    on_record = await groups.claim_shard(mesh.state, JOB, mesh.name, mesh.token)
    assert list(on_record) == [path.name for path in list_segments(moved.directory)]
    assert (bench.data.run_dir / "ledger/shard-0").is_dir()  # untouched

    await moved.write_records((RecordKind.OPEN, [2, 0, 0, 0, [1, 2]]), groups=[2])
    await moved.close()
    back = ShardLedger(await bench.restart_shard(), bench.data)
    assert set(await back.take_over(lambda group, member: 0)) == {2}  # on the same host
    await back.close()


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "flipped header": lambda path: flip(path, 3),
    "flipped record": lambda path: flip(path, len(HEADER) + len(BEGUN) + 12),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[: len(HEADER) + len(BEGUN) + 3]),
    "empty": lambda path: path.write_bytes(b""),
    "deleted": lambda path: path.unlink(),
}
BEGUN: bytes = encode_record(RecordKind.OPEN, [0, 0, 0, 0, [1, 2, 3]])


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def make_token_rows(group: int, *tokens: int) -> TokenRows:
    return TokenRows(
        trajectory_ids=np.array([make_trajectory_id(group, 0)]),
        counts=np.array([len(tokens)], np.int32),
        tokens=np.array(tokens, np.int32),
        logprobs=np.zeros(len(tokens), np.float32),
        versions=np.zeros(len(tokens), np.int32),
    )


@pytest.mark.parametrize("damage", DAMAGE)
@story_on(run_on_bench, "tmp_path")
async def test_shard_recovers_records_before_a_corrupt_segment(bench: Bench, damage: str) -> None:
    """Begin groups 0 to 2 in a sealed segment that becomes corrupt; 0 and 1 continue, and 3 begins,
    in the next one. Only records before the corruption and group 3 are recovered.
    """
    ledger = await bench.start()
    mesh = bench.mesh
    await bench.admit(4)

    async def begin(group: int) -> None:
        await ledger.write_records(
            (RecordKind.OPEN, [group, 0, group, 0, [1, 2, 3]]), groups=[group]
        )

    await begin(0)
    for group in (1, 2):
        await begin(group)
        await ledger.write_tokens(make_token_rows(group, 10 + group))
    await ledger._start_segment()
    await ledger.write_tokens(make_token_rows(0, 20))
    await ledger.write_tokens(make_token_rows(1, 21))
    await begin(3)
    await ledger.write_tokens(make_token_rows(3, 13))
    await ledger.close()
    first = list_segments(ledger.directory)[0]
    DAMAGE[damage](first)
    intact_groups = [0] if damage in ("flipped record", "truncated") else []

    def list_tokens(found: dict[int, list[Any]]) -> dict[int, list[int]]:
        return {group: t.tokens.tolist() for group, (t,) in found.items()}

    expected = {group: [1, 2, 3] for group in intact_groups} | {3: [1, 2, 3, 13]}
    successor = await bench.restart_shard()
    after = ShardLedger(successor, bench.data)
    assert list_tokens(await after.take_over(lambda group, member: 0)) == expected
    assert not first.exists()
    quarantined_path = (
        bench.data.run_dir / QUARANTINE_DIRECTORY / first.relative_to(bench.data.run_dir)
    )
    assert quarantined_path.exists() == (damage != "deleted")
    (recorded,) = [e for e in await events.read_all(mesh.state) if e.kind == CORRUPTION_EVENT]
    assert recorded.fields["path"] == str(first) and recorded.fields["job"] == JOB
    assert recorded.fields["aside"] == (str(quarantined_path) if quarantined_path.exists() else "")
    restarted_groups = sorted({0, 1, 2} - set(intact_groups))
    assert (
        f"groups {', '.join(map(str, restarted_groups))} from the prompt" in recorded.fields["then"]
    )

    await after.write_tokens(make_token_rows(3, 14))
    for group in intact_groups:
        await after.write_tokens(make_token_rows(group, 30))
        expected[group] = [*expected[group], 30]
    expected[3] = [*expected[3], 14]
    await after.close()
    last = await bench.restart_shard()
    third = ShardLedger(last, bench.data)
    assert list_tokens(await third.take_over(lambda group, member: 0)) == expected
    assert sum(e.kind == CORRUPTION_EVENT for e in await events.read_all(mesh.state)) == 1
    await third.close()


@story_on(run_on_bench, "tmp_path")
async def test_missing_segment_reports_corruption_only_with_open_groups(bench: Bench) -> None:
    ledger = await bench.start()
    mesh, path = bench.mesh, list_segments(ledger.directory)[0]
    await ledger.close()
    path.unlink()  # as if it had never been created
    successor = await bench.restart_shard()
    after = ShardLedger(successor, bench.data)
    await after.take_over(lambda group, member: 0)
    assert not [e for e in await events.read_all(mesh.state) if e.kind == CORRUPTION_EVENT]
    await bench.admit(1)
    await after.close()
    list_segments(after.directory)[0].unlink()
    last = await bench.restart_shard()
    third = ShardLedger(last, bench.data)
    assert await third.take_over(lambda group, member: 0) == {}
    (recorded,) = [e for e in await events.read_all(mesh.state) if e.kind == CORRUPTION_EVENT]
    assert "group 0 from the prompt" in recorded.fields["then"]
    await third.close()
