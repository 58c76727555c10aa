"""Each jail that runs has a user of its own, where root may give it one."""

from __future__ import annotations

import asyncio
import json

import pytest

from meshrl.services.sandbox.isolation.jail_launcher import JailLauncher
from meshrl.services.sandbox.isolation.jails.program import JailProgram
from meshrl.services.sandbox.isolation.resources import users
from meshrl.services.sandbox.isolation.resources.limits import MIB, JailLimits
from tests.unit.sandbox.launching import STILL_ROOT, launching, printed

LIMITS = JailLimits(wall_s=60.0, cpu_s=10.0, memory_bytes=256 * MIB, processes=8)
WHO = """
import json, os
def capabilities():
    return [line.split()[1] for line in open("/proc/self/status") if line.startswith("CapPrm")]
try:
    held = capabilities()
except PermissionError:  # where /proc is the host's
    held = []
try:
    os.setresuid(0, 0, 0)
except PermissionError:
    pass
own = [*os.getresuid(), *os.getresgid(), os.stat(".").st_uid]
print(json.dumps([own, os.getgroups(), held]))
input()
"""

pytestmark = [pytest.mark.needs("root")]


async def of_three(tier: str) -> list[list[object]]:
    """What programs in three jails at once say of themselves."""
    program = JailProgram(WHO)
    async with launching(tier=tier) as launcher:
        ran = await asyncio.gather(*(launcher.run(program, LIMITS, b"\n") for _ in range(3)))
    assert [each.status for each in ran] == ["ok"] * 3, ran
    return [json.loads(each.stdout) for each in ran]


def check(told: list[list[object]]) -> None:
    seen = set()
    for own, groups, held in told:
        assert isinstance(own, list) and len(set(own)) == 1 and own[0] >= users.FIRST_USER_ID
        assert groups == [] and set(held) <= {"0000000000000000"}  # type: ignore[call-overload]
        seen.add(own[0])
    assert len(seen) == 3


@pytest.mark.needs("bwrap")
async def test_jails_at_once_are_users_of_their_own() -> None:
    check(await of_three("bwrap"))


@pytest.mark.rotating(3)
@pytest.mark.needs("landlock")
def test_without_namespaces_too() -> None:
    """Through `plain_user`, which shows this checkout to users that cannot reach it."""
    program = (
        "import asyncio, json; from tests.unit.sandbox.isolation import test_users as t; "
        "print(json.dumps(asyncio.run(t.of_three('landlock'))))"
    )
    check(json.loads(printed(program, become=STILL_ROOT)))


HELD = """
import ctypes, struct
libc, held = ctypes.CDLL(None), ctypes.create_string_buffer(24)
assert libc.capget(struct.pack("Ii", 0x20080522, 0), held) == 0
print(struct.unpack("6I", held.raw))
"""


async def without_own_users() -> str:
    """What a program says of its capabilities where a sandbox of root's has one user for all."""
    async with launching(tier="landlock") as launcher:
        launcher.resource_pool.free_user_indices.clear()  # as in a container that has no such users
        ran = await launcher.run(JailProgram(HELD), LIMITS)
    return ran.stdout.decode() + ran.error


@pytest.mark.rotating(3)
@pytest.mark.needs("landlock")
def test_without_users_of_their_own_programs_have_no_capabilities_either() -> None:
    program = (
        "import asyncio; from tests.unit.sandbox.isolation import test_users as t; "
        "print(asyncio.run(t.without_own_users()))"
    )
    assert printed(program, become=STILL_ROOT).strip() == "(0, 0, 0, 0, 0, 0)"


def test_outer_jails_take_blocks_that_do_not_overlap() -> None:
    blocks = [users.first_user_id(pid) for pid in range(1000, 3000)]
    assert len(set(blocks)) == 2000
    assert all(users.FIRST_USER_ID <= block < 2**31 - users.USERS_PER_BLOCK for block in blocks)
    assert {block % users.USERS_PER_BLOCK for block in blocks} == {
        users.FIRST_USER_ID % users.USERS_PER_BLOCK
    }


@pytest.mark.needs("bwrap")
async def test_what_a_jail_shows_every_user_can_enter(launcher: JailLauncher) -> None:
    source = """
import os
for place, folders, names in os.walk("/", onerror=print):
    folders[:] = [name for name in folders if place in ("/", "/run", "/run/meshrl", "/root")]
    folders[:] = [name for name in folders if name not in ("proc", "tmp", "lost+found")]
"""
    found = await launcher.run(JailProgram(source), LIMITS)
    assert (found.status, found.stdout) == ("ok", b""), found
