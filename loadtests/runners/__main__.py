"""Benchmark of generated code in a container per call: cost of a runner beside a fresh jail.

Calls run one after the other, kinds take turns in each round, and all runs a program that prints.
`--escapes` runs the families of the corpus of escapes in runsc's containers, too. `python -m
loadtests.runners [--runner NAME]...`
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from loadtests.measuring.entry import options, report
from meshrl.common.api.sandbox import JailSettings
from meshrl.common.base.clock import SystemClock
from meshrl.common.job.isolation.runners import RUNSC
from meshrl.common.mesh.process.host import SystemHost
from meshrl.services.sandbox.isolation.jail_launcher import JailLauncher
from meshrl.services.sandbox.isolation.jails.program import JailProgram
from meshrl.services.sandbox.isolation.outer_jail.interpreters import select_interpreter
from meshrl.services.sandbox.isolation.resources import cgroups
from meshrl.services.sandbox.isolation.resources.limits import JailLimits

ROOT = Path(__file__).parents[2]
STANDIN = str(ROOT / "tests" / "unit" / "sandbox" / "isolation" / "standin")
PROGRAM = JailProgram("print(sum(i * i for i in range(1000)))")
SAID = str(sum(i * i for i in range(1000))).encode()
ROUNDS = 20
LIMITS = JailLimits(wall_s=30.0)
ESCAPES_S = 1800.0


def launcher(kind: str, log: Path) -> JailLauncher:
    runner = {"jail": [], "standin": [STANDIN]}.get(kind, [kind])
    python = "/usr/bin/python3" if kind == "standin" else ""
    interpreter = select_interpreter(JailSettings(runner=runner, python=python))
    tier = "runner" if runner else "bwrap"
    return JailLauncher(SystemHost(), SystemClock(), tier, interpreter, cgroups.find_parents(), log)


async def measured(kinds: list[str], rounds: int) -> dict[str, float]:
    took: dict[str, list[float]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory() as scratch:
        async with contextlib.AsyncExitStack() as stack:
            made = {}
            for kind in kinds:
                made[kind] = launcher(kind, Path(scratch) / "log")
                stack.push_async_callback(made[kind].stop)
                await made[kind].run(PROGRAM, LIMITS)  # its zygote or spawner starts
            for _ in range(rounds):
                for kind in kinds:
                    started_s = time.monotonic()
                    ran = await made[kind].run(PROGRAM, LIMITS)
                    took[kind].append(1000 * (time.monotonic() - started_s))
                    if ran.stdout.strip() != SAID:
                        raise RuntimeError(f"{kind}: {ran}")
    return {f"{kind}_p50_ms": statistics.median(times) for kind, times in took.items()}


def bare(rounds: int) -> float:
    """Return median milliseconds of `runsc` alone, in a container with this host's files."""
    took = []
    command = [RUNSC, "--network=none", "--ignore-cgroups", "--overlay2=none", "do", "true"]
    for _ in range(rounds):
        started_s = time.monotonic()
        subprocess.run(command, capture_output=True, timeout=60, check=True)
        took.append(1000 * (time.monotonic() - started_s))
    return statistics.median(took)


def escapes() -> dict[str, object]:
    """Return the number of corpus programs run in runsc's containers, and those that escaped."""
    with tempfile.TemporaryDirectory(prefix="canary-") as scratch:
        Path(scratch).chmod(0o755)
        canary = Path(scratch) / "canary"
        canary.write_text("untouched")
        module = "tests.unit.sandbox.escapes.runner"
        command = [sys.executable, "-m", module, RUNSC, str(canary)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=ESCAPES_S, check=True)
    document = json.loads(done.stdout.splitlines()[-1])
    results = [result for family in document["families"] for result in family["results"]]
    out = [result["name"] for result in results if not result["contained"]]
    return {"escape_programs": len(results), "escaped": out}


def main() -> None:
    parser = options(__doc__, rounds=ROUNDS, escapes=False)
    parser.add_argument("--runner", action="append", default=[], help="beside the stand-in")
    a = parser.parse_args()
    runners = a.runner or ([RUNSC] if shutil.which(RUNSC) else [])
    found: dict[str, object] = {"cores": os.cpu_count(), "load": os.getloadavg()[0]}
    found |= asyncio.run(measured(["jail", "standin", *runners], a.rounds))
    if RUNSC in runners:
        found["runsc_do_p50_ms"] = bare(max(3, a.rounds // 5))
    if a.escapes:
        found |= escapes()
    report(found)


if __name__ == "__main__":
    main()
