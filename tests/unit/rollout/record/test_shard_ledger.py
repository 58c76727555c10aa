"""A shard's ledger on record: what is logged is written once, whatever the disk does meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from common.job.config import JobConfig
from common.job.job_data import JobData
from common.random import Random
from common.records.ledger import Kind, read, segments
from common.records.token_record import MEMBER_BITS, TokenRows
from common.state import groups, jobs
from services.rollout.record.shard_ledger import ShardLedger
from sim.host import SimulatedHost
from sim.loop import VirtualClock, run_virtual
from tests.meshes import alone

JOB = "j"


class Bench:
    def __init__(self, clock: VirtualClock, random: Random, directory: Path) -> None:
        self.clock = clock
        self.host = SimulatedHost(clock, random.child("host"))
        self.mesh = alone("rollout/0", clock, random, self.host)
        self.data = JobData(JOB, JobConfig(name=JOB), directory, directory / "run")

    async def start(self) -> ShardLedger:
        await self.mesh.join(None)
        document = self.data.config.document()
        await jobs.submit(self.mesh.state, JOB, document, str(self.data.run_dir), "submit")
        ledger = ShardLedger(self.mesh, self.data)
        await ledger.take_over(lambda group, member: 0)
        return ledger


def on_bench(directory: Path, story: Callable[[Bench], Any]) -> None:
    async def main(clock: VirtualClock, random: Random) -> None:
        bench = Bench(clock, random, directory)
        await story(bench)
        await bench.mesh.leave()

    run_virtual(main, limit_s=3600.0)


def closes(ledger: ShardLedger) -> list[int]:
    return [r.payload[0] for r in read(ledger.directory) if r.kind is Kind.CLOSE]


def test_what_many_log_at_once_is_there_in_the_order_it_was_logged(tmp_path: Path) -> None:
    async def story(bench: Bench) -> None:
        ledger = await bench.start()
        await asyncio.gather(*(ledger.log((Kind.CLOSE, [n, "ready"])) for n in range(50)))
        assert closes(ledger) == list(range(50))
        ledger.defer(Kind.TURN, [1 << MEMBER_BITS, "said"], 1)
        await ledger.log((Kind.CLOSE, [50, "ready"]))
        assert [r.kind for r in read(ledger.directory)][-2:] == [Kind.TURN, Kind.CLOSE]
        await ledger.close()

    on_bench(tmp_path, story)


def test_a_full_disk_makes_those_who_log_wait_and_doubles_nothing(tmp_path: Path) -> None:
    async def story(bench: Bench) -> None:
        ledger = await bench.start()
        await ledger.log((Kind.CLOSE, [0, "ready"]))
        bench.host.disk_bytes = ledger.bytes_written + 10
        waiting = [asyncio.create_task(ledger.log((Kind.CLOSE, [n, "ready"]))) for n in range(1, 4)]
        await bench.clock.sleep(5.0)
        waiting += [
            asyncio.create_task(ledger.log((Kind.CLOSE, [n, "ready"]))) for n in range(4, 7)
        ]
        await bench.clock.sleep(5.0)
        assert not any(task.done() for task in waiting) and closes(ledger) == [0]
        bench.host.disk_bytes = -1
        await asyncio.gather(*waiting)
        assert closes(ledger) == list(range(7))
        await ledger.close()

    on_bench(tmp_path, story)


def test_a_shard_ends_though_its_disk_is_full(tmp_path: Path) -> None:
    async def story(bench: Bench) -> None:
        ledger = await bench.start()
        bench.host.disk_bytes = 0
        waiting = asyncio.create_task(ledger.log((Kind.CLOSE, [1, "ready"])))
        await bench.clock.sleep(5.0)
        async with bench.clock.timeout(1.0, "the end"):
            await ledger.close()
        waiting.cancel()
        assert closes(ledger) == []

    on_bench(tmp_path, story)


def test_records_go_on_in_new_segments_and_finished_ones_are_struck_off(tmp_path: Path) -> None:
    def tokens(group: int) -> TokenRows:
        n = 200_000  # a segment is full after six
        return TokenRows(
            ids=np.array([group << MEMBER_BITS], np.int64),
            counts=np.array([n], np.int32),
            tokens=np.arange(n, dtype=np.int32),
            logprobs=np.zeros(n, np.float32),
            versions=np.zeros(n, np.int32),
        )

    async def story(bench: Bench) -> None:
        ledger = await bench.start()
        syncing = asyncio.create_task(ledger.sync_forever())
        for group in range(20):
            await ledger.tokens(tokens(group))
            await bench.clock.sleep(0.1)
        assert len(segments(ledger.directory)) == 4
        found = [r.payload.ids[0] >> MEMBER_BITS for r in read(ledger.directory)]
        assert found == list(range(20))
        for group in range(20):
            await ledger.forget(group)
        left = [path.name for path in segments(ledger.directory)]
        on_record = await groups.claim_shard(
            bench.mesh.state, JOB, bench.mesh.name, bench.mesh.token
        )
        assert len(left) == 1 and list(on_record) == left
        syncing.cancel()
        await ledger.close()

    on_bench(tmp_path, story)
