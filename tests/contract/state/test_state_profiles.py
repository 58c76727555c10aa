"""Profiles that the processes of one kind write together."""

from __future__ import annotations

import asyncio
import itertools
import json
from dataclasses import replace

import pytest

from meshrl.common.base.errors import Refused
from meshrl.common.state.pool.store import profile_rows
from meshrl.common.state.pool.store.profile_rows import (
    ProfileRow,
    add_to_profile,
    decode_profiles,
    dump_profiles,
    read_profile,
    read_profiles,
    restore_profiles,
)
from meshrl.common.state.redis.client import StateClient
from tests.profiles import KEY, make_profile

ops = (f"op{number}" for number in itertools.count())


def make_op() -> str:
    return next(ops)


async def test_written_profile_is_read_back(state: StateClient) -> None:
    assert await read_profile(state, KEY) == ProfileRow(KEY, {})
    written = await add_to_profile(state, ProfileRow(KEY, {}), make_profile(0.25, 0.5), make_op)
    read = await read_profile(state, KEY)
    assert (read.profile, read.revision) == (written.profile, 1)
    assert read.profile["generate"].durations.max_s == 0.5
    assert await read_profiles(state) == [read]


async def test_two_processes_of_a_kind_add_to_one_profile(state: StateClient) -> None:
    async def write(row: ProfileRow, function: str) -> ProfileRow:
        for _ in range(4):
            row = await add_to_profile(state, row, make_profile(1.0, function=function), make_op)
        return row

    started = await read_profile(state, KEY)
    await asyncio.gather(write(started, "generate"), write(started, "sync"))
    found = await read_profile(state, KEY)
    assert found.revision == 8
    assert {name: round(one.durations.count, 1) for name, one in found.profile.items()} == {
        "generate": 4.0,
        "sync": 4.0,
    }


async def test_repeated_write_after_a_lost_reply_counts_once(state: StateClient) -> None:
    for _ in range(2):  # the process has not seen the first reply
        row = await add_to_profile(state, ProfileRow(KEY, {}), make_profile(1.0), lambda: "same")
    assert (await read_profile(state, KEY)).revision == row.revision == 1


async def test_profiles_of_a_lost_redis_are_restored_and_newer_ones_stay(
    state: StateClient,
) -> None:
    other = replace(KEY, ranks=2)
    for key in (KEY, other):
        await add_to_profile(state, ProfileRow(key, {}), make_profile(1.0), make_op)
    saved = await dump_profiles(state)
    assert [row.revision for row in decode_profiles(saved)] == [1, 1]
    await state.run_command("FLUSHALL")
    await add_to_profile(state, ProfileRow(KEY, {}), make_profile(9.0), make_op)
    assert await restore_profiles(state, saved, make_op) == 1
    longest = {
        row.key.ranks: row.profile["generate"].durations.max_s for row in await read_profiles(state)
    }
    assert longest == {1: 9.0, 2: 1.0}
    known = json.loads(saved[other.encode()])["written_ms"]
    assert (await read_profile(state, other)).written_ms == known


async def test_writer_adds_only_its_samples_after_redis_lost_the_profile(
    state: StateClient,
) -> None:
    row = ProfileRow(KEY, make_profile(7.0), revision=5)
    row = await add_to_profile(state, row, make_profile(1.0), make_op)
    assert (row.revision, row.profile["generate"].durations.max_s) == (1, 1.0)


async def test_profile_written_longest_ago_gives_way(
    state: StateClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile_rows, "MAX_PROFILES", 3)
    for ranks in range(1, 6):
        row = ProfileRow(replace(KEY, ranks=ranks), {})
        saved = {
            row.key.encode(): json.dumps(
                {"profile": "{}", "written_ms": 100 * ranks, "revision": 1}
            )
        }
        await restore_profiles(state, saved, make_op)
    assert [row.key.ranks for row in await read_profiles(state)] == [5, 4, 3]


async def test_writer_gives_up_if_others_write_all_the_time(
    state: StateClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile_rows, "MAX_TRIES", 1)
    await add_to_profile(state, ProfileRow(KEY, {}), make_profile(1.0), make_op)
    with pytest.raises(Refused, match="changed during 1 writes"):
        await add_to_profile(state, ProfileRow(KEY, {}), make_profile(1.0), make_op)
