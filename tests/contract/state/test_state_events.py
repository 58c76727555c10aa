"""Event streams: cursors, polling, records of operations, and bounded growth, on every backend."""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Callable

import pytest

from meshrl.common.base.errors import HistoryLost, NotFound
from meshrl.common.mesh.runtime.retry_policy import retry
from meshrl.common.state import events, groups, jobs, readers, steps
from meshrl.common.state.job_lifecycle import trajectory_accounting
from meshrl.common.state.redis.client import StateClient
from tests.contract.state.state_bench import JOB, SHARD, TRAINER, Bench, Seats, Server, document

RECORDER = readers.recorder_name(JOB)
MANY = 500  # events
LET_GO_MS = 121_000
STEP_MS = 1000
CHECKPOINT_EVERY = 8
TRIM_EVERY = 10  # steps


async def happen(state: StateClient, n: int = MANY) -> list[str]:
    """Append `n` events and return their ids."""
    since = await events.read_last_id(state)
    for i in range(n):
        await state.run_command(
            "XADD", "{mesh}:events", "*", "kind", "note", "fields", f'{{"n": {i}}}', "extra", "{}"
        )
    return [event.id for event in await events.read_all(state, since)]


async def trimmed(bench: Bench, **more: int) -> int:
    """Trim the stream and return how many events were freed, those of the last few milliseconds
    included.
    """
    await bench.pass_ms(5)
    return await readers.trim_events(bench.state, 0, retention_ms=1, **more)


async def test_events_are_trimmed_below_the_least_cursor_only(bench: Bench) -> None:
    state = bench.state
    ids = await happen(state)
    await readers.record_cursor(state, "recorder/fast", ids[-1], "/runs/fast")
    await readers.record_cursor(state, "recorder/slow", ids[400], "/runs/slow")
    assert await trimmed(bench) == 400
    assert [e.id for e in await events.read_all(state, ids[400])] == ids[401:]
    assert await trimmed(bench) == 0  # it holds for as long as its cursor stands there
    await readers.record_cursor(state, "recorder/slow", ids[-1], "/runs/slow")
    assert await trimmed(bench) == MANY - 401
    assert [e.id for e in await events.read_all(state, ids[-1])] == []
    slow = next(r for r in await readers.list_readers(state) if r.name == "recorder/slow")
    assert (slow.cursor, slow.location, slow.has_left) == (ids[-1], "/runs/slow", False)
    assert 0 < slow.joined_ms <= slow.last_seen_ms


async def test_what_has_just_happened_stays_whoever_has_read_it(bench: Bench) -> None:
    ids = await happen(bench.state)
    await readers.record_cursor(bench.state, RECORDER, ids[-1], "")
    assert await readers.trim_events(bench.state, 0) == 0
    assert len(await events.read_all(bench.state)) == MANY


async def test_a_late_reader_is_told_that_history_is_lost(bench: Bench) -> None:
    state = bench.state
    ids = await happen(state)
    await readers.record_cursor(state, RECORDER, ids[-1], "")
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
    await readers.record_cursor(state, "recorder/gone", ids[0], "/runs/gone")
    await bench.pass_ms(30)
    up_since = events.parse_event_id(ids[-1])[0] + 10_000_000
    assert (
        await readers.trim_events(state, up_since, retention_ms=1, silent_ms=20) == 0
    )  # it could not speak
    assert await trimmed(bench, silent_ms=20) > 0
    [told] = [e.fields for e in await events.read_all(state, ids[-1]) if e.kind == "reader_gone"]
    assert (told["reader"], told["where"], told["at"]) == ("recorder/gone", "/runs/gone", ids[0])
    with pytest.raises(HistoryLost):
        await events.read_page(state, ids[0])


async def test_a_reader_that_leaves_holds_nothing_back(bench: Bench) -> None:
    ids = await happen(bench.state)
    await readers.record_cursor(bench.state, RECORDER, ids[0], "", has_left=True)
    assert await trimmed(bench) > 0


async def test_beyond_a_number_of_events_nobody_holds_them_back(bench: Bench) -> None:
    state = bench.state
    ids = await happen(state)
    await readers.record_cursor(state, RECORDER, ids[0], "")
    assert await trimmed(bench, max_events=200) > 0
    with pytest.raises(HistoryLost):
        await events.read_page(state, ids[0])


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
    await seats.requeue((await seats.admit())[0].group, "host_lost", "op")
    start = await readers.join(state, RECORDER, "0", "/runs/job")
    seen = await events.read_all(state, start)
    await readers.record_cursor(state, RECORDER, seen[-1].id, "/runs/job")
    await happen(state)
    await readers.record_cursor(state, RECORDER, await events.read_last_id(state), "/runs/job")
    assert await trimmed(bench) > 0

    again = await readers.join(state, RECORDER, "0", "/runs/job")  # its file is gone
    with pytest.raises(HistoryLost) as lost:
        await events.read_all(state, again)
    on = await readers.record_history_loss(state, JOB, "/runs/job", lost.value)
    recorded = await events.read_all(state, on)
    [told] = [e.fields for e in recorded if e.kind == "history_lost"]
    assert told["through"] == on
    now = await groups.count_in_flight(state, JOB)
    account = trajectory_accounting.compute_account(recorded, now.samples, JOB)
    job = await jobs.read_job(state, JOB)
    assert {term: account[term] for term in trajectory_accounting.TERMS} == {
        term: getattr(job, term) for term in trajectory_accounting.TERMS
    }
    assert (account["lost"], account["trained_twice"]) == (0, 0)

    # The steps since the checkpoint may be left behind later: they are counted once then too.
    await seats.go_back(2)
    recorded = await events.read_all(state, on)
    account = trajectory_accounting.compute_account(
        recorded, (await groups.count_in_flight(state, JOB)).samples, JOB
    )
    assert (account["lost"], account["trained_twice"]) == (0, 0)


@pytest.mark.rotating(3)
async def test_a_job_that_is_resumed_on_its_mesh_misses_nothing_of_its_own(bench: Bench) -> None:
    """Check that a resumed job misses none of its own events. While it was over, the mesh had other
    events, which are trimmed.
    """
    seats, state = await bench.training_job(), bench.state
    start = await readers.join(state, RECORDER, "0", "")
    recorded = await events.read_all(state, start)
    await jobs.cancel(state, JOB, uuid.uuid4().hex)
    recorded = await events.read_all(state, start)
    await readers.record_cursor(state, RECORDER, recorded[-1].id, "", has_left=True)
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
        await seats.train(step, covered=max(-1, step - 2))

    async def left(recorded: int) -> list[int]:
        await readers.record_cursor(
            state, RECORDER, await events.read_last_id(state), "", step=recorded
        )
        await trimmed(bench)
        return [row["step"] for row in await steps.read_step_rows(state, JOB)]

    assert await left(0) == [1, 2, 3, 4, 5, 6]
    assert await left(2) == [3, 4, 5, 6]
    assert await left(6) == [4, 5, 6]  # a checkpoint is of the first, and none covers the others
    assert [r.step for r in await steps.read_step_records(state, JOB, 4)] == [5, 6]
    await seats.go_back(4)
    for step in (5, 6):  # made again, and not recorded yet
        await seats.commit(step, await seats.leased(step), lineage=1, covered=step)
    await trimmed(bench)
    assert [row["step"] for row in await steps.read_step_rows(state, JOB)] == [5, 6]


async def test_groups_that_the_trainer_was_given_are_not_sent_again(bench: Bench) -> None:
    seats = await bench.training_job(groups_per_step=3)
    opened = await seats.admit()

    async def leased(*given: int) -> groups.LeasedGroups:
        return await groups.lease_groups(bench.state, JOB, TRAINER, seats.trainer, 1, given)

    await seats.finish(opened[1])
    first = await leased()
    assert [row.group for row in first.groups] == [opened[1].group] and first.wait
    assert (await leased(opened[1].group)).groups == []
    await seats.finish(opened[0])
    await seats.finish(opened[2])
    rest = await leased(opened[1].group)
    assert [row.group for row in rest.groups] == [opened[0].group, opened[2].group]
    assert rest.wait is None
    whole = await leased()
    assert [row.group for row in whole.groups] == [group.group for group in opened[:3]]
    done = await leased(*(group.group for group in opened[:3]))
    assert (done.groups, done.wait) == ([], None)


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
    assert await jobs.is_evaluation_pending(bench.state, JOB, "step-0")
    await bench.state.run_command("HSET", "{job}:evaluations", "step-0", "{}")
    assert not await jobs.is_evaluation_pending(bench.state, JOB, "step-0")
    assert await jobs.is_evaluation_pending(bench.state, JOB, "step-1")
    await jobs.set_phase(bench.state, JOB, jobs.Phase.STOPPED, seats.trainer, TRAINER)
    assert not await jobs.is_evaluation_pending(bench.state, JOB, "step-1")
    with pytest.raises(NotFound):
        await jobs.is_evaluation_pending(bench.state, "another", "step-0")


async def admitted(seats: Seats, operation: str, want: int = 1) -> list[int]:
    opened = await groups.admit_groups(seats.state, JOB, SHARD, seats.shard, want, operation)
    return [one.group for one in opened]


async def known(bench: Bench, *operations: str) -> list[str]:
    found = [
        (name, await bench.state.run_command("EXISTS", f"{{{JOB}}}:op:admit:{name}"))
        for name in operations
    ]
    return [name for name, there in found if there]


async def test_an_operation_is_let_go_of_once_its_caller_has_the_answer(simulated: Bench) -> None:
    seats = await simulated.training_job()
    for operation in ("one", "two", "three"):
        await admitted(seats, operation)
    await simulated.pass_ms(60_000)
    assert await known(simulated, "one", "two", "three") == ["one", "two", "three"]
    await simulated.pass_ms(LET_GO_MS)  # no process confirmed the last answer
    assert await known(simulated, "one", "two", "three") == ["three"]


async def test_an_operation_is_known_for_longer_than_anybody_tries_it_again(
    simulated: Bench,
) -> None:
    """Check that an operation is remembered while retries may come. Its reply was lost, and Redis
    is unreachable for a caller's whole retry limit.
    """
    patience_s = inspect.signature(retry).parameters["limit_s"].default
    seats = await simulated.training_job()
    first = await admitted(seats, "one", 2)
    await simulated.pass_ms(round(1000 * patience_s) + 60_000)
    assert await admitted(seats, "one", 2) == first


async def test_what_real_servers_let_go_of_is_the_same(bench: Bench) -> None:
    seats = await bench.training_job()
    for operation in ("one", "two"):
        await admitted(seats, operation)
    script = "return redis.call('PEXPIRE', KEYS[1], 7200000)"
    left = [
        await bench.state.run_command("EVAL", script, 1, f"{{{JOB}}}:op:admit:{name}")
        for name in ("one", "two", "none")
    ]
    assert left == [1, 1, 0]


async def step(seats: Seats, number: int) -> None:
    """Run one complete step, covered by a checkpoint as in a run."""
    await seats.fill()
    covered = (number - 1) // CHECKPOINT_EVERY * CHECKPOINT_EVERY
    await seats.commit(number, await seats.leased(number), covered=covered)


async def recorded(bench: Bench, number: int, keep_ms: int) -> None:
    """Record that the recorder has written all, and trim as the launcher does."""
    at = await events.read_last_id(bench.state)
    await readers.record_cursor(bench.state, RECORDER, at, "/runs/job", step=number)
    await readers.trim_events(bench.state, 0, retention_ms=keep_ms)


async def test_keys_stay_as_many_as_they_were_after_the_first_minutes(simulated: Bench) -> None:
    seats = await simulated.training_job(steps=1_000_000)
    counted = []
    for number in range(1, 551):
        await step(seats, number)
        await simulated.pass_ms(STEP_MS)
        if number % TRIM_EVERY == 0:
            await recorded(simulated, number, readers.RETENTION_MS)
        if number in (200, 550):
            counted.append(await simulated.state.run_command("DBSIZE"))
    early, late = counted
    assert late <= early + CHECKPOINT_EVERY
    # Five operations a step, for the two minutes in which a copy of one may still come.
    assert late < 7 * readers.RETENTION_MS // STEP_MS


@pytest.mark.needs("redis-server")
async def test_keys_and_bytes_of_a_real_server_stay_flat(
    servers: Callable[[str], Server],
) -> None:
    state = await StateClient.open(servers("redis-server").url)
    await state.run_command("FLUSHALL")
    await state.run_command(
        "CONFIG", "SET", "appendfsync", "no"
    )  # the test needs its contents, not their durability
    bench = Bench(state, None)
    seats = await bench.training_job(steps=1_000_000)
    keys, memory, entries = [], [], []
    for number in range(1, 401):
        await step(seats, number)
        if number % TRIM_EVERY == 0:
            await recorded(bench, number, keep_ms=1)
        if number in (100, 250, 400):
            # Operations go by time, which does not pass here.
            done = "for _, k in ipairs(redis.call('KEYS', '*:op:*')) do redis.call('DEL', k) end"
            await state.run_command("EVAL", done, 0)
            keys.append(await state.run_command("DBSIZE"))
            entries.append(await state.run_command("XLEN", "{mesh}:events"))
            memory.append((await state.run_command("INFO", "memory"))["used_memory"])
    assert len(await steps.read_step_rows(state, JOB)) <= 2 * CHECKPOINT_EVERY + TRIM_EVERY
    await state.run_command("CONFIG", "SET", "appendfsync", "always")
    await state.close()
    assert keys[2] <= keys[0] + CHECKPOINT_EVERY, keys
    assert entries[2] <= entries[0] + 50, entries
    assert memory[2] < 1.05 * memory[0], memory
