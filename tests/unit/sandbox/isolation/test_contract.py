"""Contract of every jail: the bubblewrap and Landlock tiers, gVisor's runsc, an OCI runtime by its
template, and any other container command.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from meshrl.common.api.sandbox import JailSettings
from meshrl.common.base.clock import SystemClock
from meshrl.services.sandbox.grading.code.code_reward import CodeGrader
from meshrl.services.sandbox.isolation.jail_launcher import JailLauncher
from meshrl.services.sandbox.isolation.jails.jail import ProgramResult
from meshrl.services.sandbox.isolation.jails.program import JailProgram
from meshrl.services.sandbox.isolation.outer_jail.interpreters import (
    Interpreter,
    select_interpreter,
)
from meshrl.services.sandbox.isolation.resources import cgroups
from meshrl.services.sandbox.isolation.resources.limits import MIB, JailLimits
from meshrl.services.sandbox.isolation.resources.slots import JailSlots
from meshrl.services.sandbox.isolation.runners import container_cleanup
from meshrl.services.sandbox.sessions import Sessions
from tests.descriptors import await_closed, list_descriptors
from tests.load import scaled
from tests.unit.sandbox.launching import open_launcher

STANDIN = str(Path(__file__).with_name("standin"))
LIMITS = JailLimits(wall_s=60.0, cpu_s=10.0, memory_bytes=128 * MIB, output_bytes=4096)
QUICK = JailLimits(wall_s=1.0, cpu_s=0.5, memory_bytes=128 * MIB, output_bytes=4096)


@dataclass(frozen=True)
class Kind:
    tier: str
    runner: tuple[str, ...] = ()

    def interpreter(self) -> Interpreter:
        readable = self.tier == "landlock" or self.runner == (STANDIN,)  # by every user
        python = "/usr/bin/python3" if readable else ""
        return select_interpreter(JailSettings(runner=list(self.runner), python=python))


KINDS = [
    pytest.param(Kind("bwrap"), id="bwrap", marks=pytest.mark.needs("bwrap")),
    pytest.param(Kind("landlock"), id="landlock", marks=pytest.mark.needs("landlock", "python3")),
    pytest.param(
        Kind("runner", (STANDIN,)), id="standin", marks=pytest.mark.needs("bwrap", "python3")
    ),
    pytest.param(Kind("runner", ("runsc",)), id="runsc", marks=pytest.mark.needs("runsc")),
]


@pytest.fixture(params=KINDS)
async def launcher(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[JailLauncher]:
    kind: Kind = request.param
    log = tmp_path / "jails.log"
    homes = cgroups.find_parents() if kind.tier != "landlock" else None
    interpreter = kind.interpreter()
    async with open_launcher(log, tier=kind.tier, interpreter=interpreter, homes=homes) as launcher:
        await launcher.start()
        yield launcher
    await wait_for_no_containers()


def list_containers() -> list[int]:
    """List processes that a runner of this process has left."""
    return list_container_processes(f"{container_cleanup.PREFIX}{os.getpid()}-")


async def wait_for_no_containers() -> None:
    """Wait until no process of a runner of this process is left."""
    async with asyncio.timeout(scaled(10.0)):
        while list_containers():
            await asyncio.sleep(0.01)


def list_container_processes(name_prefix: str) -> list[int]:
    """List processes of containers whose names start with the prefix."""
    marker = f"{container_cleanup.CONTAINER_ENV}={name_prefix}".encode()
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and marker in Path(f"/proc/{name}/environ").read_bytes():
                found.append(int(name))
    return found


async def run_jailed(
    launcher: JailLauncher, source: str, limits: JailLimits = LIMITS
) -> ProgramResult:
    return await launcher.run(JailProgram(source), limits, b"hello")


@pytest.mark.rotating(3)
async def test_programs_end_with_typed_statuses(launcher: JailLauncher) -> None:
    reading_program = (
        "import sys\nprint(sys.stdin.read().upper())\nprint('oh', file=sys.stderr)\nsys.exit(3)"
    )
    # By the init process, or by the program's own limit.
    cases = [
        (reading_program, LIMITS, "ok", {3}),
        ("import time\ntime.sleep(60)", QUICK, "timeout", {-9}),
        ("while True: pass", QUICK, "timeout", {-9, -24}),
        ("print('x' * 10_000)", LIMITS, "output_limit", None),
        ("bytearray(1 << 30)", LIMITS, "out_of_memory", {72}),
        ("open('/usr/x', 'w')", LIMITS, "refused", {77}),
        ("import socket\nsocket.socket()", LIMITS, "refused", {77}),
        ("import os\nos.kill(os.getpid(), 11)", LIMITS, "crashed", {-11}),
    ]
    found = await asyncio.gather(
        *(run_jailed(launcher, source, limits) for source, limits, _, _ in cases)
    )
    for (source, _, status, codes), result in zip(cases, found, strict=True):
        assert result.status == status, (source, result)
        assert codes is None or result.exit_code in codes, (source, result)
    assert (found[0].stdout, found[0].stderr) == (b"HELLO\n", b"oh\n")
    assert len(found[3].stdout) <= 4096


@pytest.mark.rotating(3)
async def test_output_before_the_end_is_complete(launcher: JailLauncher) -> None:
    limits = JailLimits(wall_s=30.0, cpu_s=10.0, output_bytes=4 * MIB)
    found = await run_jailed(launcher, "for i in range(3000): print(str(i % 10) * 999)", limits)
    assert found.status == "ok" and len(found.stdout) == 3_000_000
    assert found.stdout.endswith(b"9\n")


@pytest.mark.rotating(3)
async def test_session_keeps_state_and_ends_with_its_interpreter(launcher: JailLauncher) -> None:
    sessions = Sessions(launcher, SystemClock(), LIMITS, 4, 600.0)
    try:
        assert (await sessions.run("a", "x = 41")).status == "ok"
        assert (await sessions.run("a", "x + 1")).stdout == b"42\n"
        printing_cell = await sessions.run("a", "print('y' * 3000, 'end')")
        assert printing_cell.stdout.endswith(b"y end\n")
        exiting_cell = await sessions.run("a", "import os\nprint('last')\nos._exit(5)")
        assert exiting_cell.status == "crashed" and exiting_cell.stdout == b"last\n"
    finally:
        sessions.close()


@pytest.mark.rotating(3)
async def test_answers_are_graded_by_calls_and_tests_in_separate_jails(
    launcher: JailLauncher,
) -> None:
    calls = {"function": "f", "cases": [{"args": [2], "output": 4}, {"args": [3], "output": 9}]}
    tests = """
from solution import f, Box

def test_a():
    assert f(3) == 9

def test_b():
    box = Box([1, 2])
    assert len(box.items) == 2 and f(2) == 4
"""
    source = "class Box:\n    def __init__(self, items): self.items = items\ndef f(x): return x * x"
    wrong = source.replace("x * x", "x + x")
    slots = JailSlots(SystemClock(), 4)

    async def score(answer: str, tests: object) -> float:
        grader = CodeGrader(launcher, slots, LIMITS, {"tests": "tests"})
        turns = [{"role": "model", "text": answer}]
        graded = await grader.compute_reward({"tests": tests}, turns)
        assert graded.status == "ok", graded
        return float(graded.value)

    scores = await asyncio.gather(
        score(source, calls), score(source, tests), score(wrong, calls), score(wrong, tests)
    )
    assert list(scores) == [1.0, 1.0, 0.5, 0.5]


@pytest.mark.rotating(3)
async def test_cancelled_call_leaves_nothing(launcher: JailLauncher) -> None:
    before = list_descriptors()
    for turns in range(8):  # cancelled at each await of its start
        pending_call = asyncio.create_task(run_jailed(launcher, "import time\ntime.sleep(60)"))
        for _ in range(turns * turns):
            await asyncio.sleep(0)
        pending_call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pending_call
    pending_call = asyncio.create_task(run_jailed(launcher, "import time\ntime.sleep(60)"))
    await asyncio.sleep(0.5)
    pending_call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pending_call
    await launcher.stop()
    await wait_for_no_containers()
    own_prefix = f"{container_cleanup.PREFIX}{os.getpid()}-"
    assert not [name for name in os.listdir(tempfile.gettempdir()) if name.startswith(own_prefix)]
    await await_closed(before)


@pytest.mark.rotating(3)
async def test_cell_output_is_complete_when_the_cell_ends(launcher: JailLauncher) -> None:
    """Check outputs of many sizes, as output and the cell's answer take different channels."""
    limits = JailLimits(wall_s=30.0, cpu_s=10.0, output_bytes=4 * MIB)
    sessions = Sessions(launcher, SystemClock(), limits, 1, 600.0)
    try:
        for size in (10, 40_000, 1_500_000, 10):
            found = await sessions.run("a", f"print('z' * {size})")
            assert found.status == "ok" and len(found.stdout) == size + 1
    finally:
        sessions.close()
