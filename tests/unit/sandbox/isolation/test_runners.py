"""What runners add to the contract of a jail: limits from outside, ends, what is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from meshrl.services.sandbox.isolation.jail_launcher import JailLauncher
from meshrl.services.sandbox.isolation.jails.jail import JailFailed
from meshrl.services.sandbox.isolation.resources import resource_pool
from meshrl.services.sandbox.isolation.resources.limits import MIB, JailLimits
from meshrl.services.sandbox.isolation.runners import container_cleanup
from tests.load import scaled
from tests.unit.sandbox.isolation.test_contract import STANDIN, Kind, containers, marked, ran
from tests.unit.sandbox.launching import PLAIN, launching, printed


@pytest.fixture
async def standin(tmp_path: Path) -> AsyncIterator[JailLauncher]:
    given = Kind("runner", (STANDIN,)).interpreter()
    async with launching(tmp_path / "jails.log", tier="runner", interpreter=given) as made:
        yield made


@pytest.mark.rotating(3)
@pytest.mark.needs("bwrap", "python3")
async def test_limits_hold_from_outside_too(standin: JailLauncher, tmp_path: Path) -> None:
    """Each process is within what the keeper bounds; all of them together are not."""
    many = """
import os
reading, writing = os.pipe()
for _ in range(5):
    if os.fork() == 0:
        block = b"x" * (90 << 20)
        os.write(writing, b"x")
        os.read(os.pipe()[0], 1)
os.read(os.pipe()[0], 1)
"""
    spinning = (
        "import os\nfor _ in range(4):\n    if os.fork() == 0:\n        while True: pass\nos.wait()"
    )
    limits = JailLimits(wall_s=60.0, cpu_s=30.0, memory_bytes=128 * MIB, scratch_bytes=MIB)
    found = await ran(standin, many, limits)
    assert found.status == "out_of_memory"
    found = await ran(standin, spinning, JailLimits(wall_s=60.0, cpu_s=0.2))
    assert (found.status, found.error) == ("timeout", "over 0.2 s of CPU time")


@pytest.mark.rotating(3)
@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("echo no kernel here >&2; exit 3", "ended at its start with status 3: no kernel here"),
        ("echo welcome to this container; cat", "what it says is no jail's: b'welcome"),
        ("exec /nowhere/python", "ended at its start with status 127"),
    ],
)
async def test_a_runner_without_a_jail_says_why(tmp_path: Path, script: str, says: str) -> None:
    program = tmp_path / "runner"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    interpreter = Kind("runner", (str(program),)).interpreter()
    log = tmp_path / "jails.log"
    async with launching(log, tier="runner", interpreter=interpreter) as launcher:
        with pytest.raises(JailFailed) as caught:
            await ran(launcher, "print(1)")
    assert says in str(caught.value) and not containers()


SANDBOX = r"""
import asyncio, sys
from pathlib import Path
from tests.unit.sandbox.isolation.test_contract import LIMITS, Kind
from meshrl.common.base.clock import SystemClock
from meshrl.common.mesh.process.host import SystemHost
from meshrl.services.sandbox.isolation.jail_launcher import JailLauncher
from meshrl.services.sandbox.isolation.jails.program import JailProgram

async def main():
    interpreter = Kind("runner", (sys.argv[1],)).interpreter()
    launcher = JailLauncher(SystemHost(), SystemClock(), "runner", interpreter, None, None)
    source = "print('up', flush=True)\nimport time\ntime.sleep(600)"
    jail = await launcher.open(JailProgram(source), LIMITS)
    async with asyncio.timeout(3600):
        while not jail.stdout:
            await asyncio.sleep(0.01)
    print("up", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.rotating(2)
@pytest.mark.parametrize(
    "runner",
    [
        pytest.param(STANDIN, id="standin", marks=pytest.mark.needs("bwrap", "python3")),
        pytest.param("runsc", id="runsc", marks=pytest.mark.needs("runsc")),
    ],
)
@pytest.mark.parametrize("killed", ["the sandbox", "all of ours"])
async def test_a_killed_sandbox_leaves_no_container(runner: str, killed: str) -> None:
    """Bridges end theirs; where they are killed with it, the next start of a runner does."""
    sandbox = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SANDBOX, runner, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert sandbox.stdout is not None
        async with asyncio.timeout(scaled(60)):
            assert await sandbox.stdout.readline() == b"up\n"
        spawners = bridges(sandbox.pid) if killed == "all of ours" else []
        for pid in spawners:
            os.kill(pid, signal.SIGSTOP)  # none of them sees the others end
        places = named(sandbox.pid)
        for pid in spawners:
            os.kill(pid, signal.SIGKILL)
    finally:
        sandbox.kill()
        await sandbox.wait()
    assert places
    async with asyncio.timeout(scaled(60)):
        while marked(places[0]) or (killed == "the sandbox" and contents(places[0]) - {"root"}):
            await asyncio.sleep(0.02)
    container_cleanup.remove_stale()
    assert not named(sandbox.pid)


def named(sandbox: int) -> list[str]:
    """What a sandbox's runners have in the directory for temporary files."""
    mark = f"{container_cleanup.PREFIX}{sandbox}-"
    return [each for each in os.listdir(tempfile.gettempdir()) if each.startswith(mark)]


def bridges(sandbox: int) -> list[int]:
    """The processes of ours below a sandbox, from the spawner down."""
    found = []
    for each in psutil.Process(sandbox).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended since
            if any("spawner" in word for word in each.cmdline()):
                found.append(each.pid)
    return found


def contents(place: str) -> set[str]:
    try:
        return set(os.listdir(os.path.join(tempfile.gettempdir(), place)))
    except FileNotFoundError:
        return set()


LEFT = """
import os, sys
from meshrl.services.sandbox.isolation.resources import resource_pool
place, outside = resource_pool.create_scratch(0), resource_pool.create_scratch(0)
os.chdir(place)
os.makedirs("closed/within/more")
open("closed/within/more/file", "w").close()
os.symlink(outside, "link")
os.symlink("nowhere", "closed/link")
os.mkfifo("closed/pipe")
os.chmod("closed/within", 0)
os.chmod("closed", 0)
for _ in range(3000):
    os.mkdir("deep" * 10)
    os.chdir("deep" * 10)
os.chdir("/")
os.chmod(outside, 0o755)
os.chmod(place, 0)
resource_pool.remove_scratch(place)
assert not os.path.lexists(place)
assert os.stat(outside).st_mode & 0o777 == 0o755
resource_pool.remove_scratch(outside)
"""


def test_a_plain_user_removes_closed_and_deep_directories_and_follows_no_link() -> None:
    printed(LEFT, become=PLAIN if os.getuid() == 0 else ())


@pytest.mark.needs("root")
def test_root_gives_it_to_the_user_of_the_jail() -> None:
    place = resource_pool.create_scratch(1_900_000_007)
    assert os.stat(place).st_uid == os.stat(place).st_gid == 1_900_000_007
    resource_pool.remove_scratch(place)
    assert not os.path.lexists(place)
