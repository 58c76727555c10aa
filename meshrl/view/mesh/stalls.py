"""Diagnosis of stalls: it follows the waits between processes to the one that does not move.

Every process publishes its waits with each renewal of its lease (1.5 s). A process whose renewal is
overdue is stopped, starved or gone. If another process waits for it, directly or through healthy
processes, it is the culprit. A long wait on processes that all renew is followed to its end and
reported too, because a live process that does not answer blocks just as much.

Each stall names its job: a job that waits or is paused is not stalled, and no job is blamed for
what serves another. A stall ends as soon as no process waits. Two waits do not count: the last one
of a process without a lease, and that of a lost process that the planner no longer wants.

The module is pure: the caller supplies entries, pool, jobs and the time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from meshrl.common.api.stats import WorkerStats
from meshrl.common.state.pool.workers.process_names import PLACED_KINDS, role_process_name
from meshrl.common.state.pool.workers.rows import Role
from meshrl.common.state.registry import LEASE_MS, RegistryEntry
from meshrl.view.mesh import overdue
from meshrl.view.mesh.job_progress import describe_position, measure_no_progress_ms
from meshrl.view.mesh.mesh_snapshot import MeshSnapshot
from meshrl.view.mesh.process_usage import find_owner_job

OVERDUE_MS = 3_000  # two renewals missed
LONG_WAIT_MS = 10_000  # nothing in a mesh takes this long but loading and a long generation
SLICE_WAIT_MS = 30_000  # a step of another instance may take longer than any call
ANY_ENGINE = "an engine"  # wait of a shard while its job has no engine
ACQUIRE_SLICE = "acquire_slice"  # request of an instance to its gang's slice scheduler
DISK_WAIT = "disk"  # wait of a process for disk space
QUOTA_WAIT = "quota"  # wait of a trainer while its job's versions have reached their quota
JOB_PREFIX = "job "  # before the name of a job that is the culprit itself
REPORTED_FOR_MS = 60_000  # an expired lease without waiters is reported for this long


@dataclass(frozen=True)
class Stall:
    waiter: str  # "" when no process waits
    culprit: str
    what: str  # the method or resource that is awaited
    since_s: float
    reason: str
    job: str = ""  # the stalled job; empty: the mesh itself, or all jobs
    host: str = ""  # host of the culprit; empty: none, or unknown


def diagnose_stalls(
    mesh: MeshSnapshot, disk_full_reason: str = "", stopped: Collection[str] = ()
) -> list[Stall]:
    """Return every stall of a mesh, the longest first, then other problems.

    These are processes without waiters, and jobs that make no progress, independent of other
    stalls. `disk_full_reason`: which disk is full, and how to recover. `stopped`: processes that a
    signal has stopped, as a kernel reports.
    """
    board = _WaitGraph(mesh, disk_full_reason, stopped)
    stalls: dict[tuple[str, str], Stall] = {}
    unplanned = [
        Stall(
            "planner",
            x.culprit,
            x.action,
            x.since_s,
            x.describe(board.explain_unwell(x.culprit)),
            x.job,
        )
        for x in overdue.find_overdue(mesh)
    ]
    for stall in [*board.find_stalls(), *unplanned]:
        known = stalls.get((stall.waiter, stall.culprit))
        if known is None or known.since_s < stall.since_s:
            stalls[stall.waiter, stall.culprit] = stall
    waited_for = {culprit for _, culprit in stalls}
    unwaited = [*board.find_failing(), *board.find_overdue(), *board.find_stopped()]
    quiet = [stall for stall in unwaited if stall.culprit not in waited_for]
    stalls_by_culprit = {stall.culprit: stall for stall in reversed(quiet)}
    without_progress = [
        Stall(
            "",
            f"{JOB_PREFIX}{job.id}",
            "to make progress",
            since_ms / 1000,
            describe_position(job),
            job.id,
        )
        for job in mesh.jobs
        if (since_ms := measure_no_progress_ms(job, mesh.now_ms))
    ]
    longest_first = sorted(stalls.values(), key=lambda s: -s.since_s)
    every = longest_first + list(reversed(stalls_by_culprit.values())) + without_progress
    return [replace(stall, host=board.find_host(stall.culprit)) for stall in every]


def make_redis_stall(since_s: float, reason: str = "redis does not answer") -> list[Stall]:
    """Return the diagnosis when Redis does not answer or takes no writes.

    Nothing else can be known, and all processes wait for it. `reason`: its own words.
    """
    return [Stall("all processes", "redis", "any command", since_s, reason)]


class _WaitGraph:
    """Graph of waits at one moment."""

    def __init__(self, mesh: MeshSnapshot, disk_full_reason: str, stopped: Collection[str]) -> None:
        self.now_ms = mesh.now_ms
        self.entries = {entry.name: entry for entry in mesh.entries}
        self.last_exits = {end.name: end for end in mesh.last_exits}
        self._disk_full_reason, self._blocked_jobs = (
            disk_full_reason,
            {job.id for job in mesh.jobs if job.block_reason},
        )
        self._stopped = {
            name: (entry.name, since_ms)
            for entry in mesh.entries
            if entry.alive
            for name, since_ms in entry.stats.get("environments_stopped", {}).items()
        } | {
            entry.name: (entry.name, entry.renewed_ms)
            for entry in mesh.entries
            if entry.name in stopped
        }
        self._instances = {resident.id: resident for _, resident in mesh.instances}
        self._desired_processes = {name for _, name in mesh.services} | {
            role_process_name(resident, place)
            for resident in self._instances.values()
            for place in range(len(resident.ranks))
        }

    def find_host(self, name: str) -> str:
        """Return the current or last host of a process."""
        return self.entries[name].host if name in self.entries else ""

    def find_stalls(self) -> Iterator[Stall]:
        for entry in self.entries.values():
            if not entry.alive:
                continue  # that waiter waits no more, or is back and reports it itself
            if self._find_job(entry.name) in self._blocked_jobs:
                continue  # its own waits do not change while it is stalled
            for wait in entry.waits:
                yield from self._follow_wait(entry.name, wait)

    def find_overdue(self) -> Iterator[Stall]:
        """Yield processes with overdue renewals, with or without waiters."""
        for entry in self.entries.values():
            age = self.now_ms - entry.renewed_ms
            is_lost = entry.kind in PLACED_KINDS and not entry.alive
            # something else does its work
            replaced = is_lost and entry.name not in self._desired_processes
            if OVERDUE_MS < age < REPORTED_FOR_MS and not _has_left(entry) and not replaced:
                reason = f"{self.explain_unwell(entry.name)}; overdue, but no process waits for it"
                yield Stall(
                    "", entry.name, "its lease", age / 1000, reason, self._find_job(entry.name)
                )

    def find_stopped(self) -> Iterator[Stall]:
        """Yield processes that a signal has stopped.

        Shards report their environments, which have no lease; the kernel reports others, also when
        a replacement already does their work.
        """
        for name, (process, since_ms) in self._stopped.items():
            if (job := self._find_job(process)) not in self._blocked_jobs:
                reason = f"{self.explain_unwell(name)}; no process waits for it"
                yield Stall("", name, "to run", (self.now_ms - since_ms) / 1000, reason, job)

    def find_failing(self) -> Iterator[Stall]:
        """Yield processes that errors end repeatedly, or have ended for good."""
        for end in self.last_exits.values():
            entry, age = self.entries.get(end.name), self.now_ms - end.at_ms
            there = entry is not None and entry.alive
            if age < REPORTED_FOR_MS and end.error.get("type") and not (there and end.times == 1):
                reason = (
                    f"it has exited {_format_times(end.times)}, the last time with "
                    f"{end.description}"
                )
                yield Stall("", end.name, "to keep running", age / 1000, reason, end.job)

    def explain_unwell(self, name: str) -> str:
        """Return why a process cannot be expected to answer; empty when it renews (or is no
        process).
        """
        if name == DISK_WAIT:
            return self._disk_full_reason or (
                "a disk is full. Free disk space there: the process continues on its own"
            )
        if name == QUOTA_WAIT:
            return (
                "its versions have reached weights.quota_gb. Run `meshrl weights list RUN`, "
                "then unpin versions or raise the quota; training continues on its own"
            )
        entry = self.entries.get(name)
        if entry is None:
            end = self.last_exits.get(name)  # before it came
            exit_text = (
                f"{name} has exited {_format_times(end.times)}: {end.description}"
                if end is not None
                else ""
            )
            return self._explain_stop(name) or exit_text
        age = self.now_ms - entry.renewed_ms
        if _has_left(entry):
            gone_s = (self.now_ms - entry.expires_ms) / 1000
            why = self.last_exits[name].description if name in self.last_exits else ""
            why = f": {why}" if why else ""
            return f"{name} exited {gone_s:.1f} s ago and has not restarted{why}"
        if not entry.alive:
            return (
                f"{name}{self._format_host(entry)} lost its lease; last renewed "
                f"{age / 1000:.1f} s ago"
            )
        if age > OVERDUE_MS:
            return (
                f"{name}{self._format_host(entry)} has not renewed its lease for {age / 1000:.1f} s"
            )
        if stop := self._explain_stop(name):
            return stop
        still_ms = float(entry.stats.get("loop_lag_ms", 0.0))
        if still_ms > OVERDUE_MS:
            return (
                f"{name} renews its lease, but its event loop has been blocked for "
                f"{still_ms / 1000:.1f} s"
            )
        return ""

    def _explain_stop(self, name: str) -> str:
        """Return since when a signal has stopped a process; empty if none has."""
        if name not in self._stopped:
            return ""
        since_s = (self.now_ms - self._stopped[name][1]) / 1000
        return f"{name} has been stopped by a signal for {since_s:.1f} s"

    def _format_host(self, entry: RegistryEntry) -> str:
        """Return the host as a suffix, if there are several hosts."""
        others = any(one.host != entry.host for one in self.entries.values() if one.alive)
        return f" on {entry.host}" if entry.host and others else ""

    def _find_job(self, name: str) -> str:
        """Return the job that a process works for alone; empty for others."""
        entry = self.entries.get(name)
        resident = self._instances.get(name.partition("/")[2])
        return (find_owner_job(entry) if entry is not None else "") or (
            resident.job if resident else ""
        )

    def _resolve_wait(self, wait: Mapping[str, Any], waiter: str) -> str:
        """Return the process that blocks the wait.

        That is the owner of the requested time slice, or one of the same job that must serve, where
        any would do.
        """
        on = str(wait["on"])
        if wait["what"] == ACQUIRE_SLICE and on in self.entries and not self.explain_unwell(on):
            holders = WorkerStats.decode(self.entries[on].stats).slice_holders
            found = (self._instances.get(holder) for holder in holders)
            names = [role_process_name(resident) for resident in found if resident is not None]
            return next((name for name in names if name != waiter), on)
        if on != ANY_ENGINE:
            return on
        job = self._find_job(waiter)
        engines = (
            r for r in self._instances.values() if r.role == Role.ROLLOUT and not r.is_reconciled
        )
        names = sorted(role_process_name(r) for r in engines if job in ("", r.job))
        return next((name for name in names if self.explain_unwell(name)), next(iter(names), on))

    def _follow_wait(self, waiter: str, wait: dict[str, Any]) -> Iterator[Stall]:
        since_s = (self.now_ms - wait["since_ms"]) / 1000
        wait = wait | {"on": self._resolve_wait(wait, waiter)}
        job = self._find_job(waiter)
        chain = self._find_unwell_chain(wait["on"], [waiter])
        if chain:
            culprit = chain[-1]
            end = self.explain_unwell(culprit)
            yield Stall(waiter, culprit, wait["what"], since_s, _format_chain(chain, end), job)
            return
        if since_s * 1000 > self._wait_limit_ms(wait):
            chain, circle = self._follow_oldest_waits(wait["on"], [waiter])
            culprit = chain[-1]
            end = (
                "deadlock: these processes wait for each other"
                if circle
                else f"{culprit} renews its lease but does not answer"
            )
            if culprit not in self.entries:
                is_name = " " not in culprit or culprit == ANY_ENGINE  # other causes are in words
                end = f"{culprit} has not started" if is_name else "it has not finished yet"
            if (
                wait["what"] == ACQUIRE_SLICE
                and culprit == wait["on"]
                and not culprit.startswith("worker/")
            ):
                end = f"{culprit} holds the time slice and has not released it"
            yield Stall(waiter, culprit, wait["what"], since_s, _format_chain(chain, end), job)

    def _find_unwell_chain(self, name: str, path: list[str]) -> list[str]:
        """Return the shortest chain of waits from `path` through `name` to an unwell process, or
        [].
        """
        fringe, visited = [[*path, name]], set(path)
        while fringe:
            chain = fringe.pop(0)
            last = chain[-1]
            if last in visited:
                continue
            visited.add(last)
            if self.explain_unwell(last):
                return chain
            if last in self.entries:
                waits = self.entries[last].waits
                fringe.extend([*chain, self._resolve_wait(wait, last)] for wait in waits)
        return []

    def _follow_oldest_waits(self, name: str, path: list[str]) -> tuple[list[str], bool]:
        """Return the chain along each process's oldest long wait; True when it closes on itself."""
        chain = [*path, name]
        while (entry := self.entries.get(chain[-1])) is not None:
            long = [w for w in entry.waits if self.now_ms - w["since_ms"] > self._wait_limit_ms(w)]
            if not long:
                break
            following = self._resolve_wait(min(long, key=lambda w: w["since_ms"]), chain[-1])
            if following in chain:
                return chain, True
            chain.append(following)
        return chain, False

    def _wait_limit_ms(self, wait: dict[str, Any]) -> int:
        """Return the milliseconds up to which a wait is normal."""
        if wait["what"] == ACQUIRE_SLICE:
            return SLICE_WAIT_MS
        return LONG_WAIT_MS if wait["on"] in self.entries else OVERDUE_MS


def _format_times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _has_left(entry: RegistryEntry) -> bool:
    """Return True if its lease was released or evicted; one that lapses ends a full term later."""
    return not entry.alive and entry.expires_ms - entry.renewed_ms < LEASE_MS


def _format_chain(chain: list[str], finding: str) -> str:
    """Return `finding`, with the processes between waiter and culprit when there are any."""
    return f"{finding} (through {' -> '.join(chain[1:-1])})" if len(chain) > 2 else finding
