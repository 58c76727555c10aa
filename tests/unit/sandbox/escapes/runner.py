"""Runs families of the corpus as the current user and prints one JSON object.

`python -m tests.unit.sandbox.escapes.runner TIER CANARY FAMILY...`; a tier may also be `runsc`, and
a family one of FORGING or POISONING; without families, the whole corpus runs. With `--all`,
programs that are known not to be contained run too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import sys
import tempfile
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from meshrl.common.api.sandbox import JailSettings
from meshrl.common.base.clock import SystemClock
from meshrl.common.base.errors import DeadlineExceeded, MeshError
from meshrl.common.job.isolation.runners import RUNSC
from meshrl.common.mesh.process.host import SystemHost
from meshrl.services.sandbox.isolation.jail_launcher import JailLauncher
from meshrl.services.sandbox.isolation.jails.jail import Jail
from meshrl.services.sandbox.isolation.jails.program import JailProgram
from meshrl.services.sandbox.isolation.outer_jail.interpreters import (
    Interpreter,
    select_interpreter,
)
from meshrl.services.sandbox.isolation.resources import cgroups
from meshrl.services.sandbox.isolation.resources.limits import MIB, JailLimits
from meshrl.services.sandbox.isolation.resources.slots import JailSlots
from meshrl.services.sandbox.sessions import Sessions
from tests.load import scaled
from tests.unit.sandbox.escapes import program
from tests.unit.sandbox.escapes.corpus import FAMILIES, POISONS, is_open
from tests.unit.sandbox.escapes.forgery_grader import Grader
from tests.unit.sandbox.escapes.program import Escape, LeftoverCells, Pair, Poison

LIMITS = JailLimits(
    wall_s=2.0,
    cpu_s=1.0,
    memory_bytes=128 * MIB,
    processes=16,
    open_files=64,
    scratch_bytes=32 * MIB,
    max_files=500,
    output_bytes=64 * 1024,
)
SHORT_CPU_S = 0.15
# For programs that can only run out of time, or that a longer time would not help.
SHORT_LIMITS = replace(LIMITS, wall_s=0.8, cpu_s=SHORT_CPU_S)
POISON_LIMITS = replace(LIMITS, wall_s=8.0)  # poisons need little time, but the host may be busy
# For senders whose word must be received before their time is over.
SENDER_LIMITS = replace(LIMITS, wall_s=20.0, cpu_s=10.0)
GOOD = JailProgram("print(6 * 7)")
WORD = b"ESCAPED"
QUIET_POLLS, POLL_S, QUIET_S = 10, 0.005, 3.0  # until a session counts as left running
FORGING, POISONING, ALL = ("reward forging", "tests forging"), "session poisoning", "--all"


def has_escaped(stdout: bytes) -> bool:
    """Return True if a program prints that it has escaped.

    A traceback shows lines of the program: only printed lines count.
    """
    return any(line.startswith(WORD) or b" " + WORD in line for line in stdout.splitlines())


class Runner:
    def __init__(self, tier: str, canary: Path, own_file: Path, includes_open: bool) -> None:
        self.tier, self.includes_open = tier, includes_open
        clock = SystemClock()
        homes = cgroups.find_parents() if tier in ("cgroup", RUNSC) else None
        kind = {"landlock": "landlock", RUNSC: "runner"}.get(tier, "bwrap")
        interpreter = Interpreter.default()
        if tier == RUNSC:
            interpreter = select_interpreter(JailSettings(runner=[RUNSC]))
        self.launcher = JailLauncher(SystemHost(), clock, kind, interpreter, homes)
        self.slots = JailSlots(clock, 4)
        # Without namespaces the process limit counts all of the user: one program at a time.
        self.concurrency = asyncio.Semaphore(1 if tier == "landlock" else self.slots.count)
        self.clock = clock
        self.canary, self.own_file = canary, own_file
        self.limits = replace(LIMITS, wall_s=min(20.0, scaled(LIMITS.wall_s)))
        self.sender_limits = replace(SENDER_LIMITS, wall_s=scaled(SENDER_LIMITS.wall_s))
        self.poison_limits = replace(POISON_LIMITS, wall_s=scaled(POISON_LIMITS.wall_s))
        self.unanswered_limits = replace(self.poison_limits, cpu_s=SHORT_CPU_S)
        self.outside_before, self.scratch_before = self._read_outside(), set(_list_scratch())

    def _read_outside(self) -> tuple[object, ...]:
        """Return the outside state that no program may change."""
        found = self.own_file.stat()
        process = psutil.Process()
        texts = (self.canary.read_text(), self.own_file.read_text())
        mode = (found.st_mode, found.st_mtime, found.st_gid, os.listxattr(self.own_file))
        return (*texts, *mode, process.nice(), process.cpu_affinity(), process.ionice())

    def _insert_paths(self, source: str) -> str:
        outside = {program.CANARY: str(self.canary), program.OWN: str(self.own_file)}
        for mark, path in outside.items():
            source = source.replace(mark, path)
        return source

    async def run_escape(self, escape: Escape) -> dict[str, Any]:
        is_brief = escape.brief or escape.ends == ("timeout",)
        limits = SHORT_LIMITS if is_brief else self.limits
        program_to_run = JailProgram(self._insert_paths(escape.source), escape.mode)
        async with self.slots.acquire():
            result = await self.launcher.run(program_to_run, limits)
        output = result.stdout + result.stderr
        return {
            "name": escape.name,
            "contained": not has_escaped(result.stdout) and result.status in escape.ends,
            "status": result.status,
            "error": result.error,
            "said": output.decode(errors="replace")[-600:],
        }

    async def run_pair(self, pair: Pair) -> dict[str, Any]:
        """Run the receiver while the sender keeps sending."""
        secret, name = f"{secrets.randbits(24):06x}", secrets.token_hex(8)
        sources = [
            self._insert_paths(source).replace(program.SECRET, secret).replace(program.NAME, name)
            for source in (pair.sender, pair.receiver)
        ]
        async with self.concurrency, self.slots.acquire():
            jail = await self.launcher.open(JailProgram(sources[0]), self.sender_limits)
            try:
                is_sending = await self._wait_until_sending(jail)
                program_to_run = JailProgram(sources[1])
                result = (
                    await self.launcher.run(program_to_run, self.limits) if is_sending else None
                )
                sender_stderr = jail.stderr
            finally:
                jail.close()
        has_leaked = result is not None and (
            secret.encode() in result.stdout or has_escaped(result.stdout)
        )
        output = sender_stderr if result is None else result.stdout + result.stderr
        return {
            "name": pair.name,
            "contained": not has_leaked,
            "status": "not sent" if result is None else result.status,
            "error": "",
            "said": output.decode(errors="replace")[-600:],
        }

    async def _wait_until_sending(self, jail: Jail) -> bool:
        """Return True once the sender reports that it sends, False if it ends before."""
        output, stream = b"", jail.output.streams[0]
        try:
            async with self.clock.timeout(self.sender_limits.wall_s, "a sender"):
                while program.SENT.encode() not in (output := output + jail.stdout):
                    if stream.is_eof:
                        return False
                    await stream.wait_readable()
        except DeadlineExceeded:
            return False
        return True

    async def run_leftover(self, left: LeftoverCells) -> dict[str, Any]:
        """Run one case at a time, as all processes below the launcher are inspected."""
        # Processes that are left running use CPU time that the answering cell needs.
        limits = self.sender_limits if left.said else self.unanswered_limits
        sessions = Sessions(self.launcher, self.clock, limits, 8, 600.0)
        results, running = [], []
        try:
            for cell in left.cells:
                result = await sessions.run("s", cell)
                results.append(
                    (result.status, (result.stdout + result.stderr).decode(errors="replace"))
                )
                running += await self._find_running()
        finally:
            sessions.close()
        has_right_answer = not left.said or results[-1] == ("ok", left.said)
        return {
            "name": left.name,
            "contained": not running and has_right_answer,
            "status": results[-1][0],
            "error": f"it runs between cells: {running}" if running else "",
            "said": str(results)[-600:],
        }

    async def _find_running(self) -> list[str]:
        """Return the processes that still run when none should: a stopped one is not runnable.

        The zygote and its children, the init processes, are excluded: they poll their jails.
        """
        quiet_polls = 0
        busy: list[str] = []
        deadline_s = self.clock.monotonic() + scaled(QUIET_S)
        while quiet_polls < QUIET_POLLS:
            busy = []
            for process in psutil.Process().children(recursive=True):
                if self.launcher.zygote_pid not in (process.pid, _parent(process)):
                    busy += [f"{process.pid}" for state in _threads(process.pid) if state == "R"]
            quiet_polls = 0 if busy else quiet_polls + 1
            if self.clock.monotonic() > deadline_s and busy:
                return busy
            await self.clock.sleep(POLL_S)
        return []

    async def run_poison(self, case: Poison) -> dict[str, Any]:
        results = []
        async with self.concurrency:
            sessions = Sessions(self.launcher, self.clock, self.poison_limits, 8, 600.0)
            try:
                for session, source in case.cells:
                    result = await sessions.run(session, source)
                    results.append(
                        (session, result.status, (result.stdout + result.stderr).decode())
                    )
            finally:
                sessions.close()
        return {
            "name": case.name,
            "contained": case.is_contained([(status, text) for _, status, text in results]),
            "status": "",
            "error": "",
            "said": str(results)[-600:],
        }

    async def run_family(self, family: str) -> list[dict[str, Any]]:
        if family in FORGING:
            grader = Grader(self.launcher, self.slots, self.limits)
            gradings = (
                grader.grade_all_styles() if family == FORGING[0] else grader.grade_each_style()
            )
            return list(await asyncio.gather(*gradings))
        if family == POISONING:
            return list(await asyncio.gather(*map(self.run_poison, POISONS)))
        concurrent, sequential = [], []
        for entry in FAMILIES[family]:
            if not self.includes_open and is_open(self.tier, family, entry.name):
                continue
            if isinstance(entry, LeftoverCells):
                sequential.append(entry)
            else:
                run = self.run_pair(entry) if isinstance(entry, Pair) else self.run_escape(entry)
                concurrent.append(_report_error(entry.name, run))
        results = list(await asyncio.gather(*concurrent))
        return [
            *results,
            *[await _report_error(entry.name, self.run_leftover(entry)) for entry in sequential],
        ]

    async def find_harm(self) -> list[str]:
        """Describe outside changes."""
        problems = []
        result = await self.launcher.run(GOOD, self.limits)
        if (result.status, result.stdout) != ("ok", b"42\n"):
            problems.append(f"the next call: {result}")
        if (now := self._read_outside()) != self.outside_before:
            problems.append(f"outside: {self.outside_before} has become {now}")
        return problems

    async def close(self) -> list[str]:
        """Stop the launcher and return processes and directories that are left."""
        await self.launcher.stop()
        deadline_s = self.clock.monotonic() + scaled(10.0)
        while leftover := psutil.Process().children(recursive=True):
            if self.clock.monotonic() > deadline_s:
                break
            await self.clock.sleep(0.01)
        return [
            f"left behind: {thing}"
            for thing in (*leftover, *set(_list_scratch()) - self.scratch_before)
        ]


def _list_scratch() -> list[str]:
    """List scratch directories of this user, which no other test uses."""
    own_user = os.getuid()
    found = []
    for path in Path(tempfile.gettempdir()).glob("meshrl-jail-*"):
        with contextlib.suppress(FileNotFoundError):  # another user has removed it since
            if path.stat().st_uid == own_user != 0:
                found.append(path.name)
    return found


def _parent(process: psutil.Process) -> int:
    """Return the parent's pid, or 0 if the process has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return int(process.ppid())
    return 0


def _threads(pid: int) -> list[str]:
    """Return the state of each thread of a process, or none if it has ended."""
    states = []
    with contextlib.suppress(OSError):
        for thread in os.scandir(f"/proc/{pid}/task"):
            with open(f"{thread.path}/stat", "rb") as file:
                states.append(file.read().rpartition(b")")[2].split()[0].decode())
    return states


async def _report_error(name: str, run: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    """Run a program, and report an error of the sandbox itself as an escape."""
    try:
        return await run
    except MeshError as error:
        error_report = {"status": type(error).__name__, "error": str(error), "said": ""}
        return {"name": name, "contained": False, **error_report}


async def run(tier: str, canary: Path, own_file: Path, names: list[str]) -> list[dict[str, Any]]:
    families = [family for family in names if family != ALL]
    runner = Runner(tier, canary, own_file, ALL in names)
    await runner.launcher.start()
    found: list[dict[str, Any]] = []
    for family in families:
        results = [
            result
            for result in await runner.run_family(family)
            if runner.includes_open or not is_open(tier, family, result["name"])
        ]
        found.append({"family": family, "results": results, "harm": await runner.find_harm()})
    found[-1]["harm"] += await runner.close()
    return found


def main(tier: str, canary: Path, families: list[str]) -> None:
    with tempfile.TemporaryDirectory(prefix="own-") as directory:
        Path(directory).chmod(0o755)
        own_file = Path(directory) / "own"
        own_file.write_text("mine")
        found = asyncio.run(run(tier, canary, own_file, families or list(FAMILIES)))
    print(json.dumps({"user": os.getuid(), "families": found}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
