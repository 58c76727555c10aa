"""Whose keys are let in, the same on every backend."""

from __future__ import annotations

import pytest

from meshrl.common.base.errors import Refused
from meshrl.common.state import registry
from meshrl.common.state.hosts import doors
from meshrl.common.state.hosts.doors import Row
from meshrl.common.state.redis.client import State, SyncClient
from meshrl.common.state.redis.keys import MESH
from meshrl.common.state.registry import Entry, Renewal
from tests.contract.state.state_bench import Bench

HOST, OTHER = "gpu1-1f3a9c", "gpu2-77aa01"
KEY, ANOTHER, THIRD = "a1" * 32, "b2" * 32, "c3" * 32
GONE_MS = 600_000


@pytest.fixture
async def asked(state: State) -> SyncClient:
    """What threads ask with, of a mesh with one host."""
    await doors.admit_host(state, HOST)
    return state._sync


async def test_who_has_shown_a_key_is_known_by_role_and_host(
    state: State, asked: SyncClient
) -> None:
    assert doors.who(asked, [KEY]) == [()]
    assert await doors.enter(state, Row("engine", HOST, KEY, "engine/g0.0")) == 0
    assert doors.who(asked, [KEY]) == [(f"engine@{HOST}",)]
    assert doors.who(asked, [ANOTHER, KEY]) == [(), (f"engine@{HOST}",)]
    await doors.leave(state, Row("engine", HOST, KEY, "engine/g0.0"))
    assert doors.who(asked, [KEY]) == [()]
    assert await doors.rows(state) == []


async def test_a_host_that_nobody_let_in_shows_no_key(state: State, asked: SyncClient) -> None:
    with pytest.raises(Refused, match=OTHER):
        await doors.enter(state, Row("engine", OTHER, KEY, "engine/g0.0"))
    # it may write to its own door all the same
    await state.command("HSET", f"{MESH}:door:engine:{OTHER}", KEY, "engine/g0.0")
    assert doors.who(asked, [KEY]) == [()]


async def test_who_enters_the_key_of_another_takes_nothing_from_it(
    state: State, asked: SyncClient
) -> None:
    await doors.admit_host(state, OTHER)
    await doors.enter(state, Row("engine", HOST, KEY, "engine/g0.0"))
    await doors.enter(state, Row("worker", HOST, ANOTHER, "worker/w0"))
    # with what is its own, a host can do no more than this
    for role in ("engine", "rollout"):
        await state.command("HSET", f"{MESH}:door:{role}:{OTHER}", KEY, "engine/g0.0")
    assert doors.who(asked, [ANOTHER, KEY, THIRD]) == [
        (f"worker@{HOST}",),
        (f"engine@{HOST}", f"engine@{OTHER}", f"rollout@{OTHER}"),
        (),
    ]
    await doors.revoke_host(state, OTHER)
    assert doors.who(asked, [KEY]) == [(f"engine@{HOST}",)]


async def test_an_expelled_host_has_no_key_left_and_shows_none(
    state: State, asked: SyncClient
) -> None:
    await doors.admit_host(state, OTHER)
    await doors.enter(state, Row("engine", OTHER, KEY, "engine/g0.0"))
    number = await doors.enter(state, Row("engine", HOST, ANOTHER, "engine/g1.0"))
    assert await doors.revoke_host(state, OTHER)
    assert not await doors.revoke_host(state, OTHER)
    assert doors.who(asked, [KEY, ANOTHER]) == [(), (f"engine@{HOST}",)]
    with pytest.raises(Refused, match="expelled"):
        await doors.enter(state, Row("engine", OTHER, THIRD, "engine/g0.0"))
    assert await doors.enter(state, Row("worker", HOST, THIRD, "worker/w0")) > number


async def test_a_revoked_key_is_let_in_no_more_even_by_its_own_host(
    state: State, asked: SyncClient
) -> None:
    await doors.enter(state, Row("engine", HOST, KEY, "engine/g0.0"))
    assert await doors.revoke_key(state, KEY)
    assert not await doors.revoke_key(state, KEY)
    await state.command("HSET", f"{MESH}:door:engine:{HOST}", KEY, "engine/g0.0")
    assert doors.who(asked, [KEY]) == [()]
    with pytest.raises(Refused, match=KEY[:8]):
        await doors.enter(state, Row("engine", HOST, KEY, "engine/g0.0"))


async def test_the_key_of_a_bulk_port_counts_while_its_processs_other_key_does(
    state: State, asked: SyncClient
) -> None:
    await doors.admit_host(state, OTHER)
    bulk, other = (f"bulk:{digit * 64}" for digit in "de")
    engine = Row("engine", HOST, KEY, "engine/g0.0", bulk)
    await doors.enter(state, engine)
    assert doors.who(asked, [bulk, KEY, "d" * 64]) == [(f"engine@{HOST}",)] * 2 + [()]
    assert [row.public for row in await doors.rows(state)] == [KEY], "one process, one row"
    # a host that shows another's key beside one of its own takes nothing from it by being revoked
    await doors.enter(state, Row("worker", OTHER, ANOTHER, "worker/w0", bulk))
    assert await doors.revoke_key(state, ANOTHER)
    assert doors.who(asked, [bulk, ANOTHER]) == [(f"engine@{HOST}",), ()]
    await state.command("HSET", f"{MESH}:door:worker:{OTHER}", other, f"1 {ANOTHER}")
    assert doors.who(asked, [other]) == [()]
    await doors.leave(state, engine)
    assert doors.who(asked, [bulk, KEY]) == [(), ()]


async def test_all_keys_are_listed_with_the_names_of_their_processes(
    state: State, asked: SyncClient
) -> None:
    await doors.enter(state, Row("worker", HOST, ANOTHER, "worker/w0"))
    await doors.enter(state, Row("engine", HOST, KEY, "engine/g0.0"))
    assert await doors.rows(state) == [
        Row("engine", HOST, KEY, "engine/g0.0"),
        Row("worker", HOST, ANOTHER, "worker/w0"),
    ]


async def test_a_mesh_of_one_host_lets_in_no_other_host(state: State, asked: SyncClient) -> None:
    await doors.admit_first(state, OTHER)  # somebody is let in already
    assert await doors.hosts(state) == [HOST]
    await doors.admit_host(state, OTHER)
    await doors.enter(state, Row("worker", OTHER, KEY, "worker/w0"))
    await doors.admit_alone(state, HOST)
    assert await doors.hosts(state) == [HOST] and doors.who(asked, [KEY]) == [()]
    await doors.admit_first(state, OTHER)
    with pytest.raises(Refused):
        await doors.enter(state, Row("worker", OTHER, KEY, "worker/w0"))


async def test_keys_of_processes_that_are_gone_do_not_stay_for_ever(simulated: Bench) -> None:
    state = simulated.state
    await doors.admit_host(state, HOST)
    await doors.enter(state, Row("engine", HOST, KEY, "engine/g0.0"))
    await simulated.pass_ms(GONE_MS - 1000)
    await doors.enter(state, Row("engine", HOST, ANOTHER, "engine/g1.0"))
    assert len(await doors.rows(state)) == 2, "one that is late is not gone"
    await simulated.pass_ms(2000)
    await doors.enter(state, Row("engine", HOST, THIRD, "engine/g2.0"))
    assert [row.public for row in await doors.rows(state)] == [ANOTHER, THIRD]


async def test_a_renewal_shows_the_key_and_tells_of_revocations(
    state: State, asked: SyncClient
) -> None:
    row = Row("engine", HOST, KEY, "engine/g0.0")
    token = await registry.register(state, Entry(row.name, "engine", incarnation="a"), 60_000)

    def renewed() -> Renewal:
        return registry.renew(state, row.name, token, 60_000, {}, [], row)

    number = await doors.enter(state, row)
    assert renewed() == Renewal(True, number)
    await state.command("DEL", f"{MESH}:door:engine:{HOST}")
    assert renewed().held, "a Redis that has forgotten it is shown it again"
    assert doors.who(asked, [KEY]) == [(f"engine@{HOST}",)]
    await doors.revoke_key(state, ANOTHER)
    assert renewed() == Renewal(True, number + 1)
    await doors.revoke_key(state, KEY)
    assert not renewed().held and "revoked" in renewed().why
    assert doors.who(asked, [KEY]) == [()]
