"""Event streams: cursors, polling, operation records and bounded growth, on every backend."""

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
APPEND_NOTES = """for i = 1, ARGV[1] do
  redis.call('XADD', KEYS[1], '*', 'kind', 'note', 'fields', '{"n": ' .. i .. '}', 'extra', '{}')
end"""
RECORD_LIFETIME_MS = 121_000
STEP_MS = 2000
CHECKPOINT_EVERY = 8
TRIM_EVERY = 10  # steps


async def append_events(state: StateClient, n: int = MANY) -> list[str]:
    """Append `n` events and return their ids."""
    since = await events.read_last_id(state)
    await state.run_command("EVAL", APPEND_NOTES, 1, "{mesh}:events", n)
    return [event.id for event in await events.read_all(state, since)]


async def trim(bench: Bench, **more: int) -> int:
    """Trim the stream, including the last few milliseconds, and return how many events were
    freed.
    """
    await bench.pass_ms(5)
    return await readers.trim_events(bench.state, 0, retention_ms=1, **more)


async def test_events_are_trimmed_only_below_the_lowest_cursor(bench: Bench) -> None:
    state = bench.state
    ids = await append_events(state)
    await readers.record_cursor(state, "recorder/fast", ids[-1], "/runs/fast")
    await readers.record_cursor(state, "recorder/slow", ids[400], "/runs/slow")
    assert await trim(bench) == 400
    assert [e.id for e in await events.read_all(state, ids[400])] == ids[401:]
    assert await trim(bench) == 0  # the slow reader's cursor retains its events
    await readers.record_cursor(state, "recorder/slow", ids[-1], "/runs/slow")
    assert await trim(bench) == MANY - 401
    assert [e.id for e in await events.read_all(state, ids[-1])] == []
    slow = next(r for r in await readers.list_readers(state) if r.name == "recorder/slow")
    assert (slow.cursor, slow.location, slow.has_left) == (ids[-1], "/runs/slow", False)
    assert 0 < slow.joined_ms <= slow.last_seen_ms


async def test_recent_events_are_retained_even_when_all_readers_have_read_them(
    bench: Bench,
) -> None:
    ids = await append_events(bench.state)
    await readers.record_cursor(bench.state, RECORDER, ids[-1], "")
    assert await readers.trim_events(bench.state, 0) == 0
    assert len(await events.read_all(bench.state)) == MANY


async def test_late_reader_gets_history_lost_error(bench: Bench) -> None:
    state = bench.state
    ids = await append_events(state)
    await readers.record_cursor(state, RECORDER, ids[-1], "")
    assert await trim(bench) > 0
    for since in ("0", ids[3]):
        with pytest.raises(HistoryLost, match="history_lost: events after") as error:
            await events.read_all(state, since)
        assert error.value.since == since
        rest = [e.id for e in await events.read_all(state, error.value.through)]
        assert rest
        assert rest == ids[-len(rest) :]


async def test_reader_silent_beyond_the_limit_does_not_block_trimming(bench: Bench) -> None:
    state = bench.state
    ids = await append_events(state)
    await readers.record_cursor(state, "recorder/gone", ids[0], "/runs/gone")
    await bench.pass_ms(30)
    up_since = events.parse_event_id(ids[-1])[0] + 10_000_000
    # The server was down, so the reader could not renew its cursor.
    assert await readers.trim_events(state, up_since, retention_ms=1, silent_ms=20) == 0
    assert await trim(bench, silent_ms=20) > 0
    [event] = [e.fields for e in await events.read_all(state, ids[-1]) if e.kind == "reader_gone"]
    assert (event["reader"], event["where"], event["at"]) == ("recorder/gone", "/runs/gone", ids[0])
    with pytest.raises(HistoryLost):
        await events.read_page(state, ids[0])


async def test_departed_reader_does_not_block_trimming(bench: Bench) -> None:
    ids = await append_events(bench.state)
    await readers.record_cursor(bench.state, RECORDER, ids[0], "", has_left=True)
    assert await trim(bench) > 0


async def test_no_reader_blocks_trimming_beyond_max_events(bench: Bench) -> None:
    state = bench.state
    ids = await append_events(state)
    await readers.record_cursor(state, RECORDER, ids[0], "")
    assert await trim(bench, max_events=200) > 0
    with pytest.raises(HistoryLost):
        await events.read_page(state, ids[0])


@pytest.mark.rotating(3)
async def test_late_recorder_gets_the_job_from_its_submission(
    bench: Bench,
) -> None:
    state = bench.state
    before = await append_events(state)
    await bench.pass_ms(5)
    await jobs.submit(state, JOB, document(), "/runs/job", uuid.uuid4().hex)
    after = await append_events(state)
    assert await trim(bench) > 0
    start = await readers.join(state, RECORDER, "0", "/runs/job")
    found = [e.id for e in await events.read_all(state, start)]
    assert found[-MANY:] == after
    assert set(before[:100]).isdisjoint(found)
    assert "submitted" in {e.kind for e in await events.read_all(state, start)}


async def test_recorder_without_its_file_resumes_from_the_jobs_rows(
    bench: Bench,
) -> None:
    seats, state = await bench.training_job(max_staleness=3), bench.state
    for step in range(1, 5):
        admit = await seats.admit()
        for group in admit:
            await seats.finish(group, scored=1 if group.group % 3 == 0 else 2)
        await seats.commit(step, await seats.leased(step), checkpointed_version=2)
    await seats.requeue((await seats.admit())[0].group, "host_lost", "op")
    start = await readers.join(state, RECORDER, "0", "/runs/job")
    recorded_events = await events.read_all(state, start)
    await readers.record_cursor(state, RECORDER, recorded_events[-1].id, "/runs/job")
    await append_events(state)
    await readers.record_cursor(state, RECORDER, await events.read_last_id(state), "/runs/job")
    assert await trim(bench) > 0

    rejoined = await readers.join(state, RECORDER, "0", "/runs/job")  # its file has been deleted
    with pytest.raises(HistoryLost) as lost:
        await events.read_all(state, rejoined)
    start = await readers.record_history_loss(state, JOB, "/runs/job", lost.value)
    recorded = await events.read_all(state, start)
    [loss] = [e.fields for e in recorded if e.kind == "history_lost"]
    assert loss["through"] == start
    now = await groups.count_in_flight(state, JOB)
    account = trajectory_accounting.compute_account(recorded, now.samples, JOB)
    job = await jobs.read_job(state, JOB)
    assert {term: account[term] for term in trajectory_accounting.TERMS} == {
        term: getattr(job, term) for term in trajectory_accounting.TERMS
    }
    assert (account["lost"], account["trained_twice"]) == (0, 0)

    # A later rollback may abandon the steps since the checkpoint: they are still counted once.
    await seats.go_back(2)
    recorded = await events.read_all(state, start)
    account = trajectory_accounting.compute_account(
        recorded, (await groups.count_in_flight(state, JOB)).samples, JOB
    )
    assert (account["lost"], account["trained_twice"]) == (0, 0)


@pytest.mark.rotating(3)
async def test_resumed_jobs_recorder_misses_none_of_its_events(bench: Bench) -> None:
    """Check that a resumed job misses none of its own events. While the job was stopped, the mesh
    appended other events, which were trimmed.
    """
    seats, state = await bench.training_job(), bench.state
    start = await readers.join(state, RECORDER, "0", "")
    recorded = await events.read_all(state, start)
    await jobs.cancel(state, JOB, uuid.uuid4().hex)
    recorded = await events.read_all(state, start)
    await readers.record_cursor(state, RECORDER, recorded[-1].id, "", has_left=True)
    await append_events(state)
    assert await trim(bench) > 0
    await bench.pass_ms(5)
    await jobs.reopen(state, JOB, uuid.uuid4().hex)
    await jobs.set_phase(state, JOB, jobs.Phase.TRAINING, seats.trainer, TRAINER)
    await seats.admit()
    await append_events(state)
    await trim(bench)
    start = await readers.join(state, RECORDER, recorded[-1].id, "")
    kinds = [e.kind for e in await events.read_all(state, start)]
    assert "phase" in kinds
    assert "opened" in kinds


async def test_step_rows_are_removed_once_recorded_and_covered(bench: Bench) -> None:
    seats, state = await bench.training_job(max_staleness=3), bench.state
    for step in range(1, 7):
        await seats.train(step, checkpointed_version=max(-1, step - 2))

    async def trim_and_list_steps(recorded: int) -> list[int]:
        await readers.record_cursor(
            state, RECORDER, await events.read_last_id(state), "", step=recorded
        )
        await trim(bench)
        return [row["step"] for row in await steps.read_step_rows(state, JOB)]

    assert await trim_and_list_steps(0) == [1, 2, 3, 4, 5, 6]
    assert await trim_and_list_steps(2) == [3, 4, 5, 6]
    # A checkpoint covers the first ones, and none covers the others.
    assert await trim_and_list_steps(6) == [4, 5, 6]
    assert [r.step for r in await steps.read_step_records(state, JOB, 4)] == [5, 6]
    await seats.go_back(4)
    for step in (5, 6):  # repeated, and not recorded yet
        await seats.commit(step, await seats.leased(step), lineage=1, checkpointed_version=step)
    await trim(bench)
    assert [row["step"] for row in await steps.read_step_rows(state, JOB)] == [5, 6]


async def test_groups_received_by_the_trainer_are_not_sent_again(bench: Bench) -> None:
    seats = await bench.training_job(groups_per_step=3)
    opened = await seats.admit()

    async def lease_except(*received: int) -> groups.LeasedGroups:
        return await groups.lease_groups(bench.state, JOB, TRAINER, seats.trainer, 1, received)

    await seats.finish(opened[1])
    first = await lease_except()
    assert [row.group for row in first.groups] == [opened[1].group] and first.wait
    assert (await lease_except(opened[1].group)).groups == []
    await seats.finish(opened[0])
    await seats.finish(opened[2])
    rest = await lease_except(opened[1].group)
    assert [row.group for row in rest.groups] == [opened[0].group, opened[2].group]
    assert rest.wait is None
    everything = await lease_except()
    assert [row.group for row in everything.groups] == [group.group for group in opened[:3]]
    nothing_left = await lease_except(*(group.group for group in opened[:3]))
    assert (nothing_left.groups, nothing_left.wait) == ([], None)


async def test_restarted_trainer_leases_its_predecessors_groups(bench: Bench) -> None:
    seats = await bench.training_job(groups_per_step=2)
    opened = await seats.admit()
    for group in opened[:2]:
        await seats.finish(group)
    await seats.leased(1)
    seats.trainer = await bench.seat(TRAINER)
    await groups.lease_groups(bench.state, JOB, TRAINER, seats.trainer, 1)
    group_ids = await seats.leased(1)
    assert group_ids == [group.group for group in opened[:2]]
    await seats.commit(1, group_ids)


async def test_evaluation_is_pending_until_recorded_or_the_job_ends(
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


async def admit(seats: Seats, operation: str, want: int = 1) -> list[int]:
    opened = await groups.admit_groups(seats.state, JOB, SHARD, seats.shard, want, operation)
    return [one.group for one in opened]


async def remembered_operations(bench: Bench, *operations: str) -> list[str]:
    exists_by_name = [
        (name, await bench.state.run_command("EXISTS", f"{{{JOB}}}:op:admit_groups:{name}"))
        for name in operations
    ]
    return [name for name, exists in exists_by_name if exists]


async def test_operation_record_expires_once_its_caller_has_the_reply(simulated: Bench) -> None:
    seats = await simulated.training_job()
    for operation in ("one", "two", "three"):
        await admit(seats, operation)
    await simulated.pass_ms(60_000)
    assert await remembered_operations(simulated, "one", "two", "three") == ["one", "two", "three"]
    await simulated.pass_ms(RECORD_LIFETIME_MS)  # no process confirmed the last reply
    assert await remembered_operations(simulated, "one", "two", "three") == ["three"]


async def test_operation_record_outlives_the_longest_retry_limit(
    simulated: Bench,
) -> None:
    """Check that an operation is remembered while retries may arrive. Its reply was lost, and Redis
    is unreachable for a caller's whole retry limit.
    """
    retry_limit_s = inspect.signature(retry).parameters["limit_s"].default
    seats = await simulated.training_job()
    first = await admit(seats, "one", 2)
    await simulated.pass_ms(round(1000 * retry_limit_s) + 60_000)
    assert await admit(seats, "one", 2) == first


async def test_operation_records_expire_on_real_servers_too(bench: Bench) -> None:
    seats = await bench.training_job()
    for operation in ("one", "two"):
        await admit(seats, operation)
    script = "return redis.call('PEXPIRE', KEYS[1], 7200000)"
    expiry_set = [
        await bench.state.run_command("EVAL", script, 1, f"{{{JOB}}}:op:admit_groups:{name}")
        for name in ("one", "two", "none")
    ]
    assert expiry_set == [1, 1, 0]


async def run_step(seats: Seats, number: int) -> None:
    """Run one complete step, covered by a checkpoint as in a run."""
    await seats.fill()
    covered = (number - 1) // CHECKPOINT_EVERY * CHECKPOINT_EVERY
    await seats.commit(number, await seats.leased(number), checkpointed_version=covered)


async def record_and_trim(bench: Bench, number: int, keep_ms: int) -> None:
    """Record that the recorder has written all, and trim as the launcher does."""
    at = await events.read_last_id(bench.state)
    await readers.record_cursor(bench.state, RECORDER, at, "/runs/job", step=number)
    await readers.trim_events(bench.state, 0, retention_ms=keep_ms)


async def test_key_count_stays_bounded_after_the_first_minutes(simulated: Bench) -> None:
    seats = await simulated.training_job(steps=1_000_000)
    key_counts = []
    for number in range(1, 281):
        await run_step(seats, number)
        await simulated.pass_ms(STEP_MS)
        if number % TRIM_EVERY == 0:
            await record_and_trim(simulated, number, readers.RETENTION_MS)
        if number in (100, 280):
            key_counts.append(await simulated.state.run_command("DBSIZE"))
    early, late = key_counts
    assert late <= early + CHECKPOINT_EVERY
    # Five operations a step, for the two minutes in which a duplicate of one may still arrive.
    assert late < 7 * readers.RETENTION_MS // STEP_MS


@pytest.mark.needs("redis-server")
async def test_key_count_and_memory_of_a_real_server_stay_flat(
    servers: Callable[[str], Server],
) -> None:
    state = await StateClient.open(servers("redis-server").url)
    await state.run_command("FLUSHALL")
    # The test needs its contents, not its durability.
    await state.run_command("CONFIG", "SET", "appendfsync", "no")
    bench = Bench(state, None)
    seats = await bench.training_job(steps=1_000_000)
    keys, memory, entries = [], [], []
    for number in range(1, 401):
        await run_step(seats, number)
        if number % TRIM_EVERY == 0:
            await record_and_trim(bench, number, keep_ms=1)
        if number in (100, 250, 400):
            # Operation records expire by time, which does not pass here.
            delete_operations = (
                "for _, k in ipairs(redis.call('KEYS', '*:op:*')) do redis.call('DEL', k) end"
            )
            await state.run_command("EVAL", delete_operations, 0)
            keys.append(await state.run_command("DBSIZE"))
            entries.append(await state.run_command("XLEN", "{mesh}:events"))
            memory.append((await state.run_command("INFO", "memory"))["used_memory"])
    assert len(await steps.read_step_rows(state, JOB)) <= 2 * CHECKPOINT_EVERY + TRIM_EVERY
    await state.run_command("CONFIG", "SET", "appendfsync", "always")
    await state.close()
    assert keys[2] <= keys[0] + CHECKPOINT_EVERY, keys
    assert entries[2] <= entries[0] + 50, entries
    assert memory[2] < 1.05 * memory[0], memory
