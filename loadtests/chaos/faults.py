"""Faults of a running mesh, and the verdict on its run."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from loadtests.chaos.verdict import Report, verdict
from loadtests.damage.files import KINDS, LAUNCHER, harm
from loadtests.measuring.commands import meshrl
from loadtests.measuring.entry import print_progress
from loadtests.measuring.meshed import living, opened
from loadtests.measuring.processes import beside, small_disk
from meshrl.common.base.errors import MeshError
from meshrl.common.state import jobs
from meshrl.directory.directory_paths import read_json_or_empty
from meshrl.view.mesh.process_usage import find_owner_job

GAP_S = (2.0, 5.0)  # between the end of one fault and the next
STOPPED_S = 8.0  # a stop lasts until the lease is gone, and at least a second more
WITHOUT_LEASE_S = 12.0  # of a process that holds none
RUN_S = 1800.0  # the whole run, faults included
MORE_STEPS = 24  # for a run that has finished before all faults were made
FULL_S = (2.0, 8.0)  # how long there is no room
DISK = "1g"  # only if the run's disk is filled
HARMFUL = ("flip", "truncate", "empty")
UP_S = 120.0
AUDIT_S = 120.0
UNREGISTERED = {
    "redis-server": "redis",
    "valkey": "redis",
    "module:meshrl.common.mesh.process.forking.fork_server": "fork-server",
}
WITHOUT_LEASE = ("environment", "fork-server", "redis")
WAITED_FOR = ("engine", "trainer", "rollout", "sandbox", "weights", "environment", "redis")


@dataclass(frozen=True)
class Target:
    name: str
    kind: str
    pid: int
    job: str = ""  # for which it works alone


class Chaos:
    def __init__(self, run_dir: Path, seed: int, kinds: list[str], count: int) -> None:
        self.run_dir, self.kinds, self.count = run_dir, kinds, count
        self.random = random.Random(seed)
        self.report = Report()
        # Files that a running mesh reads again and has another copy of.
        self.damageable = [k for k in KINDS if k.recovers and LAUNCHER not in k.readers]

    async def wreak(self) -> None:
        """Inject the faults in sequence while the run trains, until all are made."""
        while len(self.report.faults) < self.count:
            settings = self.run_dir / "mesh" / "settings.json"
            async with asyncio.timeout(UP_S):
                while not settings.exists():
                    await asyncio.sleep(0.2)
            while await self._phase() != jobs.Phase.TRAINING:  # until this task is ended
                await asyncio.sleep(0.5)
            await asyncio.sleep(self.random.uniform(*GAP_S))
            phase = await self._phase()
            if phase in jobs.TERMINAL_PHASES:
                continue
            fault = self.random.choice(self.kinds)
            entry = {"fault": fault, "phase": phase, "at": time.time(), "job": ""}
            match fault:
                case "damage":
                    made = await self._damage()
                case "full":
                    made = await self._fill()
                case _:
                    made = await self._hit(fault)
            if made:
                self.report.faults.append(entry | made | {"until": time.time()})
            else:
                print_progress(f"no {fault} was made")

    async def _hit(self, fault: str) -> dict[str, Any]:
        target = self._choose(await self._targets())
        if target is None:
            return {}
        print_progress(f"{fault} {target.name} ({target.pid}) {target.job}")
        hit = {"name": target.name, "job": target.job, "at": time.time()}
        try:
            if fault == "kill":
                os.kill(target.pid, signal.SIGKILL)
                return hit
            return hit | await self._stop(target)
        except ProcessLookupError:
            return {}

    async def _damage(self) -> dict[str, Any]:
        """Corrupt a file that a process of the mesh reads again, and kill that process."""
        kind = self.random.choice(self.damageable)
        targets = await self._targets()
        path = next(iter(kind.found(self.run_dir)), None)
        how = self.random.choice(HARMFUL)
        if path is None or harm(how, path, None, kind.at_head):
            return {}
        print_progress(f"{how} {path}")
        for target in targets:
            if target.name in kind.readers or target.kind in kind.readers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(target.pid, signal.SIGKILL)
        return {"name": f"{kind.name} {how}"}

    async def _fill(self) -> dict[str, Any]:
        """Fill the run's disk for some seconds."""
        lasts = self.random.uniform(*FULL_S)
        print_progress(f"no room for {lasts:.1f} s")
        filler = self.run_dir.parent / "filler"
        try:
            with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while file.write(bytes(1 << 20)):
                    pass
            await asyncio.sleep(lasts)
        finally:
            filler.unlink(missing_ok=True)
        return {"name": f"{lasts:.1f} s"}

    async def _stop(self, target: Target) -> dict[str, Any]:
        """Stop a process until its lease expires; return the time until it is named as the
        culprit.
        """
        os.kill(target.pid, signal.SIGSTOP)
        started_s = time.monotonic()
        lasts = WITHOUT_LEASE_S if target.kind in WITHOUT_LEASE else STOPPED_S
        named: float | None = None
        waited = False
        polls: list[dict[str, Any]] = []  # evidence for a stop that is never named
        try:
            while (passed := time.monotonic() - started_s) < lasts:
                stalls, at = await self._stalls(), time.monotonic() - started_s
                told = [f"{one['waiter']} -> {one['culprit']}: {one['reason']}" for one in stalls]
                polls.append(
                    {"at_s": round(at, 2), "took_s": round(at - passed, 2), "stalls": told}
                )
                for stall in stalls:
                    if stall["culprit"] == target.name and not waited:
                        named, waited = time.monotonic() - started_s, bool(stall["waiter"])
                await asyncio.sleep(max(0.0, min(0.5, lasts - passed)))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(target.pid, signal.SIGCONT)
        if named is not None and waited:
            self.report.named_s.append(named)
        elif named is None and target.kind in WAITED_FOR:
            self.report.unnamed.append(target.name)
            print_progress(f"never named {target.name}: {json.dumps(polls)}")
        return {"named_s": named, "waited_for": waited}

    async def _stalls(self) -> list[dict[str, Any]]:
        words = ("status", "--stalled", "--json", "--mesh", str(self.run_dir))
        try:
            found: list[dict[str, Any]] = json.loads(await meshrl(*words, within_s=30.0))
        except (RuntimeError, TimeoutError, ValueError):
            return []
        return found

    # -- targets -------------------------------------------------------------------------------

    async def _targets(self) -> list[Target]:
        found = [*self._unregistered()]
        for entry in await living(self._url, connect_s=2.0):
            job = find_owner_job(entry)
            found.append(Target(entry.name, entry.kind, entry.pid, job))
            environments = entry.stats.get("environments", {})
            found += [Target(n, "environment", p, job) for n, p in environments.items() if p]
        return [t for t in found if psutil.pid_exists(t.pid)]

    def _unregistered(self) -> list[Target]:
        """Return Redis and the fork server, by their command lines."""
        found = []
        directory = str(self.run_dir / "mesh")
        for process in psutil.process_iter(["pid", "cmdline", "cwd"]):
            line = " ".join(process.info["cmdline"] or [])
            ours = directory in line or (process.info["cwd"] or "").startswith(directory)
            for mark, name in UNREGISTERED.items():
                if ours and mark in line:
                    found.append(Target(name, name, process.info["pid"]))
        return found

    def _choose(self, targets: list[Target]) -> Target | None:
        """Choose a kind and then a process of it, so that frequent kinds do not hide rare ones."""
        kinds = sorted({t.kind for t in targets} - {"launcher"})
        if not kinds:
            return None
        kind = self.random.choice(kinds)
        return self.random.choice(sorted((t for t in targets if t.kind == kind), key=repr))

    @property
    def _url(self) -> str:
        """Return the URL of the mesh that runs now; a resumed mesh has another."""
        settings = self.run_dir / "mesh" / "settings.json"
        return str(json.loads(settings.read_text())["redis_url"])

    async def _phase(self) -> str:
        try:
            async with opened(self._url, connect_s=2.0) as state:
                phases = [row.phase for row in await jobs.read_jobs(state)] or [jobs.Phase.QUEUED]
        except (MeshError, OSError, ValueError):
            return "unknown"
        return jobs.Phase.TRAINING if jobs.Phase.TRAINING in phases else phases[-1]


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    kinds = arguments.faults.split(",")
    folder = Path(tempfile.mkdtemp(prefix="meshrl-chaos-"))
    with small_disk(folder, DISK) if "full" in kinds else contextlib.nullcontext():
        out = arguments.out or folder / "run"
        chaos = Chaos(out, arguments.seed, kinds, arguments.count)
        async with beside(chaos.wreak()) as faults:
            log = folder.with_name(f"{folder.name}.log")
            status = await _followed(arguments, chaos, faults, log)
            if faults.done():
                faults.result()  # a failed injection is no verdict on the mesh
        summary = read_json_or_empty(out / "summary.json") | ({"phase": ""} if status else {})
        return verdict({out: summary}, chaos.report, arguments.count, await audit_runs([out]))


async def audit_runs(runs: Iterable[Path]) -> dict[Path, int]:
    """Return the exit status of `meshrl audit` for each run; its output is printed as progress."""
    found = {}
    for out in runs:
        command = (sys.executable, "-m", "meshrl", "audit", str(out), "--json")
        audit = await asyncio.create_subprocess_exec(*command, stdout=sys.stderr)
        async with asyncio.timeout(AUDIT_S):
            found[out] = await audit.wait()
    return found


async def _followed(
    arguments: argparse.Namespace, chaos: Chaos, faults: asyncio.Task[None], log: Path
) -> int:
    """Wait until the run ends and all `faults` are made; return its exit status, or -1 if it
    hangs.
    """
    out = chaos.run_dir
    words = ["run", str(arguments.job), "--set", f"out={out}"]
    for change in arguments.set or []:
        words += ["--set", change]
    try:
        async with asyncio.timeout(RUN_S):
            while True:
                status = await _ran(words, log)
                print_progress(_end_of(log))
                if status != 0 or faults.done():
                    return status
                held = json.loads((out / "job.json").read_text())
                steps = held["document"]["budget"]["steps"] + MORE_STEPS
                words = ["resume", str(out), "--set", f"budget.steps={steps}"]
    except TimeoutError:
        print_progress(_end_of(log))
        return -1


async def _ran(words: list[str], log: Path) -> int:
    """Return the exit status of a command; at its timeout it gets SIGINT, and a minute to exit."""
    with log.open("wb") as stream:
        run = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "meshrl", *words, stdout=stream, stderr=stream
        )
    try:
        return await run.wait()
    except asyncio.CancelledError:
        run.send_signal(signal.SIGINT)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(60.0):
                await run.wait()
        raise


def _end_of(log: Path) -> str:
    return log.read_text()[-6000:]
