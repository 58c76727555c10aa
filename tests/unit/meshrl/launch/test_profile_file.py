"""File of a mesh's profiles: torn, corrupt, and beside a Redis that lost them."""

from __future__ import annotations

import asyncio
from pathlib import Path

from meshrl.common.base.files import documents
from meshrl.common.base.files.corruption import CORRUPTION_EVENT
from meshrl.common.base.random import Random
from meshrl.common.state import events
from meshrl.common.state.pool.store.profile_rows import ProfileRow, add_to_profile, read_profiles
from meshrl.common.state.redis.client import StateClient
from meshrl.directory.directory_paths import MeshPaths
from meshrl.launch.head.profile_file import SAVE_INTERVAL_S, ProfileFile
from meshrl.sim.redis.simulated_state import open_simulated_state
from meshrl.sim.virtual_loop import VirtualClock
from tests.profiles import KEY, make_profile
from tests.simulated_host import SimulatedHost, virtual


def make_file(paths: MeshPaths, clock: VirtualClock, random: Random) -> ProfileFile:
    return ProfileFile(paths, clock, SimulatedHost(clock, random.child("host")))


async def add(state: StateClient, seconds: float) -> None:
    known = [row for row in await read_profiles(state) if row.key == KEY]
    row = known[0] if known else ProfileRow(KEY, {})
    await add_to_profile(state, row, make_profile(seconds), lambda: f"op {seconds}")


async def read_longest_s(state: StateClient) -> list[float]:
    return [row.profile["generate"].durations.max_s for row in await read_profiles(state)]


@virtual
async def test_profiles_outlive_redis_and_a_save_killed_at_any_byte(
    clock: VirtualClock, random: Random, tmp_path: Path
) -> None:
    paths = MeshPaths(tmp_path)
    state = open_simulated_state(clock)
    await add(state, 2.0)
    await make_file(paths, clock, random).save(state)
    whole = paths.profiles.read_bytes()
    for length in range(0, len(whole), 37):
        documents.temporary_path(paths.profiles).write_bytes(whole[:length])
        empty = open_simulated_state(clock)
        await make_file(paths, clock, random).restore(empty)
        assert await read_longest_s(empty) == [2.0]
    await add(state, 5.0)
    await make_file(paths, clock, random).save(state)
    empty = open_simulated_state(clock)
    await make_file(paths, clock, random).restore(empty)
    assert await read_longest_s(empty) == [5.0]
    assert [path.name for path in paths.directory.iterdir()] == ["profiles.json"]


@virtual
async def test_corrupt_file_is_quarantined_and_written_again(
    clock: VirtualClock, random: Random, tmp_path: Path
) -> None:
    paths = MeshPaths(tmp_path)
    state = open_simulated_state(clock)
    await add(state, 2.0)
    await make_file(paths, clock, random).save(state)
    paths.profiles.write_bytes(paths.profiles.read_bytes()[:-9])
    file = make_file(paths, clock, random)
    await file.restore(state)
    [event] = [e for e in await events.read_all(state) if e.kind == CORRUPTION_EVENT]
    assert event.fields["path"] == str(paths.profiles)
    assert event.fields["aside"] == str(tmp_path / "quarantine/mesh/profiles.json")
    await file.save(state)
    empty = open_simulated_state(clock)
    await make_file(paths, clock, random).restore(empty)
    assert await read_longest_s(empty) == [2.0]


@virtual
async def test_file_is_saved_periodically_and_at_the_end(
    clock: VirtualClock, random: Random, tmp_path: Path
) -> None:
    paths = MeshPaths(tmp_path)
    state = open_simulated_state(clock)
    saving = asyncio.create_task(make_file(paths, clock, random).save_forever(state))
    await clock.sleep(SAVE_INTERVAL_S + 1.0)
    assert not paths.profiles.exists()  # a mesh without profiles has no file
    await add(state, 2.0)
    await clock.sleep(SAVE_INTERVAL_S)
    first = paths.profiles.read_bytes()
    await add(state, 5.0)
    saving.cancel()
    await asyncio.wait([saving])
    assert paths.profiles.read_bytes() != first
