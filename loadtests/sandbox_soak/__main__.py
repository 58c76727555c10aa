"""Minutes of full load on a sandbox, a share of it hostile: no wrong answer, none lost, no growth.

Callers draw from all kinds of tools and rewards, each of which has a known answer; hostile programs
(bombs, endless loops, floods, forgeries) must end by a type that is theirs. `python -m
loadtests.sandbox_soak`
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from loadtests.measuring.entry import options, report
from loadtests.sandbox.sandboxed import CALL_S, JOB, Place, sandboxed
from meshrl.common.api.sandbox import JailSettings, RewardBatch, RewardCall, RewardPart, Sandbox
from meshrl.common.base.errors import MeshError

HOSTILE = 0.1
FORGED = 0.5  # of the hostile; the others are programs
CALLERS = 64
SAMPLE_S = 5.0
LEAST_SAMPLES = 16  # of memory, however short it takes
SESSIONS = 40
JAIL = JailSettings(wall_s=4.0, cpu_s=1.0, memory_bytes=128 << 20, processes=16, sessions=SESSIONS)
REWARDS = [RewardPart("code_tests", 1.0, {"case_s": 2.0}), RewardPart("exact", 0.0, {})]

PROGRAMS = {  # hostile source -> how it may end
    "import os\nwhile True: os.fork()": ("refused", "timeout", "crashed", "out_of_memory"),
    "x = []\nwhile True: x.append(bytearray(1 << 20))": ("out_of_memory",),
    "while True: print('x' * 4000)": ("output_limit",),
    "while True: pass": ("timeout",),
    "import time\ntime.sleep(1e6)": ("timeout",),
    "import socket\nsocket.create_connection(('127.0.0.1', 22))": ("refused",),
    "import os\nos.kill(1, 9)\nos.kill(os.getpid(), 9)": ("crashed",),
    "open('/tmp/x', 'wb').write(bytes(1 << 30))": ("refused", "out_of_memory", "crashed"),
    "import os\nif os.fork() == 0:\n    os.setsid()\n    while True: pass": ("ok",),
}
FORGERIES = (
    "import os\nos._exit(0)",
    "class E:\n    def __eq__(self, o): return True\ndef f(x): return E()",
    "print('PASSED')\nraise SystemExit(0)",
    "def f(x):\n    while True: pass",
)


@dataclass
class Tally:
    calls: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    lost: int = 0
    memory: list[tuple[float, int]] = field(default_factory=list)  # (seconds, bytes)

    def checked(self, kind: str, right: bool, what: object) -> None:
        self.calls[kind] += 1
        if not right:
            self.wrong.append(f"{kind}: {what!s:.300}")


class Soak:
    def __init__(self, place: Place, seed: int) -> None:
        self.place, self.random, self.tally = place, random.Random(seed), Tally()
        self._notes: dict[str, int] = {}
        self._locks = {f"s{i}": asyncio.Lock() for i in range(SESSIONS)}
        self._honest: list[Callable[[], Awaitable[None]]] = [
            self.program,
            self.program,
            self.shell,
            self.calculator,
            self.session,
            self.score,
        ]

    async def program(self) -> None:
        n = self.random.randrange(1000)
        _, value = await self.place.run(JOB, "python", f"print({n} * {n} + 1)")
        right = value == {"status": "ok", "output": f"{n * n + 1}\n"}
        self.tally.checked("python", right, value)

    async def shell(self) -> None:
        n = self.random.randrange(1000)
        _, value = await self.place.run(JOB, "shell", f"echo $(({n} * 3)) > f; cat f")
        self.tally.checked("shell", value == {"status": "ok", "output": f"{n * 3}\n"}, value)

    async def calculator(self) -> None:
        n = self.random.randrange(1000)
        status, value = await self.place.run(JOB, "calculator", f"{n} + 2 * 3")
        self.tally.checked("calculator", (status, value) == ("ok", str(n + 6)), value)

    async def session(self) -> None:
        """Run sessions that hold the sum of their inputs, one call of a session at a time."""
        name = self.random.choice(list(self._locks))
        async with self._locks[name]:
            n = self.random.randrange(1000)
            total = self._notes.get(name, 0) + n
            source = f"total = globals().get('total', 0) + {n}\ntotal"
            _, value = await self.place.run(JOB, "session", source, name)
            self._notes[name] = total
            self.tally.checked("session", value == {"status": "ok", "output": f"{total}\n"}, value)

    async def score(self) -> None:
        n, right = self.random.randrange(2, 100), self.random.random() < 0.5
        cases = [{"args": [x], "output": x * n} for x in range(4)]
        row = {"answer": "?", "tests": {"function": "f", "cases": cases}}
        # The wrong one is right of 0 only.
        source = f"def f(x):\n    return x * {n if right else n + 1}"
        await self._score("score", row, source, 1.0 if right else 0.25)

    async def hostile(self) -> None:
        """Send a forgery, or a bomb with a known outcome."""
        if self.random.random() < FORGED:
            cases = [{"args": [x], "output": x + 7} for x in range(2)]
            row = {"answer": "?", "tests": {"function": "f", "cases": cases}}
            await self._score("forgery", row, self.random.choice(FORGERIES), 0.0)
            return
        source, ends = self.random.choice(list(PROGRAMS.items()))
        status, value = await self.place.run(JOB, "python", source)
        self.tally.checked("hostile", status in ends, (source, status, value))

    async def _score(self, kind: str, row: dict[str, Any], source: str, wanted: float) -> None:
        turns = [{"role": "model", "text": source}]
        asked = RewardBatch([RewardCall(0, JOB, row, turns, 10.0)])
        call = self.place.sandbox.call(Sandbox.score_trajectories, asked, deadline_s=CALL_S)
        outcome = (await call).outcomes[0]
        found = (outcome.status, outcome.value)
        self.tally.checked(kind, found == ("ok", wanted), (source, found, outcome.error))

    async def until(self, end: float) -> None:
        """Run calls one after the other; print lost ones."""
        while time.perf_counter() < end:
            hostile = self.random.random() < HOSTILE
            work = self.hostile if hostile else self.random.choice(self._honest)
            try:
                await work()
            except MeshError as error:
                self.tally.lost += 1
                print(f"lost: {error}", file=sys.stderr)

    async def watch(self, begun: float, end: float) -> None:
        every_s = min(SAMPLE_S, (end - begun) / LEAST_SAMPLES)
        while time.perf_counter() < end:
            await asyncio.sleep(every_s)
            memory = await asyncio.to_thread(self.place.memory)
            self.tally.memory.append((time.perf_counter() - begun, memory))


def growth(samples: list[tuple[float, int]]) -> float:
    """Return the growth of memory from the second to the last quarter, as a share of medians."""
    end = samples[-1][0]
    early = [m for t, m in samples if 0.25 * end <= t < 0.5 * end]
    late = [m for t, m in samples if t >= 0.75 * end]
    return statistics.median(late) / statistics.median(early) - 1.0


async def main(seconds: float, seed: int, callers: int) -> dict[str, Any]:
    async with sandboxed("--jails", "8") as place:
        soak = Soak(place, seed)
        await place.load(JOB, REWARDS, JAIL)
        begun = time.perf_counter()
        end = begun + seconds
        await asyncio.gather(soak.watch(begun, end), *(soak.until(end) for _ in range(callers)))
        tally = soak.tally
        for wrong in tally.wrong[:20]:
            print(f"wrong: {wrong}", file=sys.stderr)
        return {
            **{f"calls_{kind}": count for kind, count in sorted(tally.calls.items())},
            "wrong": len(tally.wrong),
            "lost": tally.lost,
            "memory_growth": round(growth(tally.memory), 4),
        }


if __name__ == "__main__":
    parser = options(__doc__, seconds=480.0, seed=0, callers=CALLERS)
    a = parser.parse_args()
    report(asyncio.run(main(a.seconds, a.seed, a.callers)))
