"""The memory limit holds for a jail as a whole where no control group bounds it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from meshrl.services.sandbox.isolation.jail_launcher import JailLauncher
from meshrl.services.sandbox.isolation.jails.program import JailProgram
from meshrl.services.sandbox.isolation.resources.limits import MIB, JailLimits
from tests.unit.sandbox.launching import PLAIN, launching, printed

LIMITS = JailLimits(wall_s=120.0, cpu_s=20.0, memory_bytes=160 * MIB, processes=16)
EACH = """
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
HIDING = EACH + "import ctypes\nctypes.CDLL(None).prctl(4, 0)\n" + HOLDING.format(PRIVATE)
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
OVER = {
    "private": EACH + HOLDING.format(PRIVATE),
    "shared": EACH + HOLDING.format(SHARED),
    "hidden from the keeper": HIDING,
}
WITHIN = {
    "inherited": EACH + INHERITED.format(PRIVATE),
    "inherited and shared": EACH + INHERITED.format(SHARED),
}


@pytest.fixture
async def ungrouped(tmp_path: Path) -> AsyncIterator[JailLauncher]:
    async with launching(tmp_path / "jails.log") as made:
        yield made


@pytest.mark.rotating(3)
@pytest.mark.needs("bwrap")
@pytest.mark.parametrize("source", OVER.values(), ids=OVER)
async def test_processes_over_it_together_end(ungrouped: JailLauncher, source: str) -> None:
    found = await ungrouped.run(JailProgram(source), LIMITS)
    assert (found.status, found.error) == ("out_of_memory", "over 160 MiB of memory"), found


@pytest.mark.needs("bwrap")
@pytest.mark.parametrize("source", WITHIN.values(), ids=WITHIN)
async def test_what_processes_share_counts_once(ungrouped: JailLauncher, source: str) -> None:
    found = await ungrouped.run(JailProgram(source), LIMITS)
    assert (found.status, found.stdout) == ("ok", b"all six\n"), found


@pytest.mark.needs("bwrap")
async def test_memory_that_nobody_maps_is_refused_by_name(ungrouped: JailLauncher) -> None:
    source = "import os\nos.write(os.memfd_create('x'), bytes(1 << 20))"
    found = await ungrouped.run(JailProgram(source), LIMITS)
    assert (found.status, found.denied_calls) == ("refused", ("memfd_create",))


@pytest.mark.rotating(3)
@pytest.mark.needs("landlock", "root")
def test_without_namespaces_too() -> None:
    program = (
        "import asyncio; from tests.unit.sandbox.jail import test_memory as t; "
        "print(*asyncio.run(t.both()))"
    )
    assert printed(program, become=PLAIN).split() == ["out_of_memory", "ok"]


async def both() -> list[str]:
    sources = (OVER["shared"], WITHIN["inherited"])
    async with launching(tier="landlock") as made:
        return [(await made.run(JailProgram(each), LIMITS)).status for each in sources]
