"""Cursors of who reads the event stream: nothing is trimmed before them, and a gap is told."""

from __future__ import annotations

import uuid

import pytest

from meshrl.common.base.errors import HistoryLost
from meshrl.common.state import events, groups, jobs, readers, steps
from meshrl.common.state.lifecycle import accounting
from meshrl.common.state.redis.client import State
from tests.contract.state.state_bench import JOB, SHARD, TRAINER, Bench, document

RECORDER = readers.recorder_of(JOB)
MANY = 500  # events


async def happen(state: State, n: int = MANY) -> list[str]:
    """The ids of `n` events."""
    since = await events.last_id(state)
    for i in range(n):
        await state.command(
            "XADD", "{mesh}:events", "*", "kind", "note", "fields", f'{{"n": {i}}}', "extra", "{}"
        )
    return [event.id for event in await events.read_all(state, since)]


async def trimmed(bench: Bench, **more: int) -> int:
    """How many are freed, the last few milliseconds' too."""
    await bench.pass_ms(5)
    return await readers.trim(bench.state, 0, keep_ms=1, **more)


async def test_events_are_trimmed_below_the_least_cursor_only(bench: Bench) -> None:
    state = bench.state
    ids = await happen(state)
    await readers.note(state, "recorder/fast", ids[-1], "/runs/fast")
    await readers.note(state, "recorder/slow", ids[400], "/runs/slow")
    assert await trimmed(bench) == 400
    assert [e.id for e in await events.read_all(state, ids[400])] == ids[401:]
    assert await trimmed(bench) == 0  # it holds for as long as its cursor stands there
    await readers.note(state, "recorder/slow", ids[-1], "/runs/slow")
    assert await trimmed(bench) == MANY - 401
    assert [e.id for e in await events.read_all(state, ids[-1])] == []
    slow = next(r for r in await readers.readers(state) if r.name == "recorder/slow")
    assert (slow.at, slow.where, slow.left) == (ids[-1], "/runs/slow", False)
    assert 0 < slow.since_ms <= slow.seen_ms


async def test_what_has_just_happened_stays_whoever_has_read_it(bench: Bench) -> None:
    ids = await happen(bench.state)
    await readers.note(bench.state, RECORDER, ids[-1], "")
    assert await readers.trim(bench.state, 0) == 0
    assert len(await events.read_all(bench.state)) == MANY


async def test_a_late_reader_is_told_that_history_is_lost(bench: Bench) -> None:
    state = bench.state
    ids = await happen(state)
    await readers.note(state, RECORDER, ids[-1], "")
    assert await trimmed(bench) > 0
    for since in ("0", ids[3]):
        with pytest.raises(HistoryLost, match="history_lost: events after") as told:
            await events.read_all(state, since)
        assert told.value.since == since
        rest = [e.id for e in await events.read_all(state, told.value.through)]
        assert rest
        assert rest == ids[-len(rest) :]


async def test_a_reader_that_was_silent_for_too_long_holds_nothing_back(bench: Bench) -> None:
    state = bench.state
    ids = await happen(state)
    await readers.note(state, "recorder/gone", ids[0], "/runs/gone")
    await bench.pass_ms(30)
    up_since = events.order(ids[-1])[0] + 10_000_000
    assert await readers.trim(state, up_since, keep_ms=1, gone_ms=20) == 0  # it could not speak
    assert await trimmed(bench, gone_ms=20) > 0
    [told] = [e.fields for e in await events.read_all(state, ids[-1]) if e.kind == "reader_gone"]
    assert (told["reader"], told["where"], told["at"]) == ("recorder/gone", "/runs/gone", ids[0])
    with pytest.raises(HistoryLost):
        await events.read(state, ids[0])


async def test_a_reader_that_leaves_holds_nothing_back(bench: Bench) -> None:
    ids = await happen(bench.state)
    await readers.note(bench.state, RECORDER, ids[0], "", left=True)
    assert await trimmed(bench) > 0


async def test_beyond_a_number_of_events_nobody_holds_them_back(bench: Bench) -> None:
    state = bench.state
    ids = await happen(state)
    await readers.note(state, RECORDER, ids[0], "")
    assert await trimmed(bench, most=200) > 0
    with pytest.raises(HistoryLost):
        await events.read(state, ids[0])


@pytest.mark.rotating(3)
async def test_a_job_is_recorded_from_its_submission_however_late_its_recorder_comes(
    bench: Bench,
) -> None:
    state = bench.state
    before = await happen(state)
    await bench.pass_ms(5)
    await jobs.submit(state, JOB, document(), "/runs/job", uuid.uuid4().hex)
    after = await happen(state)
    assert await trimmed(bench) > 0
    start = await readers.join(state, RECORDER, "0", "/runs/job")
    found = [e.id for e in await events.read_all(state, start)]
    assert found[-MANY:] == after
    assert set(before[:100]).isdisjoint(found)
    assert "submitted" in {e.kind for e in await events.read_all(state, start)}


async def test_a_recorder_whose_file_is_gone_is_told_and_goes_on_from_what_rows_say(
    bench: Bench,
) -> None:
    seats, state = await bench.training_job(max_staleness=3), bench.state
    for step in range(1, 5):
        admitted = await seats.admit()
        for group in admitted:
            await seats.finish(group, scored=1 if group.group % 3 == 0 else 2)
        await seats.commit(step, await seats.leased(step), covered=2)
    await groups.group_requeued(
        state, JOB, SHARD, seats.shard, (await seats.admit())[0].group, "host_lost", "op"
    )
    start = await readers.join(state, RECORDER, "0", "/runs/job")
    seen = await events.read_all(state, start)
    await readers.note(state, RECORDER, seen[-1].id, "/runs/job")
    await happen(state)
    await readers.note(state, RECORDER, await events.last_id(state), "/runs/job")
    assert await trimmed(bench) > 0

    again = await readers.join(state, RECORDER, "0", "/runs/job")  # its file is gone
    with pytest.raises(HistoryLost) as lost:
        await events.read_all(state, again)
    on = await readers.history_lost(state, JOB, "/runs/job", lost.value)
    recorded = await events.read_all(state, on)
    [told] = [e.fields for e in recorded if e.kind == "history_lost"]
    assert told["through"] == on
    now = await groups.in_flight(state, JOB)
    account = accounting.account(recorded, now.samples, JOB)
    job = await jobs.job(state, JOB)
    assert {term: account[term] for term in accounting.COUNTED} == {
        term: getattr(job, term) for term in accounting.COUNTED
    }
    assert (account["lost"], account["trained_twice"]) == (0, 0)

    # The steps since the checkpoint may be left behind later: they are counted once then too.
    await steps.open_lineage(
        state, JOB, TRAINER, seats.trainer, 2, steps.VersionNames("m0.2", "c2"), "op"
    )
    recorded = await events.read_all(state, on)
    account = accounting.account(recorded, (await groups.in_flight(state, JOB)).samples, JOB)
    assert (account["lost"], account["trained_twice"]) == (0, 0)


@pytest.mark.rotating(3)
async def test_a_job_that_is_resumed_on_its_mesh_misses_nothing_of_its_own(bench: Bench) -> None:
    """While it had ended, the mesh did other things, which are gone."""
    seats, state = await bench.training_job(), bench.state
    start = await readers.join(state, RECORDER, "0", "")
    recorded = await events.read_all(state, start)
    await jobs.cancel(state, JOB, uuid.uuid4().hex)
    recorded = await events.read_all(state, start)
    await readers.note(state, RECORDER, recorded[-1].id, "", left=True)
    await happen(state)
    assert await trimmed(bench) > 0
    await bench.pass_ms(5)
    await jobs.reopen(state, JOB, uuid.uuid4().hex)
    await jobs.set_phase(state, JOB, jobs.Phase.TRAINING, seats.trainer, TRAINER)
    await seats.admit()
    await happen(state)
    await trimmed(bench)
    on = await readers.join(state, RECORDER, recorded[-1].id, "")
    told = [e.kind for e in await events.read_all(state, on)]
    assert "phase" in told
    assert "opened" in told


async def test_rows_of_steps_go_when_they_are_recorded_and_covered(bench: Bench) -> None:
    seats, state = await bench.training_job(max_staleness=3), bench.state
    for step in range(1, 7):
        for group in await seats.admit():
            await seats.finish(group)
        await seats.commit(step, await seats.leased(step), covered=max(-1, step - 2))

    async def left(recorded: int) -> list[int]:
        await readers.note(state, RECORDER, await events.last_id(state), "", step=recorded)
        await trimmed(bench)
        return [row["step"] for row in await steps.step_rows(state, JOB)]

    assert await left(0) == [1, 2, 3, 4, 5, 6]
    assert await left(2) == [3, 4, 5, 6]
    assert await left(6) == [4, 5, 6]  # a checkpoint is of the first, and none covers the others
    assert [r.step for r in await steps.step_records(state, JOB, 4)] == [5, 6]
    await steps.open_lineage(
        state, JOB, TRAINER, seats.trainer, 4, steps.VersionNames("m0.4", "c4"), "op"
    )
    for step in (5, 6):  # made again, and not recorded yet
        await seats.commit(step, await seats.leased(step), lineage=1, covered=step)
    await trimmed(bench)
    assert [row["step"] for row in await steps.step_rows(state, JOB)] == [5, 6]
