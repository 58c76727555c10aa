"""Runs families of the corpus, as the user that it is started as: one JSON object for each.

`python -m tests.unit.sandbox.escapes.runner TIER CANARY FAMILY...`; a tier may be `runsc`, a family
one of FORGING or POISONING, too; none: the corpus. With `--all` also what is known not to be
contained.
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
from tests.unit.sandbox.escapes.graded import Grader
from tests.unit.sandbox.escapes.program import Escape, Left, Pair, Poison

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
BRIEFLY = replace(LIMITS, wall_s=0.8, cpu_s=0.4)  # for what can but run out of time
UNHURRIED = replace(LIMITS, wall_s=8.0)  # nothing of a poison takes time, but the host may
PATIENT = replace(LIMITS, wall_s=20.0, cpu_s=10.0)  # for what is heard before its time is over
GOOD = JailProgram("print(6 * 7)")
WORD = b"ESCAPED"
QUIET_LOOKS, LOOK_S, QUIET_S = 10, 0.005, 3.0  # until a session counts as left running
FORGING, POISONING, ALL = ("reward forging", "tests forging"), "session poisoning", "--all"


def says(stdout: bytes) -> bool:
    """Whether a program prints that it has escaped. A traceback shows lines of the program: only
    what is printed counts.
    """
    return any(line.startswith(WORD) or b" " + WORD in line for line in stdout.splitlines())


class Runner:
    def __init__(self, tier: str, canary: Path, own: Path, every: bool) -> None:
        self.tier, self.all = tier, every
        clock = SystemClock()
        homes = cgroups.find_parents() if tier in ("cgroup", RUNSC) else None
        kind = {"landlock": "landlock", RUNSC: "runner"}.get(tier, "bwrap")
        interpreter = Interpreter.default()
        if tier == RUNSC:
            interpreter = select_interpreter(JailSettings(runner=[RUNSC]))
        self.launcher = JailLauncher(SystemHost(), clock, kind, interpreter, homes)
        self.slots = JailSlots(clock, 4)
        # Without namespaces the limit of processes counts all that the user has: one by one there.
        self.at_once = asyncio.Semaphore(1 if tier == "landlock" else self.slots.count)
        self.clock = clock
        self.canary, self.own = canary, own
        self.limits = replace(LIMITS, wall_s=min(20.0, scaled(LIMITS.wall_s)))
        self.patient = replace(PATIENT, wall_s=scaled(PATIENT.wall_s))
        self.unhurried = replace(UNHURRIED, wall_s=scaled(UNHURRIED.wall_s))
        self.before, self.littered = self._outside(), set(_scratch())

    def _outside(self) -> tuple[object, ...]:
        """What no program may change."""
        found = self.own.stat()
        mine = psutil.Process()
        texts = (self.canary.read_text(), self.own.read_text())
        mode = (found.st_mode, found.st_mtime, found.st_gid, os.listxattr(self.own))
        return (*texts, *mode, mine.nice(), mine.cpu_affinity(), mine.ionice())

    def _placed(self, source: str) -> str:
        outside = {program.CANARY: str(self.canary), program.OWN: str(self.own)}
        for mark, path in outside.items():
            source = source.replace(mark, path)
        return source

    async def escape(self, escape: Escape) -> dict[str, Any]:
        limits = BRIEFLY if escape.ends == ("timeout",) else self.limits
        asked = JailProgram(self._placed(escape.source), escape.mode)
        async with self.slots.acquire():
            ran = await self.launcher.run(asked, limits)
        said = ran.stdout + ran.stderr
        return {
            "name": escape.name,
            "contained": not says(ran.stdout) and ran.status in escape.ends,
            "status": ran.status,
            "error": ran.error,
            "said": said.decode(errors="replace")[-600:],
        }

    async def pair(self, pair: Pair) -> dict[str, Any]:
        """The receiver runs while the sender goes on sending."""
        secret, name = f"{secrets.randbits(24):06x}", secrets.token_hex(8)
        sources = [
            self._placed(source).replace(program.SECRET, secret).replace(program.NAME, name)
            for source in (pair.sender, pair.receiver)
        ]
        async with self.at_once, self.slots.acquire():
            jail = await self.launcher.open(JailProgram(sources[0]), self.patient)
            try:
                sending = await self._sends(jail)
                asked = JailProgram(sources[1])
                ran = await self.launcher.run(asked, self.limits) if sending else None
                failed = jail.stderr
            finally:
                jail.close()
        heard = ran is not None and (secret.encode() in ran.stdout or says(ran.stdout))
        said = failed if ran is None else ran.stdout + ran.stderr
        return {
            "name": pair.name,
            "contained": not heard,
            "status": "not sent" if ran is None else ran.status,
            "error": "",
            "said": said.decode(errors="replace")[-600:],
        }

    async def _sends(self, jail: Jail) -> bool:
        """Whether it says that it does, before it ends."""
        said, stream = b"", jail.output.streams[0]
        try:
            async with self.clock.timeout(self.patient.wall_s, "a sender"):
                while program.SENT.encode() not in (said := said + jail.stdout):
                    if stream.is_eof:
                        return False
                    await stream.wait_readable()
        except DeadlineExceeded:
            return False
        return True

    async def left(self, left: Left) -> dict[str, Any]:
        """One at a time, as all that runs below the launcher is looked at."""
        # What is left running takes of the time of the cell that is to answer.
        limits = self.patient if left.said else self.unhurried
        sessions = Sessions(self.launcher, self.clock, limits, 8, 600.0)
        said, running = [], []
        try:
            for cell in left.cells:
                ran = await sessions.run("s", cell)
                said.append((ran.status, (ran.stdout + ran.stderr).decode(errors="replace")))
                running += await self._restless()
        finally:
            sessions.close()
        right = not left.said or said[-1] == ("ok", left.said)
        return {
            "name": left.name,
            "contained": not running and right,
            "status": said[-1][0],
            "error": f"it runs between cells: {running}" if running else "",
            "said": str(said)[-600:],
        }

    async def _restless(self) -> list[str]:
        """What still runs when nothing should, as a process at rest is not even ready to run. The
        zygote and the keepers, which are its children, are ours, and look at their jails meanwhile.
        """
        quiet = 0
        busy: list[str] = []
        until = self.clock.monotonic() + scaled(QUIET_S)
        while quiet < QUIET_LOOKS:
            busy = []
            for process in psutil.Process().children(recursive=True):
                if self.launcher.zygote_pid not in (process.pid, _parent(process)):
                    busy += [f"{process.pid}" for state in _threads(process.pid) if state == "R"]
            quiet = 0 if busy else quiet + 1
            if self.clock.monotonic() > until and busy:
                return busy
            await self.clock.sleep(LOOK_S)
        return []

    async def poison(self, case: Poison) -> dict[str, Any]:
        said = []
        async with self.at_once:
            sessions = Sessions(self.launcher, self.clock, self.unhurried, 8, 600.0)
            try:
                for session, source in case.cells:
                    ran = await sessions.run(session, source)
                    said.append((session, ran.status, (ran.stdout + ran.stderr).decode()))
            finally:
                sessions.close()
        return {
            "name": case.name,
            "contained": case.holds([(status, text) for _, status, text in said]),
            "status": "",
            "error": "",
            "said": str(said)[-600:],
        }

    async def family(self, family: str) -> list[dict[str, Any]]:
        if family in FORGING:
            grader = Grader(self.launcher, self.slots, self.limits)
            work = grader.all_styles() if family == FORGING[0] else grader.styles()
            return list(await asyncio.gather(*work))
        if family == POISONING:
            return list(await asyncio.gather(*map(self.poison, POISONS)))
        at_once, one_by_one = [], []
        for entry in FAMILIES[family]:
            if not self.all and is_open(self.tier, family, entry.name):
                continue
            if isinstance(entry, Left):
                one_by_one.append(entry)
            else:
                run = self.pair(entry) if isinstance(entry, Pair) else self.escape(entry)
                at_once.append(_typed(entry.name, run))
        results = list(await asyncio.gather(*at_once))
        return [*results, *[await _typed(entry.name, self.left(entry)) for entry in one_by_one]]

    async def unharmed(self) -> list[str]:
        """What is not as it was outside."""
        wrong = []
        ran = await self.launcher.run(GOOD, self.limits)
        if (ran.status, ran.stdout) != ("ok", b"42\n"):
            wrong.append(f"the next call: {ran}")
        if (now := self._outside()) != self.before:
            wrong.append(f"outside: {self.before} has become {now}")
        return wrong

    async def close(self) -> list[str]:
        """Processes and directories that are left when all is over."""
        await self.launcher.stop()
        until = self.clock.monotonic() + scaled(10.0)
        while left := psutil.Process().children(recursive=True):
            if self.clock.monotonic() > until:
                break
            await self.clock.sleep(0.01)
        return [f"left behind: {thing}" for thing in (*left, *set(_scratch()) - self.littered)]


def _scratch() -> list[str]:
    """Scratch directories of this user, who is no other test's."""
    mine = os.getuid()
    found = []
    for place in Path(tempfile.gettempdir()).glob("meshrl-jail-*"):
        with contextlib.suppress(FileNotFoundError):  # another user's, who has removed it since
            if place.stat().st_uid == mine != 0:
                found.append(place.name)
    return found


def _parent(process: psutil.Process) -> int:
    """Return the number of its parent; 0 if it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return int(process.ppid())
    return 0


def _threads(pid: int) -> list[str]:
    """The state of each thread of a process; none if it has ended."""
    states = []
    with contextlib.suppress(OSError):
        for thread in os.scandir(f"/proc/{pid}/task"):
            with open(f"{thread.path}/stat", "rb") as file:
                states.append(file.read().rpartition(b")")[2].split()[0].decode())
    return states


async def _typed(name: str, run: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    """No program is to make the sandbox itself fail."""
    try:
        return await run
    except MeshError as error:
        failed = {"status": type(error).__name__, "error": str(error), "said": ""}
        return {"name": name, "contained": False, **failed}


async def run(tier: str, canary: Path, own: Path, asked: list[str]) -> list[dict[str, Any]]:
    families = [family for family in asked if family != ALL]
    runner = Runner(tier, canary, own, ALL in asked)
    await runner.launcher.start()
    found: list[dict[str, Any]] = []
    for family in families:
        results = [
            result
            for result in await runner.family(family)
            if runner.all or not is_open(tier, family, result["name"])
        ]
        found.append({"family": family, "results": results, "harm": await runner.unharmed()})
    found[-1]["harm"] += await runner.close()
    return found


def main(tier: str, canary: Path, families: list[str]) -> None:
    with tempfile.TemporaryDirectory(prefix="own-") as directory:
        Path(directory).chmod(0o755)
        own = Path(directory) / "own"
        own.write_text("mine")
        found = asyncio.run(run(tier, canary, own, families or list(FAMILIES)))
    print(json.dumps({"user": os.getuid(), "families": found}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
