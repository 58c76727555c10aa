"""Jobs that go on from a checkpoint more than once, the same on every backend."""

from __future__ import annotations

from meshrl.common.state import events, jobs, steps
from meshrl.common.state.steps import IDS_APART
from tests.contract.state.state_bench import JOB, SHARD, TRAINER, Bench, Seats, document


async def test_two_losses_from_one_checkpoint_share_neither_lineage_nor_groups(
    bench: Bench,
) -> None:
    seats = await bench.training_job()
    for group in await seats.admit():
        await seats.finish(group)
    await seats.step(1)
    saved = await steps.checkpoint_state(bench.state, JOB)
    saved |= {"manifest": "m0.1", "checkpoint": "c1"}

    lineages, seen, last = [], set[int](), 0
    for _ in range(3):
        await bench.state.command("FLUSHALL")
        for _ in range(2):  # its answer may be lost
            await steps.restore_job(bench.state, JOB, document(), "/runs", saved, last)
        seats = Seats(bench.state, await bench.seat(SHARD), await bench.seat(TRAINER))
        opened = {group.group for group in await seats.admit()}
        assert opened and opened.isdisjoint(seen) and min(opened) > max(seen, default=0)
        seen |= opened
        last = (await jobs.job(bench.state, JOB)).lineage
        lineages.append(last)
    assert lineages == [1, 2, 3]
    told = [e.fields for e in await events.read_all(bench.state) if e.kind == "opened"]
    assert {group for one in told for group in one["groups"]} == opened


async def test_ids_rise_above_those_of_a_checkpoint_that_had_run_through_its_share(
    bench: Bench,
) -> None:
    seats = await bench.training_job()
    await seats.admit()
    saved = await steps.checkpoint_state(bench.state, JOB)
    saved |= {"manifest": "m0", "checkpoint": "c0", "next_group": 5 * IDS_APART + 7}
    await bench.state.command("FLUSHALL")
    await steps.restore_job(bench.state, JOB, document(), "/runs", saved, 3)
    seats = Seats(bench.state, await bench.seat(SHARD), await bench.seat(TRAINER))
    opened = [group.group for group in await seats.admit()]
    assert opened[0] == 6 * IDS_APART and opened == sorted(opened)
    assert (await jobs.job(bench.state, JOB)).lineage == 4
