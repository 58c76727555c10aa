"""A filtered group that another replaces: the gate, the account and the step, on every backend."""

from __future__ import annotations

import pytest

from meshrl.common.base.errors import Refused
from meshrl.common.state import events, groups, jobs
from meshrl.common.state.groups import LeaseWait
from meshrl.common.state.lifecycle import accounting
from tests.contract.state.state_bench import JOB, TRAINER, Bench


async def test_a_group_that_teaches_nothing_gives_its_place_to_another(bench: Bench) -> None:
    seats = await bench.training_job(groups_per_step=2, group_size=3, max_staleness=0)
    admitted = await seats.admit()
    assert len(admitted) == 2 and await seats.admit() == []
    for group, scored in zip(admitted, (2, 3), strict=True):
        await seats.finish(group, scored=scored)
    assert await seats.leased(1) == [0, 1]
    for _ in range(2):  # once, however often it is told
        await groups.group_filtered(bench.state, JOB, TRAINER, seats.trainer, 0, "op")
    assert isinstance(await seats.lease(1), LeaseWait)
    (another,) = await seats.admit()
    assert (another.group, another.prompt) == (2, 2)  # its prompt is not asked again
    await seats.finish(another, scored=3)
    assert await seats.leased(1) == [1, 2]
    await seats.commit(1, [1, 2])
    row = await jobs.job(bench.state, JOB)
    assert (row.trained, row.filtered, row.typed_drops) == (6, 2, 1)
    in_flight = (await groups.in_flight(bench.state, JOB)).samples
    account = accounting.account(await events.read_all(bench.state), in_flight)
    assert account["lost"] == 0 and account["trained_twice"] == 0
    assert (account["filtered"], account["typed_drops"]) == (2, 1)


async def test_only_the_trainer_that_leased_a_group_may_filter_it(bench: Bench) -> None:
    seats = await bench.training_job()
    group, *_ = await seats.admit()
    await seats.finish(group)
    with pytest.raises(Refused, match="not trainer/job's"):
        await groups.group_filtered(bench.state, JOB, TRAINER, seats.trainer, group.group, "op")
