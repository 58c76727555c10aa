"""Memory limit of a whole jail where no control group enforces it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from meshrl.services.sandbox.isolation.jail_launcher import JailLauncher
from meshrl.services.sandbox.isolation.jails.program import JailProgram
from meshrl.services.sandbox.isolation.resources.limits import MIB, JailLimits
from tests.unit.sandbox.launching import PLAIN, open_launcher, run_program

LIMITS = JailLimits(wall_s=120.0, cpu_s=20.0, memory_bytes=160 * MIB, processes=16)
FILL_FUNCTION = """
import mmap, os, time
def filled(size, flags):
    block = mmap.mmap(-1, size, flags)
    for place in range(0, size, 4096):
        block[place] = 1
    return block
"""
PRIVATE, SHARED = "mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS", "mmap.MAP_SHARED | mmap.MAP_ANONYMOUS"
HOLDING = """
for _ in range(6):
    if os.fork() == 0:
        kept = filled(60 << 20, {})
        time.sleep(60)
        os._exit(0)
time.sleep(60)
"""
HIDING = FILL_FUNCTION + "import ctypes\nctypes.CDLL(None).prctl(4, 0)\n" + HOLDING.format(PRIVATE)
INHERITED = """
kept = filled(80 << 20, {})
for _ in range(6):
    if os.fork() == 0:
        time.sleep(0.4)
        os._exit(0)
for _ in range(6):
    os.wait()
print("all six")
"""
PROGRAMS_OVER_LIMIT = {
    "private": FILL_FUNCTION + HOLDING.format(PRIVATE),
    "shared": FILL_FUNCTION + HOLDING.format(SHARED),
    "hidden from the keeper": HIDING,
}
PROGRAMS_WITHIN_LIMIT = {
    "inherited": FILL_FUNCTION + INHERITED.format(PRIVATE),
    "inherited and shared": FILL_FUNCTION + INHERITED.format(SHARED),
}


@pytest.fixture
async def launcher(tmp_path: Path) -> AsyncIterator[JailLauncher]:
    async with open_launcher(tmp_path / "jails.log") as launcher:
        yield launcher


@pytest.mark.rotating(3)
@pytest.mark.needs("bwrap")
@pytest.mark.parametrize("source", PROGRAMS_OVER_LIMIT.values(), ids=PROGRAMS_OVER_LIMIT)
async def test_processes_over_the_limit_together_are_ended(
    launcher: JailLauncher, source: str
) -> None:
    result = await launcher.run(JailProgram(source), LIMITS)
    assert (result.status, result.error) == ("out_of_memory", "over 160 MiB of memory"), result


@pytest.mark.needs("bwrap")
@pytest.mark.parametrize("source", PROGRAMS_WITHIN_LIMIT.values(), ids=PROGRAMS_WITHIN_LIMIT)
async def test_shared_memory_counts_once(launcher: JailLauncher, source: str) -> None:
    result = await launcher.run(JailProgram(source), LIMITS)
    assert (result.status, result.stdout) == ("ok", b"all six\n"), result


@pytest.mark.needs("bwrap")
async def test_unmapped_memory_is_denied_by_name(launcher: JailLauncher) -> None:
    source = "import os\nos.write(os.memfd_create('x'), bytes(1 << 20))"
    result = await launcher.run(JailProgram(source), LIMITS)
    assert (result.status, result.denied_calls) == ("refused", ("memfd_create",))


@pytest.mark.rotating(3)
@pytest.mark.needs("landlock", "root")
def test_memory_limit_applies_without_namespaces() -> None:
    program = (
        "import asyncio; from tests.unit.sandbox.jail import test_memory as t; "
        "print(*asyncio.run(t.run_over_and_within()))"
    )
    assert run_program(program, become=PLAIN).split() == ["out_of_memory", "ok"]


async def run_over_and_within() -> list[str]:
    sources = (PROGRAMS_OVER_LIMIT["shared"], PROGRAMS_WITHIN_LIMIT["inherited"])
    async with open_launcher(tier="landlock") as launcher:
        return [(await launcher.run(JailProgram(each), LIMITS)).status for each in sources]
