"""Detection, by trying, of the isolation tier that this host can give to the model's code.

`python -m meshrl.services.sandbox.isolation.tier_detection [JSON]` prints the result as JSON, for
the command line.
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
from meshrl.common.job.isolation.runners import ContainerRunner
from meshrl.common.job.isolation.tiers import TIER_DESCRIPTIONS
from meshrl.common.mesh.process import container
from meshrl.common.mesh.process.host import Host, SystemHost
from meshrl.services.sandbox.isolation.jail_launcher import JailLauncher
from meshrl.services.sandbox.isolation.jails.program import JailProgram
from meshrl.services.sandbox.isolation.outer_jail.interpreters import (
    Interpreter,
    select_interpreter,
)
from meshrl.services.sandbox.isolation.resources import cgroups
from meshrl.services.sandbox.isolation.resources.limits import JailLimits
from meshrl.services.sandbox.jail.confinement import landlock, syscall_table

PROBE = JailLimits(wall_s=20.0, cpu_s=20.0)
PROBE_OUTPUT = "in a jail"
USERNS = Path("/proc/sys/user/max_user_namespaces")
APPARMOR = Path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns")
DEBIAN = Path("/proc/sys/kernel/unprivileged_userns_clone")


@dataclass(frozen=True)
class DetectedTier:
    tier: str
    fix: str  # how to reach a better one; empty: it is the best
    runner: str = ""  # the program that starts its containers, in the runner tier
    is_conclusive: bool = True  # a better one failed its probe, which may pass the next time

    @property
    def description(self) -> str:
        return TIER_DESCRIPTIONS[self.tier] + (f" ({self.runner})" if self.runner else "")


async def detect_tier(host: Host, clock: Clock, log: Path | None = None) -> DetectedTier:
    """Return the best tier in which a program runs here."""
    try:
        syscall_table.find_architecture()
    except syscall_table.UnsupportedMachine as error:
        return DetectedTier("none", f"{error}: run the sandbox on another host")
    problem = ""
    if shutil.which("bwrap"):
        problem = await probe_tier("bwrap", host, clock, log)
        if not problem:
            homes = cgroups.find_parents()
            if homes is not None:
                return DetectedTier(
                    "cgroup", describe_missing_cpu_control(homes.missing_cpu_functions)
                )
            return DetectedTier("bwrap", describe_missing_cgroups())
    if landlock.read_abi() >= landlock.TIER_MIN_ABI and not await probe_tier(
        "landlock", host, clock, log
    ):
        return DetectedTier(
            "landlock", describe_missing_bwrap(problem), is_conclusive=is_bwrap_blocked()
        )
    sure = is_bwrap_blocked() and landlock.read_abi() < landlock.TIER_MIN_ABI
    return DetectedTier(
        "none",
        f"{describe_missing_bwrap(problem)}; {describe_missing_landlock()}",
        is_conclusive=sure,
    )


async def detect_runner_tier(
    interpreter: Interpreter, host: Host, clock: Clock, log: Path | None
) -> DetectedTier:
    """Run a program in a container of a job's runner, and return the tier."""
    runner = ContainerRunner(interpreter.runner)
    problem = await probe_tier("runner", host, clock, log, interpreter)
    if not problem:
        return DetectedTier("runner", "", runner.name)
    return DetectedTier("none", f"sandbox.runner: {problem}", is_conclusive=False)


async def probe_tier(
    tier: str, host: Host, clock: Clock, log: Path | None, interpreter: Interpreter | None = None
) -> str:
    """Return why a program does not run in this tier here; empty if it does."""
    interpreter = interpreter or Interpreter.default()
    launcher = JailLauncher(host, clock, tier, interpreter, None, log)
    imports = "".join(f"import {name}\n" for name in interpreter.preloaded_modules)
    try:
        program = JailProgram(f"{imports}print({PROBE_OUTPUT!r})")
        ran = await launcher.run(program, PROBE)
    except MeshError as error:
        return f"{error.message}{last_log_line(log)}"
    finally:
        await launcher.stop()
    if ran.status == "ok" and ran.stdout.decode().strip() == PROBE_OUTPUT:
        return ""
    last_line = (ran.stderr.decode(errors="replace").strip().splitlines() or [ran.error])[-1]
    return f"{ran.status}: {last_line[-200:]}"


def last_log_line(log: Path | None) -> str:
    """Return the last line of a failed start's log, to follow the error's text."""
    lines = log.read_text(errors="replace").strip().splitlines() if log and log.is_file() else []
    return f": {lines[-1][-200:]}" if lines else ""


async def find_interpreter_problem(
    detected: DetectedTier, interpreter: Interpreter, host: Host, clock: Clock, log: Path | None
) -> str:
    """Return why the interpreter that a job names does not run in this host's tier.

    Empty: it runs, and has what the job imports.
    """
    if detected.tier in ("none", "runner") or interpreter == Interpreter.default():
        return ""
    if interpreter.root and detected.tier == "landlock":
        return "an image needs bubblewrap: Landlock exposes only the host's file system"
    tier = "landlock" if detected.tier == "landlock" else "bwrap"
    return await probe_tier(tier, host, clock, log, interpreter)


def describe_missing_cpu_control(missing: tuple[str, ...]) -> str:
    """Describe the functions for cores that control groups lack; init processes do them partly."""
    if not missing:
        return ""
    way = "delegate the cpu controller, or mount a v2 hierarchy at /sys/fs/cgroup/unified beside v1"
    return f"control groups cannot {', '.join(missing)} the use of cores on this host: {way}"


def describe_missing_cgroups() -> str:
    if os.getuid() == 0:
        return "the memory and pids controllers are not usable: mount /sys/fs/cgroup writable"
    return "run as root, or delegate a control group: systemd-run --user --scope -p Delegate=yes"


def describe_missing_landlock() -> str:
    """Explain why the tier below bubblewrap is unavailable too."""
    abi = landlock.read_abi()
    if abi >= landlock.TIER_MIN_ABI:
        return "Landlock does not work on this host"
    return (
        f"Landlock of this kernel has version {abi}, and jails need {landlock.TIER_MIN_ABI} "
        "(Linux 6.12)"
    )


def is_bwrap_blocked() -> bool:
    """Return whether this host's settings block bubblewrap, independent of a probe's error."""
    if not shutil.which("bwrap") or _file_equals(DEBIAN, "0") or _file_equals(USERNS, "0"):
        return True
    return _is_in_container() and bool(
        container.explain_user_namespace_rejection() or container.is_proc_masked()
    )


def describe_missing_bwrap(problem: str) -> str:
    """Explain what blocks bubblewrap, as far as the host shows it."""
    if not shutil.which("bwrap"):
        return "apt-get install bubblewrap"
    if _file_equals(APPARMOR, "1"):
        return (
            "AppArmor denies user namespaces to unprivileged users: sysctl -w "
            "kernel.apparmor_restrict_unprivileged_userns=0, or a profile for bwrap with `userns,`"
        )
    if _file_equals(DEBIAN, "0"):
        return "sysctl -w kernel.unprivileged_userns_clone=1"
    if _file_equals(USERNS, "0"):
        return "user namespaces are disabled: sysctl -w user.max_user_namespaces=65536"
    if _is_in_container():
        return describe_container_limits(
            container.explain_user_namespace_rejection(), container.is_proc_masked(), problem
        )
    return f"bwrap does not work on this host: {problem}"


def describe_container_limits(refused: str, masked: bool, problem: str) -> str:
    """Explain which settings of a container block bubblewrap, and what to add to them."""
    why, ways = [], []
    if refused:
        why.append(refused)
        ways.append("--security-opt seccomp=compose/seccomp.json")
    if masked:
        why.append("/proc is masked, but jails mount their own")
        ways.append("--security-opt systempaths=unconfined (Kubernetes: procMount: Unmasked)")
    if not why:
        why.append(f"bwrap does not work in this container ({problem})")
        ways.append("--security-opt apparmor=unconfined, where the host has AppArmor")
    return f"{'; '.join(why)}: add {', '.join(ways)}"


def _file_equals(path: Path, text: str) -> bool:
    try:
        return path.read_text().strip() == text
    except OSError:
        return False


def _is_in_container() -> bool:
    # for any runtime
    return bool(container.detect_container()) or container.read_rights().seccomp == "filtered"


async def _main() -> None:
    """Print the detected tier.

    With a job's settings as JSON it also explains why the job's interpreter does not run. The job's
    runner is then probed in place of this host's tiers.
    """
    host, clock, problem = SystemHost(), SystemClock(), ""
    settings = JailSettings(**json.loads(sys.argv[1])) if sys.argv[1:] else JailSettings()
    with tempfile.NamedTemporaryFile(prefix="meshrl-probe-") as log:
        place = Path(log.name)
        try:
            interpreter = select_interpreter(settings)
            if interpreter.runner:
                found = await detect_runner_tier(interpreter, host, clock, place)
            else:
                found = await detect_tier(host, clock, Path(os.devnull))
                problem = await find_interpreter_problem(found, interpreter, host, clock, place)
        except MeshError as error:
            found = DetectedTier("none", error.fix or error.message)
            problem = error.message
    report = {
        "tier": found.tier,
        "fix": found.fix,
        "description": found.description,
        "interpreter_problem": problem,
        "is_conclusive": found.is_conclusive,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    asyncio.run(_main())
