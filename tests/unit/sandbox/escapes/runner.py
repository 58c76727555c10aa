"""Runs one family of the corpus, as the user that it is started as: one JSON object per program.

`python -m tests.unit.sandbox.escapes.runner FAMILY TIER CANARY`; FAMILY may be `reward forging` or
`session poisoning`, too.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from common.clock import SystemClock
from common.process.host import SystemHost
from services.sandbox.grading.code import Grading
from services.sandbox.isolation import cgroups
from services.sandbox.isolation.interpreters import Interpreter
from services.sandbox.isolation.jail_launcher import JailLauncher
from services.sandbox.isolation.limits import MIB, JailLimits
from services.sandbox.isolation.slots import JailSlots
from services.sandbox.sessions import Sessions
from tests.unit.sandbox.escapes import forgeries, poison
from tests.unit.sandbox.escapes.corpus import CANARY, PROGRAMS, Escape

LIMITS = JailLimits(
    wall_s=2.0,
    cpu_s=1.0,
    memory_bytes=128 * MIB,
    processes=16,
    open_files=64,
    scratch_bytes=32 * MIB,
    files=500,
    output_bytes=64 * 1024,
)
BRIEFLY = replace(LIMITS, wall_s=0.8, cpu_s=0.4)  # for what can but run out of time
UNHURRIED = replace(LIMITS, wall_s=8.0)  # nothing of a poison takes time, but the host may
CASE_S, HANGING_CASE_S = 1.0, 0.2
GOOD = {"mode": "program", "source": "print(6 * 7)"}
WORD = "ESCAPED"


class Runner:
    def __init__(self, tier: str, canary: Path) -> None:
        clock = SystemClock()
        homes = cgroups.find() if tier == "cgroup" else None
        kind = "landlock" if tier == "landlock" else "bwrap"
        self.launcher = JailLauncher(SystemHost(), clock, kind, Interpreter.own(), homes)
        self.slots = JailSlots(clock, 4)
        self.clock, self.canary = clock, canary
        self.before = canary.read_text()

    async def escape(self, escape: Escape) -> dict[str, Any]:
        source = escape.source.replace(CANARY, str(self.canary))
        limits = BRIEFLY if escape.ends == ("timeout",) else LIMITS
        async with self.slots.of("model"):
            ran = await self.launcher.run({"mode": escape.mode, "source": source}, limits)
        said = ran.stdout + ran.stderr
        # A traceback shows lines of the program: only what is printed counts.
        escaped = any(
            line.startswith(WORD.encode()) or b" " + WORD.encode() in line
            for line in ran.stdout.splitlines()
        )
        return {
            "name": escape.name,
            "contained": not escaped and ran.status in escape.ends,
            "status": ran.status,
            "error": ran.error,
            "said": said.decode(errors="replace")[-600:],
        }

    async def forge(self, name: str, tests: Any, kind: str) -> dict[str, Any]:
        case_s = HANGING_CASE_S if name in forgeries.HANGING else CASE_S
        grading = Grading(self.launcher, self.slots, "model", LIMITS, {"case_s": case_s})
        turns = [{"role": "model", "text": forgeries.FORGERIES[name]}]
        answer = await grading.reward({"tests": tests}, turns)
        return {
            "name": f"{name} ({kind})",
            "contained": (answer.status, answer.value) == ("ok", 0.0),
            "status": answer.status,
            "error": answer.error,
            "said": str(answer.value),
        }

    async def poison(self, case: poison.Poison, at_once: asyncio.Semaphore) -> dict[str, Any]:
        said = []
        async with at_once:
            sessions = Sessions(self.launcher, self.clock, UNHURRIED, 8, 600.0)
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

    async def unharmed(self) -> list[str]:
        """What is not as it was outside."""
        wrong = []
        ran = await self.launcher.run(GOOD, LIMITS)
        if (ran.status, ran.stdout) != ("ok", b"42\n"):
            wrong.append(f"the next call: {ran}")
        if self.canary.read_text() != self.before:
            wrong.append("the canary has changed")
        await self.launcher.stop()
        for _ in range(1000):
            left = psutil.Process().children(recursive=True)
            if not left:
                break
            await self.clock.sleep(0.01)
        wrong += [f"a process is left: {process}" for process in left]
        return wrong


async def main(family: str, tier: str, canary: Path) -> None:
    runner = Runner(tier, canary)
    await runner.launcher.start()
    if family == "reward forging":
        styles = (
            ("stdin", forgeries.STDIN),
            ("calls", forgeries.CALLS),
            ("python", forgeries.PYTHON),
        )
        work = [
            runner.forge(name, tests, kind)
            for name in forgeries.FORGERIES
            for kind, tests in styles
        ]
    elif family == "session poisoning":
        # Without namespaces the limit of processes counts all that the user has: one by one there.
        at_once = asyncio.Semaphore(1 if tier == "landlock" else runner.slots.count)
        work = [runner.poison(case, at_once) for case in poison.CASES]
    else:
        work = [runner.escape(escape) for escape in PROGRAMS if escape.family == family]
    results = await asyncio.gather(*work)
    harm = await runner.unharmed()
    print(json.dumps({"user": os.getuid(), "results": results, "harm": harm}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
