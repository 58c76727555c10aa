"""The memory limit holds for a jail as a whole where no control group bounds it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.sandbox.isolation.jail_launcher import JailLauncher
from services.sandbox.isolation.jails.program import Program
from services.sandbox.isolation.resources.limits import MIB, JailLimits
from tests.load import scaled
from tests.unit.sandbox.launching import launching

ROOT = Path(__file__).parents[4]
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
async def test_processes_that_together_are_over_it_end(
    ungrouped: JailLauncher, source: str
) -> None:
    found = await ungrouped.run(Program(source), LIMITS)
    assert (found.status, found.error) == ("out_of_memory", "over 160 MiB of memory"), found


@pytest.mark.needs("bwrap")
@pytest.mark.parametrize("source", WITHIN.values(), ids=WITHIN)
async def test_what_processes_share_counts_once(ungrouped: JailLauncher, source: str) -> None:
    found = await ungrouped.run(Program(source), LIMITS)
    assert (found.status, found.stdout) == ("ok", b"all six\n"), found


@pytest.mark.needs("bwrap")
async def test_memory_that_nobody_maps_is_refused_by_name(ungrouped: JailLauncher) -> None:
    source = "import os\nos.write(os.memfd_create('x'), bytes(1 << 20))"
    found = await ungrouped.run(Program(source), LIMITS)
    assert (found.status, found.refused) == ("refused", ("memfd_create",))


@pytest.mark.rotating(3)
@pytest.mark.needs("landlock", "root")
def test_without_namespaces_too() -> None:
    command = [sys.executable, "-m", "tests.unit.sandbox.plain_user"]
    program = "from tests.unit.sandbox.jail import test_memory as t; t.main()"
    done = subprocess.run(
        [*command, sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=scaled(100),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == ["out_of_memory", "ok"]


def main() -> None:
    import asyncio

    async def both() -> list[str]:
        sources = (OVER["shared"], WITHIN["inherited"])
        async with launching(tier="landlock") as made:
            return [(await made.run(Program(each), LIMITS)).status for each in sources]

    print(json.dumps(asyncio.run(both())))
