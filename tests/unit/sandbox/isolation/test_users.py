"""Separate user of each running jail, where root can assign one."""

from __future__ import annotations

import asyncio
import json

import pytest

from meshrl.services.sandbox.isolation.jail_launcher import JailLauncher
from meshrl.services.sandbox.isolation.jails.program import JailProgram
from meshrl.services.sandbox.isolation.resources import users
from meshrl.services.sandbox.isolation.resources.limits import MIB, JailLimits
from tests.unit.sandbox.launching import STILL_ROOT, open_launcher, run_program

LIMITS = JailLimits(wall_s=60.0, cpu_s=10.0, memory_bytes=256 * MIB, processes=8)
PRINT_IDENTITY = """
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


async def run_three_jails(tier: str) -> list[list[object]]:
    """Run programs in three jails at once and return the identities that they print."""
    program = JailProgram(PRINT_IDENTITY)
    async with open_launcher(tier=tier) as launcher:
        results = await asyncio.gather(*(launcher.run(program, LIMITS, b"\n") for _ in range(3)))
    assert [result.status for result in results] == ["ok"] * 3, results
    return [json.loads(result.stdout) for result in results]


def check_identities(identities: list[list[object]]) -> None:
    user_ids = set()
    for ids, groups, capabilities in identities:
        assert isinstance(ids, list) and len(set(ids)) == 1 and ids[0] >= users.FIRST_USER_ID
        assert groups == [] and set(capabilities) <= {"0000000000000000"}  # type: ignore[call-overload]
        user_ids.add(ids[0])
    assert len(user_ids) == 3


@pytest.mark.needs("bwrap")
async def test_concurrent_jails_have_separate_users() -> None:
    check_identities(await run_three_jails("bwrap"))


@pytest.mark.rotating(3)
@pytest.mark.needs("landlock")
def test_concurrent_jails_have_separate_users_without_namespaces() -> None:
    """Run through `plain_user`, which makes this checkout accessible to other users."""
    program = (
        "import asyncio, json; from tests.unit.sandbox.isolation import test_users as t; "
        "print(json.dumps(asyncio.run(t.run_three_jails('landlock'))))"
    )
    check_identities(json.loads(run_program(program, become=STILL_ROOT)))


PRINT_CAPABILITIES = """
import ctypes, struct
libc, held = ctypes.CDLL(None), ctypes.create_string_buffer(24)
assert libc.capget(struct.pack("Ii", 0x20080522, 0), held) == 0
print(struct.unpack("6I", held.raw))
"""


async def run_without_separate_users() -> str:
    """Return the capabilities that a program reports in a root sandbox with one user for all
    jails.
    """
    async with open_launcher(tier="landlock") as launcher:
        launcher.resource_pool.free_user_indices.clear()  # as in a container without such users
        result = await launcher.run(JailProgram(PRINT_CAPABILITIES), LIMITS)
    return result.stdout.decode() + result.error


@pytest.mark.rotating(3)
@pytest.mark.needs("landlock")
def test_programs_without_separate_users_have_no_capabilities() -> None:
    program = (
        "import asyncio; from tests.unit.sandbox.isolation import test_users as t; "
        "print(asyncio.run(t.run_without_separate_users()))"
    )
    assert run_program(program, become=STILL_ROOT).strip() == "(0, 0, 0, 0, 0, 0)"


def test_user_blocks_of_outer_jails_do_not_overlap() -> None:
    blocks = [users.first_user_id(pid) for pid in range(1000, 3000)]
    assert len(set(blocks)) == 2000
    assert all(users.FIRST_USER_ID <= block < 2**31 - users.USERS_PER_BLOCK for block in blocks)
    assert {block % users.USERS_PER_BLOCK for block in blocks} == {
        users.FIRST_USER_ID % users.USERS_PER_BLOCK
    }


@pytest.mark.needs("bwrap")
async def test_mounted_directories_can_be_entered_by_every_user(launcher: JailLauncher) -> None:
    source = """
import os
for place, folders, names in os.walk("/", onerror=print):
    folders[:] = [name for name in folders if place in ("/", "/run", "/run/meshrl", "/root")]
    folders[:] = [name for name in folders if name not in ("proc", "tmp", "lost+found")]
"""
    result = await launcher.run(JailProgram(source), LIMITS)
    assert (result.status, result.stdout) == ("ok", b""), result
