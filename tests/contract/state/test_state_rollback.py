"""A Redis that is older than what is known of it is told from one that is not, on every backend."""

from __future__ import annotations

import dataclasses

import pytest

from meshrl.common.base.errors import Fenced
from meshrl.common.state import events, jobs, registry, steps
from meshrl.common.state.lifecycle import deleting
from meshrl.common.state.redis.keys import EVENTS, TRIMMED
from meshrl.common.state.server import rollback
from meshrl.common.state.server.rollback import JobMark, RollbackMark
from tests.contract.state.state_bench import JOB, SHARD, TRAINER, Bench, Seats


async def trained(bench: Bench, upto: int) -> Seats:
    seats = await bench.training_job()
    for step in range(1, upto + 1):
        for group in await seats.admit(2):
            await seats.finish(group)
        await seats.step(step)
    return seats


async def test_what_redis_holds_is_as_far_as_itself_and_as_what_was_known_before(
    bench: Bench,
) -> None:
    before = await rollback.held(bench.state, RollbackMark())
    await trained(bench, 2)
    now = await rollback.held(bench.state, before)
    assert now.jobs[JOB].version == 2 and now.jobs[JOB].next_group == 4
    again = await rollback.held(bench.state, now)
    assert again == now
    assert rollback.older(now, before) == rollback.older(again, now) == ""


@pytest.mark.rotating(3)
@pytest.mark.parametrize("what", ["event", "token", "version", "lineage", "group", "job"])
async def test_each_thing_that_only_rises_tells_an_older_state(bench: Bench, what: str) -> None:
    await trained(bench, 2)
    now = await rollback.held(bench.state, RollbackMark())
    one = now.jobs[JOB]
    ms, _ = events.order(now.event)
    known = {
        "event": dataclasses.replace(now, event=f"{ms + 1}-0"),
        "token": dataclasses.replace(now, token=now.token + 1),
        "version": RollbackMark(jobs={JOB: JobMark(one.lineage, one.version + 1)}),
        "lineage": RollbackMark(jobs={JOB: JobMark(one.lineage + 1, 0)}),
        "group": RollbackMark(jobs={JOB: JobMark(next_group=one.next_group + 1)}),
        "job": RollbackMark(jobs={"another": JobMark(0, 0)}),
    }[what]
    assert rollback.older(await rollback.held(bench.state, known), known)


async def test_events_that_were_added_to_an_older_stream_do_not_hide_it(bench: Bench) -> None:
    await events.append(bench.state, "note", {})
    now = await rollback.held(bench.state, RollbackMark())
    ms, number = events.order(now.event)
    known = RollbackMark(event=f"{ms}-{number + 1}")  # was lost with the end of the stream
    await bench.pass_ms(2)
    await events.append(bench.state, "note", {})
    assert rollback.older(await rollback.held(bench.state, known), known)


async def test_events_that_were_read_and_trimmed_are_not_missed(bench: Bench) -> None:
    for _ in range(3):
        await events.append(bench.state, "note", {})
    known = await rollback.held(bench.state, RollbackMark())
    await bench.state.command("SET", TRIMMED, known.event)
    ms, number = events.order(known.event)
    await bench.state.command("XTRIM", EVENTS, "MINID", f"{ms}-{number + 1}")
    assert rollback.older(await rollback.held(bench.state, known), known) == ""


async def test_an_empty_redis_is_older_than_anything(bench: Bench) -> None:
    await trained(bench, 1)
    now = await rollback.held(bench.state, RollbackMark())
    await bench.state.command("FLUSHALL")
    assert rollback.older(await rollback.held(bench.state, now), now) == "it is empty"
    assert rollback.older(await rollback.held(bench.state, RollbackMark()), RollbackMark()) == ""


async def test_who_acted_before_the_rollback_cannot_commit_after_it(bench: Bench) -> None:
    """The state goes back to before the trainer registered, whose token would be issued again."""
    seats = await trained(bench, 1)
    known = await rollback.held(bench.state, RollbackMark())
    await bench.state.command("SET", rollback.TOKEN, seats.trainer - 1)
    await registry.evict(bench.state, TRAINER, (await _incarnation(bench)))
    found = await rollback.held(bench.state, known)
    assert rollback.older(found, known)
    await rollback.raise_tokens(bench.state, rollback.floor_above(found, known))
    successor = await bench.seat(TRAINER)
    assert successor > known.token >= seats.trainer
    for group in await seats.admit(2):
        await seats.finish(group)
    with pytest.raises(Fenced):
        await seats.step(2)
    assert (await Seats(bench.state, seats.shard, successor).step(2)) != []
    assert [row["step"] for row in await steps.step_rows(bench.state, JOB)] == [1, 2]


async def test_tokens_are_whole_numbers_after_many_generations(bench: Bench) -> None:
    floor = 2_000_000_000_000 + 1_000_000 * rollback.TOKENS_APART
    await rollback.raise_tokens(bench.state, floor)
    tokens = [await bench.seat(SHARD) for _ in range(3)]
    assert tokens == [floor + 1, floor + 2, floor + 3]
    await rollback.raise_tokens(bench.state, floor)  # it is never lowered
    assert await bench.seat(SHARD) == floor + 4


async def test_a_first_token_is_above_the_clock_so_that_it_rises_without_any_record(
    bench: Bench,
) -> None:
    await rollback.raise_tokens(bench.state, rollback.TOKENS_APART)
    assert await bench.seat(SHARD) > 1_700_000_000_000


async def _incarnation(bench: Bench) -> str:
    entry = await registry.lookup(bench.state, TRAINER)
    assert entry is not None
    return entry.incarnation


def test_joined_marks_are_as_far_as_the_furthest() -> None:
    one = RollbackMark("10-1", 5, {"a": JobMark(1, 3, 7, "/a"), "b": JobMark(0, 1)})
    two = RollbackMark("9-4", 6, {"a": JobMark(0, 9, 8, phase="training")})
    assert rollback.joined([one, two]) == RollbackMark(
        "10-1", 6, {"a": JobMark(1, 3, 8, "/a", "training"), "b": JobMark(0, 1)}
    )


async def test_a_job_that_was_deleted_is_not_missed(bench: Bench) -> None:
    await trained(bench, 2)
    known = await rollback.held(bench.state, RollbackMark())
    await jobs.cancel(bench.state, JOB, "stop")
    await deleting.delete(bench.state, JOB, "delete")
    now = await rollback.held(bench.state, known)
    assert rollback.older(now, known) == ""
    assert JOB in now.deleted and JOB not in rollback.without(known, now.deleted).jobs
    assert rollback.older(dataclasses.replace(now, deleted={}), known)
