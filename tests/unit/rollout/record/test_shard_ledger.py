"""A shard's ledger on record: what is logged is written once, whatever the disk does meanwhile."""

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
        """Opens groups 0, 1, ..."""
        state, name, token = self.mesh.state, self.mesh.name, self.mesh.token
        await steps.commit_initial(state, JOB, name, token, 0, steps.VersionReferences("m0", "c0"))
        await jobs.set_phase(state, JOB, jobs.Phase.TRAINING, token, name)
        opened = await groups.admit_groups(state, JOB, name, token, want, "admit")
        assert [a.group for a in opened] == list(range(want))

    async def follow(self) -> Mesh:
        """The shard dies, and starts again."""
        state = self.mesh.state
        await registry.evict(state, self.mesh.name, self.mesh.incarnation)
        self.mesh = alone(f"rollout/{JOB}/0", self.clock, self.random, self.host, state=state)
        await self.mesh.join(None)
        return self.mesh


def on_bench(directory: Path, story: Callable[[Bench], Any]) -> None:
    async def main(clock: VirtualClock, random: Random) -> None:
        bench = Bench(clock, random, directory)
        await story(bench)
        await bench.mesh.leave()

    run_virtual(main, limit_s=3600.0)


def closes(ledger: ShardLedger) -> list[int]:
    return [r.payload[0] for r in iter_records(ledger.directory) if r.kind is RecordKind.CLOSE]


@story_on(on_bench, "tmp_path")
async def test_what_many_log_at_once_is_there_in_the_order_it_was_logged(bench: Bench) -> None:
    ledger = await bench.start()
    await asyncio.gather(
        *(ledger.write_records((RecordKind.CLOSE, [n, "ready"])) for n in range(50))
    )
    assert closes(ledger) == list(range(50))
    ledger.defer_record(RecordKind.TURN, [1 << MEMBER_BITS, "said"], 1)
    await ledger.write_records((RecordKind.CLOSE, [50, "ready"]))
    assert [r.kind for r in iter_records(ledger.directory)][-2:] == [
        RecordKind.TURN,
        RecordKind.CLOSE,
    ]
    await ledger.close()


@story_on(on_bench, "tmp_path")
async def test_a_full_disk_makes_those_who_log_wait_and_doubles_nothing(bench: Bench) -> None:
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
    assert not any(task.done() for task in waiting) and closes(ledger) == [0]
    bench.host.disk_bytes = -1
    await asyncio.gather(*waiting)
    assert closes(ledger) == list(range(7))
    await ledger.close()


@story_on(on_bench, "tmp_path")
async def test_a_shard_ends_though_its_disk_is_full(bench: Bench) -> None:
    ledger = await bench.start()
    bench.host.disk_bytes = 0
    waiting = asyncio.create_task(ledger.write_records((RecordKind.CLOSE, [1, "ready"])))
    await bench.clock.sleep(5.0)
    async with bench.clock.timeout(1.0, "the end"):
        await ledger.close()
    waiting.cancel()
    assert closes(ledger) == []


@story_on(on_bench, "tmp_path")
async def test_records_go_on_in_new_segments_and_finished_ones_are_struck_off(bench: Bench) -> None:
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
    found = [r.payload.ids[0] >> MEMBER_BITS for r in iter_records(ledger.directory)]
    assert found == list(range(20))
    for group in range(20):
        await ledger.forget_group(group)
    left = [path.name for path in list_segments(ledger.directory)]
    on_record = await groups.claim_shard(bench.mesh.state, JOB, bench.mesh.name, bench.mesh.token)
    assert len(left) == 1 and list(on_record) == left
    syncing.cancel()
    await ledger.close()


@story_on(on_bench, "tmp_path")
async def test_groups_whose_ledger_is_on_another_host_are_host_lost_and_their_prompts_come_again(
    bench: Bench, tmp_path: Path
) -> None:
    ledger = await bench.start()
    await bench.admit(2)
    await ledger.write_records((RecordKind.OPEN, [0, 0, 0, 0, [1, 2]]), groups=[0])
    await ledger.close()
    mesh = await bench.follow()
    size = bench.data.config.algorithm.group_size

    bench.data = bench.data.for_remote_host(tmp_path / "bundles/b", tmp_path / "runs/j/1")
    moved = ShardLedger(mesh, bench.data)
    assert await moved.take_over(lambda group, member: 0) == {}
    row = await jobs.read_job(mesh.state, JOB)
    assert row.host_lost == 2 * size
    assert await groups.read_open_groups(mesh.state, JOB, mesh.name) == []
    again = await groups.admit_groups(mesh.state, JOB, mesh.name, mesh.token, 2, "again")
    assert [a.prompt for a in again] == [0, 1] and {a.group for a in again} == {2, 3}
    told = await events.read_all(mesh.state)
    opened = [e.fields.get("ledger") for e in told if e.kind == "opened"]
    assert opened == [None, f"host {mesh.settings.host}"]
    # the head, which sees no ledger of it, takes them for what is under way
    assert find_open_groups(told, JOB, set()).keys() == {2, 3}
    assert [e.fields["reason"] for e in told if e.kind == "requeued"] == ["host_lost"] * 2
    assert not [e for e in told if e.kind == CORRUPTION_EVENT]
    on_record = await groups.claim_shard(mesh.state, JOB, mesh.name, mesh.token)
    assert list(on_record) == [path.name for path in list_segments(moved.directory)]
    assert (bench.data.run_dir / "ledger/shard-0").is_dir()  # nobody has touched it

    await moved.write_records((RecordKind.OPEN, [2, 0, 0, 0, [1, 2]]), groups=[2])
    await moved.close()
    back = ShardLedger(await bench.follow(), bench.data)
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


def said(group: int, *tokens: int) -> TokenRows:
    return TokenRows(
        trajectory_ids=np.array([make_trajectory_id(group, 0)]),
        counts=np.array([len(tokens)], np.int32),
        tokens=np.array(tokens, np.int32),
        logprobs=np.zeros(len(tokens), np.float32),
        versions=np.zeros(len(tokens), np.int32),
    )


@pytest.mark.parametrize("damage", DAMAGE)
@story_on(on_bench, "tmp_path")
async def test_a_shard_goes_on_from_before_a_damaged_segment(bench: Bench, damage: str) -> None:
    """Groups 0 to 2 are begun in a sealed segment, which is damaged; 0 and 1 go on, and 3 begins,
    in the next one. Only what lies before the damage, and group 3, is left.
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
        await ledger.write_tokens(said(group, 10 + group))
    await ledger._start_segment()
    await ledger.write_tokens(said(0, 20))
    await ledger.write_tokens(said(1, 21))
    await begin(3)
    await ledger.write_tokens(said(3, 13))
    await ledger.close()
    first = list_segments(ledger.directory)[0]
    DAMAGE[damage](first)
    kept = [0] if damage in ("flipped record", "truncated") else []

    def left(found: dict[int, list[Any]]) -> dict[int, list[int]]:
        return {group: t.tokens.tolist() for group, (t,) in found.items()}

    expected = {group: [1, 2, 3] for group in kept} | {3: [1, 2, 3, 13]}
    heir = await bench.follow()
    after = ShardLedger(heir, bench.data)
    assert left(await after.take_over(lambda group, member: 0)) == expected
    assert not first.exists()
    aside = bench.data.run_dir / QUARANTINE_DIRECTORY / first.relative_to(bench.data.run_dir)
    assert aside.exists() == (damage != "deleted")
    (told,) = [e for e in await events.read_all(mesh.state) if e.kind == CORRUPTION_EVENT]
    assert told.fields["path"] == str(first) and told.fields["job"] == JOB
    assert told.fields["aside"] == (str(aside) if aside.exists() else "")
    again = sorted({0, 1, 2} - set(kept))
    assert f"groups {', '.join(map(str, again))} from the prompt" in told.fields["then"]

    await after.write_tokens(said(3, 14))
    for group in kept:
        await after.write_tokens(said(group, 30))
        expected[group] = [*expected[group], 30]
    expected[3] = [*expected[3], 14]
    await after.close()
    last = await bench.follow()
    third = ShardLedger(last, bench.data)
    assert left(await third.take_over(lambda group, member: 0)) == expected
    assert sum(e.kind == CORRUPTION_EVENT for e in await events.read_all(mesh.state)) == 1
    await third.close()


@story_on(on_bench, "tmp_path")
async def test_a_crash_before_the_first_byte_alarms_nobody_a_deletion_does(bench: Bench) -> None:
    ledger = await bench.start()
    mesh, path = bench.mesh, list_segments(ledger.directory)[0]
    await ledger.close()
    path.unlink()  # as if it had never been created
    heir = await bench.follow()
    after = ShardLedger(heir, bench.data)
    await after.take_over(lambda group, member: 0)
    assert not [e for e in await events.read_all(mesh.state) if e.kind == CORRUPTION_EVENT]
    await bench.admit(1)
    await after.close()
    list_segments(after.directory)[0].unlink()
    last = await bench.follow()
    third = ShardLedger(last, bench.data)
    assert await third.take_over(lambda group, member: 0) == {}
    (told,) = [e for e in await events.read_all(mesh.state) if e.kind == CORRUPTION_EVENT]
    assert "group 0 from the prompt" in told.fields["then"]
    await third.close()
