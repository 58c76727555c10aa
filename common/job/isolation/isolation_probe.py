"""Probe of this host's isolation: runs test code in a process of its own. Blocks."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass

from meshrl.common.base.errors import Refused
from meshrl.common.job.config import JobConfig, SandboxConfig
from meshrl.common.job.isolation.runners import RUNSC
from meshrl.common.job.isolation.tiers import TIER_DESCRIPTIONS, TIER_ORDER, is_sufficient

PROBE_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class IsolationReport:
    """Result of the probe, and advice."""

    tier: str
    description: str
    fix: str  # how to get a better tier; empty: it is the best
    interpreter_problem: str = (
        ""  # why a job's interpreter does not run in the tier; empty: it does
    )
    is_conclusive: bool = True  # False: a better tier failed, perhaps not permanently
    is_finished: bool = True  # the probe has completed


@dataclass(frozen=True)
class IsolationTiers:
    """Isolation tiers of a host for `meshrl.common.job.isolation.tiers.has_sufficient_tier`."""

    tiers: tuple[str, ...]
    is_conclusive: bool = True
    is_finished: bool = True


def probe_isolation(sandbox: SandboxConfig | None = None) -> IsolationReport:
    """Probe the tier of this host, in a second or two.

    With the settings of a job the probe uses their interpreter and imports.
    """
    command = [sys.executable, "-m", "meshrl.services.sandbox.isolation.tier_detection"]
    if sandbox is not None:
        names = ("python", "root", "runner", "imports")
        command.append(json.dumps({name: getattr(sandbox, name) for name in names}))
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=True
        )
        return IsolationReport(**json.loads(done.stdout))
    except (subprocess.SubprocessError, OSError, ValueError, TypeError) as error:
        why = f"the probe failed: {error}"
        return IsolationReport(
            TIER_ORDER[0], TIER_ORDER[0], why, is_conclusive=False, is_finished=False
        )


def probe_tiers() -> IsolationTiers:
    """Return the best tier of this host, and `runner` if gVisor's is installed and works."""
    tried = [probe_isolation()]
    if shutil.which(RUNSC):
        tried.append(probe_isolation(SandboxConfig(runner=[RUNSC])))
    return IsolationTiers(
        tuple(one.tier for one in tried if one.tier != TIER_ORDER[0]),
        all(one.is_conclusive for one in tried),
        all(one.is_finished for one in tried),
    )


def require_isolation(config: JobConfig) -> None:
    """Raise Refused if the job runs code of the model and this host isolates it too little."""
    if not config.jailed_names:
        return
    isolation, demanded = probe_isolation(config.sandbox), config.sandbox.tier
    if not is_sufficient(isolation.tier, demanded):
        runner = f" by sandbox.runner {config.sandbox.runner[0]}" if config.sandbox.runner else ""
        raise Refused(
            f"{', '.join(sorted(set(config.jailed_names)))} run code that the model wrote, "
            f"which needs {TIER_DESCRIPTIONS[demanded]} (sandbox.tier); this host has "
            f"{isolation.description}{runner}",
            fix=isolation.fix,
        )
    if isolation.interpreter_problem:
        key = "sandbox.root" if config.sandbox.root else "sandbox.python"
        raise Refused(
            f"{key}: the interpreter of the model's code does not run in a jail: "
            f"{isolation.interpreter_problem}",
            fix='See docs/use/sandbox.md, "Images"',
        )
