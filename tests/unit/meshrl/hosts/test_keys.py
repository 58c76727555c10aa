"""A key is revoked by how it begins, when that is no other key's beginning."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshrl.commands.keys import _key, _still_good
from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import NotFound
from meshrl.common.mesh.access import members, tokens
from meshrl.common.mesh.access.records import HOST as FOR_HOSTS
from meshrl.common.mesh.access.records import read
from meshrl.common.state.hosts import doors
from meshrl.common.state.hosts.doors import Row
from meshrl.sim.redis.state import simulated_state

HOST, THIEF = "gpu1-1f3a9c", "gpu2-2e4b8d"
ONE, OTHER = "a1b2c3d4" + "0" * 56, "a1b2c3d4" + "f" * 56


async def test_a_key_is_meant_by_how_it_begins_and_never_one_of_two() -> None:
    state = simulated_state(SystemClock())
    await doors.admit_host(state, HOST)
    await doors.enter(state, Row("engine", HOST, ONE, "engine/g0.0"))
    assert await _key(state, ONE[:8]) == (ONE, f" of engine/g0.0 on {HOST}")
    with pytest.raises(NotFound, match="no keys that are let in begin with ffffffff"):
        await _key(state, "f" * 8)
    await doors.enter(state, Row("worker", HOST, OTHER, "worker/h1w0"))
    with pytest.raises(NotFound, match="2 keys") as caught:
        await _key(state, ONE[:8])
    assert f"{OTHER[:16]} of worker/h1w0" in caught.value.fix
    assert (await _key(state, OTHER[:9]))[0] == OTHER
    await doors.admit_host(state, THIEF)
    await doors.enter(state, Row("engine", THIEF, ONE, "engine/g1.0"))
    shown = await _key(state, ONE[:9])
    assert shown == (ONE, f" of engine/g0.0 on {HOST} and engine/g1.0 on {THIEF}"), "still one key"
    gone = "0" * 64
    assert await _key(state, gone) == (gone, ""), "a whole one may have left its door"
    await state.close()


def test_who_expels_a_host_is_told_of_the_token_that_would_let_it_in_again(tmp_path: Path) -> None:
    path, hosts = (
        tmp_path / "tokens.json",
        {"once": "gpu1-aa", "any": "gpu2-bb", "ended": "gpu3-cc"},
    )
    for uses, (name, host) in zip((1, 0, 0), hosts.items(), strict=True):
        token, _ = tokens.made(name, 60.0, 0.0, "tcp://h:1", "k", kind=FOR_HOSTS, uses=uses)
        tokens.keep(path, token)
        members.let_in(path, token.id, host, host.encode(), 1.0)
    tokens.revoke(path, "ended", 2.0)
    known = read(path)
    assert [_still_good(known, host, 3.0) for host in hosts.values()] == ["", "any", ""]
    assert _still_good(known, hosts["any"], 61.0) == ""
    assert _still_good(known, "gpu9-zz", 3.0) == ""
