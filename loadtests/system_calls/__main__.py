"""Survey of system calls that a jail's filter rejects to honest programs, by name.

Usage:

    python -m loadtests.system_calls [--python /path/to/python3.8 ...]

Runs programs that use what Python's standard library, bash, the usual Unix tools and, where an
interpreter has them, numpy and pytest need, with each interpreter, in the best tier of this host.
Prints one flat JSON object: `programs`; `refused`, program by program; `failed`, with how it ended.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from loadtests.measuring.entry import report
from meshrl.common.api.sandbox import JailSettings
from meshrl.common.base.clock import SystemClock
from meshrl.common.mesh.process.host import SystemHost
from meshrl.services.sandbox.isolation.jail_launcher import JailLauncher
from meshrl.services.sandbox.isolation.jails.program import JailProgram
from meshrl.services.sandbox.isolation.outer_jail.interpreters import select_interpreter
from meshrl.services.sandbox.isolation.resources import cgroups
from meshrl.services.sandbox.isolation.resources.limits import MIB, JailLimits

LIMITS = JailLimits(wall_s=60.0, cpu_s=60.0, memory_bytes=1024 * MIB, processes=64, open_files=256)
NOTHING_TO_DO = 42  # exit status of a program whose library is missing in this interpreter

PROGRAMS = Path(__file__).with_name("programs.jsonl")


async def measured(pythons: list[str]) -> dict[str, Any]:
    refused: list[str] = []
    failed: list[str] = []
    count = 0
    for python in pythons:
        clock = SystemClock()
        interpreter = select_interpreter(JailSettings(python=python))
        launcher = JailLauncher(SystemHost(), clock, "bwrap", interpreter, cgroups.find_parents())
        try:
            for row in map(json.loads, PROGRAMS.read_text().splitlines()):
                name = row["name"]
                ran = await launcher.run(JailProgram(row["source"], row["mode"]), LIMITS)
                if ran.exit_code == NOTHING_TO_DO:
                    continue
                count += 1
                key = f"{python} {name}"
                if ran.denied_calls:
                    refused.append(f"{key}: {' '.join(ran.denied_calls)}")
                if ran.status != "ok" or ran.exit_code:
                    output = ran.stderr.decode(errors="replace")[-300:]
                    failed.append(f"{key}: {ran.status} {ran.exit_code} {ran.error} {output}")
        finally:
            await launcher.stop()
    return {"programs": count, "refused": refused, "failed": failed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", nargs="*", default=[os.path.realpath(sys.executable)])
    figures = asyncio.run(measured(parser.parse_args().python))
    report(figures)
    sys.exit(bool(figures["refused"] or figures["failed"]))


if __name__ == "__main__":
    main()
