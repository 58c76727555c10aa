"""What is asked many times a second, and answers with what is new, the same on every backend."""

from __future__ import annotations

import pytest

from meshrl.common.base.errors import NotFound
from meshrl.common.state import groups, jobs
from tests.contract.state.state_bench import JOB, TRAINER, Bench


async def test_groups_that_the_trainer_was_given_are_not_sent_again(bench: Bench) -> None:
    seats = await bench.training_job(groups_per_step=3)
    opened = await seats.admit()

    async def leased(*given: int) -> groups.LeasedGroups:
        return await groups.lease_groups(bench.state, JOB, TRAINER, seats.trainer, 1, given)

    await seats.finish(opened[1])
    first = await leased()
    assert [row.group for row in first.groups] == [opened[1].group] and first.waiting
    assert (await leased(opened[1].group)).groups == []
    await seats.finish(opened[0])
    await seats.finish(opened[2])
    rest = await leased(opened[1].group)
    assert [row.group for row in rest.groups] == [opened[0].group, opened[2].group]
    assert rest.waiting is None
    whole = await leased()
    assert [row.group for row in whole.groups] == [group.group for group in opened[:3]]
    done = await leased(*(group.group for group in opened[:3]))
    assert (done.groups, done.waiting) == ([], None)


async def test_another_start_of_the_trainer_leases_what_the_last_one_had(bench: Bench) -> None:
    seats = await bench.training_job(groups_per_step=2)
    opened = await seats.admit()
    for group in opened[:2]:
        await seats.finish(group)
    await seats.leased(1)
    seats.trainer = await bench.seat(TRAINER)
    await groups.lease_groups(bench.state, JOB, TRAINER, seats.trainer, 1)
    taken = await seats.leased(1)
    assert taken == [group.group for group in opened[:2]]
    await seats.commit(1, taken)


async def test_an_evaluation_is_awaited_until_it_is_there_or_the_job_has_ended(
    bench: Bench,
) -> None:
    seats = await bench.training_job()
    assert await jobs.awaits_evaluation(bench.state, JOB, "step-0")
    await bench.state.command("HSET", "{job}:evaluations", "step-0", "{}")
    assert not await jobs.awaits_evaluation(bench.state, JOB, "step-0")
    assert await jobs.awaits_evaluation(bench.state, JOB, "step-1")
    await jobs.set_phase(bench.state, JOB, jobs.Phase.STOPPED, seats.trainer, TRAINER)
    assert not await jobs.awaits_evaluation(bench.state, JOB, "step-1")
    with pytest.raises(NotFound):
        await jobs.awaits_evaluation(bench.state, "another", "step-0")
