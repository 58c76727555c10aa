"""Profiles of a mesh in Redis, which the processes of a kind write together."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from meshrl.common.base.errors import Refused
from meshrl.common.state.pool.demand.profiles import (
    Profile,
    ProfileKey,
    decode_profile,
    encode_profile,
    merge_profiles,
)
from meshrl.common.state.redis.client import StateClient
from meshrl.common.state.redis.keys import MESH_PREFIX

PROFILES_KEY = f"{MESH_PREFIX}:profiles"
MAX_PROFILES = 256  # of a mesh, some kB each; those written longest ago are removed
MAX_TRIES = 16  # of one write, while other processes of the same kind write


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """Stored profile with its number of writes."""

    key: ProfileKey
    profile: Profile
    revision: int = 0
    written_ms: int = 0  # wall clock of Redis


async def read_profile(state: StateClient, key: ProfileKey) -> ProfileRow:
    """Return the profile of a kind; an empty one of revision 0 if there is none."""
    text = await state.run_command("HGET", PROFILES_KEY, key.encode())
    return _decode_row(key, text) if text else ProfileRow(key, {})


async def read_profiles(state: StateClient) -> list[ProfileRow]:
    """Return all profiles, the last written first."""
    return decode_profiles(await dump_profiles(state))


def decode_profiles(dumped: Mapping[str, str]) -> list[ProfileRow]:
    """Return the profiles of `dump_profiles`, the last written first."""
    found = [_decode_row(ProfileKey.decode(key), text) for key, text in dumped.items()]
    return sorted(found, key=lambda row: (-row.written_ms, row.key.encode()))


async def add_to_profile(
    state: StateClient, row: ProfileRow, batch: Profile, make_op: Callable[[], str]
) -> ProfileRow:
    """Add samples to a stored profile and return it; `row` is the last known state.

    `make_op` makes ids of operations. Raises Refused if other processes write all the time.
    """
    for _ in range(MAX_TRIES):
        merged = merge_profiles(row.profile, batch)
        answer = await state.run_mesh_script(
            "write_profile",
            op=make_op(),
            key=row.key.encode(),
            revision=row.revision,
            profile=encode_profile(merged),
            max_count=MAX_PROFILES,
        )
        row = ProfileRow(row.key, decode_profile(answer["profile"]), answer["revision"])
        if answer["is_written"]:
            return row
    raise Refused(
        f"a profile changed during {MAX_TRIES} writes in a row",
        where=row.key.encode(),
        fix="Retry: the samples are still to be added",
    )


async def restore_profiles(
    state: StateClient, saved: Mapping[str, str], make_op: Callable[[], str]
) -> int:
    """Write profiles of `dump_profiles` that Redis does not have; return their number."""
    restored = 0
    for key, text in saved.items():
        row = json.loads(text)
        answer = await state.run_mesh_script(
            "write_profile",
            op=make_op(),
            key=key,
            revision=0,
            profile=row["profile"],
            written_ms=row["written_ms"],
            max_count=MAX_PROFILES,
        )
        restored += bool(answer["is_written"])
    return restored


async def dump_profiles(state: StateClient) -> dict[str, str]:
    """Return all profiles as texts for a file, by the texts of their keys."""
    flat = await state.run_command("HGETALL", PROFILES_KEY)
    rows = flat if isinstance(flat, dict) else dict(zip(flat[::2], flat[1::2], strict=True))
    return dict(sorted(rows.items()))


def _decode_row(key: ProfileKey, text: str) -> ProfileRow:
    row = json.loads(text)
    return ProfileRow(key, decode_profile(row["profile"]), row["revision"], row["written_ms"])
