"""Runners beyond the contract of a jail: outer limits, failures and cleanup."""

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
from tests.unit.sandbox.isolation.test_contract import (
    STANDIN,
    Kind,
    list_container_processes,
    list_containers,
    run_jailed,
)
from tests.unit.sandbox.launching import PLAIN, open_launcher, run_program


@pytest.fixture
async def standin(tmp_path: Path) -> AsyncIterator[JailLauncher]:
    interpreter = Kind("runner", (STANDIN,)).interpreter()
    async with open_launcher(
        tmp_path / "jails.log", tier="runner", interpreter=interpreter
    ) as launcher:
        yield launcher


@pytest.mark.rotating(3)
@pytest.mark.needs("bwrap", "python3")
async def test_limits_of_all_processes_are_enforced_from_outside(
    standin: JailLauncher, tmp_path: Path
) -> None:
    """Check processes that are each within the init process's limits, but exceed them together."""
    forking_program = """
import os
reading, writing = os.pipe()
for _ in range(5):
    if os.fork() == 0:
        block = b"x" * (90 << 20)
        os.write(writing, b"x")
        os.read(os.pipe()[0], 1)
os.read(os.pipe()[0], 1)
"""
    spinning_program = (
        "import os\nfor _ in range(4):\n    if os.fork() == 0:\n        while True: pass\nos.wait()"
    )
    limits = JailLimits(wall_s=60.0, cpu_s=30.0, memory_bytes=128 * MIB, scratch_bytes=MIB)
    result = await run_jailed(standin, forking_program, limits)
    assert result.status == "out_of_memory"
    result = await run_jailed(standin, spinning_program, JailLimits(wall_s=60.0, cpu_s=0.2))
    assert (result.status, result.error) == ("timeout", "over 0.2 s of CPU time")


@pytest.mark.rotating(3)
@pytest.mark.parametrize(
    ("script", "error"),
    [
        (
            "echo no kernel here >&2; exit 3",
            "exited during its start with status 3: no kernel here",
        ),
        ("echo welcome to this container; cat", "its output is not that of a jail: b'welcome"),
        ("exec /nowhere/python", "exited during its start with status 127"),
    ],
)
async def test_failing_runner_has_a_reason(tmp_path: Path, script: str, error: str) -> None:
    program = tmp_path / "runner"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    interpreter = Kind("runner", (str(program),)).interpreter()
    log = tmp_path / "jails.log"
    async with open_launcher(log, tier="runner", interpreter=interpreter) as launcher:
        with pytest.raises(JailFailed) as raised:
            await run_jailed(launcher, "print(1)")
    assert error in str(raised.value) and not list_containers()


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
async def test_killed_sandbox_leaves_no_container(runner: str, killed: str) -> None:
    """Check that bridges end their containers; if killed too, the next start does it."""
    sandbox = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SANDBOX, runner, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert sandbox.stdout is not None
        async with asyncio.timeout(scaled(60)):
            assert await sandbox.stdout.readline() == b"up\n"
        bridge_pids = find_bridges(sandbox.pid) if killed == "all of ours" else []
        for pid in bridge_pids:
            os.kill(pid, signal.SIGSTOP)  # none of them notices that the others end
        prefixes = list_temporary_names(sandbox.pid)
        for pid in bridge_pids:
            os.kill(pid, signal.SIGKILL)
    finally:
        sandbox.kill()
        await sandbox.wait()
    assert prefixes
    async with asyncio.timeout(scaled(60)):
        while list_container_processes(prefixes[0]) or (
            killed == "the sandbox" and list_contents(prefixes[0]) - {"root"}
        ):
            await asyncio.sleep(0.02)
    container_cleanup.remove_stale()
    assert not list_temporary_names(sandbox.pid)


def list_temporary_names(sandbox: int) -> list[str]:
    """List the temporary names of a sandbox's runners."""
    prefix = f"{container_cleanup.PREFIX}{sandbox}-"
    return [name for name in os.listdir(tempfile.gettempdir()) if name.startswith(prefix)]


def find_bridges(sandbox: int) -> list[int]:
    """Return the pids of the bridge processes below a sandbox, from the spawner down."""
    found = []
    for process in psutil.Process(sandbox).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended since
            if any("spawner" in word for word in process.cmdline()):
                found.append(process.pid)
    return found


def list_contents(name: str) -> set[str]:
    try:
        return set(os.listdir(os.path.join(tempfile.gettempdir(), name)))
    except FileNotFoundError:
        return set()


LEFTOVER_PROGRAM = """
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


def test_scratch_removal_handles_closed_and_deep_directories_and_links() -> None:
    run_program(LEFTOVER_PROGRAM, become=PLAIN if os.getuid() == 0 else ())


@pytest.mark.needs("root")
def test_scratch_directory_belongs_to_the_jails_user() -> None:
    scratch = resource_pool.create_scratch(1_900_000_007)
    assert os.stat(scratch).st_uid == os.stat(scratch).st_gid == 1_900_000_007
    resource_pool.remove_scratch(scratch)
    assert not os.path.lexists(scratch)
