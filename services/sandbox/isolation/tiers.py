"""Detects, by trying, which tier of isolation this host can give to code that the model wrote.

`python -m meshrl.services.sandbox.isolation.tiers [JSON]` prints what it found as JSON, for the
command line.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from meshrl.common.api.sandbox import JailSettings
from meshrl.common.base.clock import Clock, SystemClock
from meshrl.common.base.errors import MeshError
from meshrl.common.job.isolation.isolation import MEANING
from meshrl.common.job.isolation.runners import Runner
from meshrl.common.mesh.process import container
from meshrl.common.mesh.process.host import Host, SystemHost
from meshrl.services.sandbox.isolation.jail_launcher import JailLauncher
from meshrl.services.sandbox.isolation.jails.program import Program
from meshrl.services.sandbox.isolation.outer_jail.interpreters import Interpreter, interpreter_of
from meshrl.services.sandbox.isolation.resources import cgroups
from meshrl.services.sandbox.isolation.resources.limits import JailLimits
from meshrl.services.sandbox.jail.confinement import calls, landlock

PROBE = JailLimits(wall_s=20.0, cpu_s=20.0)
WORD = "in a jail"
USERNS = Path("/proc/sys/user/max_user_namespaces")
APPARMOR = Path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns")
DEBIAN = Path("/proc/sys/kernel/unprivileged_userns_clone")


@dataclass(frozen=True)
class FoundTier:
    tier: str
    fix: str  # how to reach a better one; empty: it is the best
    runner: str = ""  # the program that starts its containers, in the tier that is named so
    sure: bool = True  # else a better one was tried and failed, which it may not do again

    @property
    def meaning(self) -> str:
        return MEANING[self.tier] + (f" ({self.runner})" if self.runner else "")


async def find(host: Host, clock: Clock, log: Path | None = None) -> FoundTier:
    """The best tier in which a program runs here."""
    try:
        calls.architecture()
    except calls.UnsupportedMachine as error:
        return FoundTier("none", f"{error}: run the sandbox on another machine")
    problem = ""
    if shutil.which("bwrap"):
        problem = await tried("bwrap", host, clock, log)
        if not problem:
            homes = cgroups.find()
            if homes is not None:
                return FoundTier("cgroup", no_cores(homes.missing))
            return FoundTier("bwrap", no_groups())
    if landlock.abi() >= landlock.TIER and not await tried("landlock", host, clock, log):
        return FoundTier("landlock", no_bwrap(problem), sure=lacks_bwrap())
    sure = lacks_bwrap() and landlock.abi() < landlock.TIER
    return FoundTier("none", f"{no_bwrap(problem)}; {no_landlock()}", sure=sure)


async def of_runner(
    interpreter: Interpreter, host: Host, clock: Clock, log: Path | None
) -> FoundTier:
    """Whether the containers of a job's runner run programs here, found by running one."""
    runner = Runner(interpreter.runner)
    problem = await tried("runner", host, clock, log, interpreter)
    if not problem:
        return FoundTier("runner", "", runner.name)
    return FoundTier("none", f"sandbox.runner: {problem}", sure=False)


async def tried(
    tier: str, host: Host, clock: Clock, log: Path | None, interpreter: Interpreter | None = None
) -> str:
    """Why a program does not run in this tier here; empty if it does."""
    interpreter = interpreter or Interpreter.own()
    launcher = JailLauncher(host, clock, tier, interpreter, None, log)
    imports = "".join(f"import {name}\n" for name in interpreter.warm)
    try:
        program = Program(f"{imports}print({WORD!r})")
        ran = await launcher.run(program, PROBE)
    except MeshError as error:
        return f"{error.message}{last_line(log)}"
    finally:
        await launcher.stop()
    if ran.status == "ok" and ran.stdout.decode().strip() == WORD:
        return ""
    said = (ran.stderr.decode(errors="replace").strip().splitlines() or [ran.error])[-1]
    return f"{ran.status}: {said[-200:]}"


def last_line(log: Path | None) -> str:
    """What was said last of a start that failed, to follow the error's text."""
    lines = log.read_text(errors="replace").strip().splitlines() if log and log.is_file() else []
    return f": {lines[-1][-200:]}" if lines else ""


async def unfit(
    found: FoundTier, interpreter: Interpreter, host: Host, clock: Clock, log: Path | None
) -> str:
    """Why the interpreter that a job names does not run in the tier of this host; empty: it does,
    and has what the job imports.
    """
    if found.tier in ("none", "runner") or interpreter == Interpreter.own():
        return ""
    if interpreter.root and found.tier == "landlock":
        return "Landlock shows no other file system than the host's: an image takes bubblewrap"
    tier = "landlock" if found.tier == "landlock" else "bwrap"
    return await tried(tier, host, clock, log, interpreter)


def no_cores(missing: tuple[str, ...]) -> str:
    """What control groups do not do here about cores, which keepers then do as far as they can."""
    if not missing:
        return ""
    way = "delegate the cpu controller, or mount a v2 hierarchy at /sys/fs/cgroup/unified beside v1"
    return f"control groups do not {', '.join(missing)} the use of cores here: {way}"


def no_groups() -> str:
    if os.getuid() == 0:
        return "no memory and pids controllers that may be used: mount /sys/fs/cgroup writable"
    return "run as root, or delegate a control group: systemd-run --user --scope -p Delegate=yes"


def no_landlock() -> str:
    """Why the tier below bubblewrap is not left either."""
    abi = landlock.abi()
    if abi >= landlock.TIER:
        return "Landlock does not work here"
    return f"Landlock of this kernel is of version {abi}, and {landlock.TIER} (Linux 6.12) it takes"


def lacks_bwrap() -> bool:
    """Whether this host's settings keep bubblewrap from working, whatever a try of it said."""
    if not shutil.which("bwrap") or _reads(DEBIAN, "0") or _reads(USERNS, "0"):
        return True
    return _contained() and bool(container.user_namespaces_refused() or container.masked_proc())


def no_bwrap(problem: str) -> str:
    """What keeps bubblewrap from working, as far as the host says."""
    if not shutil.which("bwrap"):
        return "apt-get install bubblewrap"
    if _reads(APPARMOR, "1"):
        return (
            "AppArmor keeps plain users from user namespaces: sysctl -w "
            "kernel.apparmor_restrict_unprivileged_userns=0, or a profile for bwrap with `userns,`"
        )
    if _reads(DEBIAN, "0"):
        return "sysctl -w kernel.unprivileged_userns_clone=1"
    if _reads(USERNS, "0"):
        return "user namespaces are off: sysctl -w user.max_user_namespaces=65536"
    if _contained():
        return in_container(container.user_namespaces_refused(), container.masked_proc(), problem)
    return f"bwrap does not work here: {problem}"


def in_container(refused: str, masked: bool, problem: str) -> str:
    """What of a container's settings keeps bubblewrap from working, and what to add to them."""
    why, ways = [], []
    if refused:
        why.append(refused)
        ways.append("--security-opt seccomp=compose/seccomp.json")
    if masked:
        why.append("/proc is masked, and jails have one of their own")
        ways.append("--security-opt systempaths=unconfined (Kubernetes: procMount: Unmasked)")
    if not why:
        why.append(f"bwrap does not work in this container ({problem})")
        ways.append("--security-opt apparmor=unconfined, where the host has AppArmor")
    return f"{'; '.join(why)}: add {', '.join(ways)}"


def _reads(path: Path, text: str) -> bool:
    try:
        return path.read_text().strip() == text
    except OSError:
        return False


def _contained() -> bool:
    return bool(container.kind()) or container.rights().seccomp == "filtered"  # some runtime's


async def _main() -> None:
    """With a job's settings as JSON it is also said why its interpreter does not run, if so; its
    runner is tried in place of this host's tiers.
    """
    host, clock, problem = SystemHost(), SystemClock(), ""
    asked = JailSettings(**json.loads(sys.argv[1])) if sys.argv[1:] else JailSettings()
    with tempfile.NamedTemporaryFile(prefix="meshrl-probe-") as log:
        place = Path(log.name)
        try:
            interpreter = interpreter_of(asked)
            if interpreter.runner:
                found = await of_runner(interpreter, host, clock, place)
            else:
                found = await find(host, clock, Path(os.devnull))
                problem = await unfit(found, interpreter, host, clock, place)
        except MeshError as error:
            found = FoundTier("none", error.fix or error.message)
            problem = error.message
    said = {"tier": found.tier, "fix": found.fix, "meaning": found.meaning, "problem": problem}
    print(json.dumps({**said, "sure": found.sure}))


if __name__ == "__main__":
    asyncio.run(_main())
