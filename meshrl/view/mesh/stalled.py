"""Diagnoses stalls: it follows who waits for whom to the process that does not move.

Every process publishes what it waits for with each renewal of its lease (1.5 s). A process whose
renewal is overdue is stopped, starved or gone; if someone waits for it, directly or through others
that are well, it is the culprit. A long wait on processes that all renew is followed to its end and
named too, because a live process that does not answer is just as much in the way. Each stall says
of which job it is: one that waits or is paused is not stalled, and none is blamed for what serves
another. A stall is over as soon as nobody waits: what a process without a lease waited for last,
and a process that is lost and that the planner wants no more, are none. Pure: the caller supplies
entries, pool, jobs and the time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from meshrl.common.api.stats import WorkerStats
from meshrl.common.state.pool.workers.names import PLACED, role_process
from meshrl.common.state.pool.workers.rows import Role
from meshrl.common.state.registry import LEASE_MS, Entry
from meshrl.view.mesh import planned
from meshrl.view.mesh.processes import owner
from meshrl.view.mesh.quiet import quiet_ms, told
from meshrl.view.mesh.snapshot import MeshSnapshot

OVERDUE_MS = 3_000  # two renewals missed
LONG_WAIT_MS = 10_000  # nothing in a mesh takes this long but loading and a long generation
TURN_MS = 30_000  # a step of another resident may take longer than any call does
ANY_ENGINE = "an engine"  # what a shard waits for while none of its job is there
TURN = "take_turn"  # what a resident asks the keeper of its gang's turns
DISK = "disk"  # what a process waits for while there is no room
QUOTA = "quota"  # what a trainer waits for while its job's versions have as many bytes as they may
JOB_WORD = "job "  # before the name of a job that is the culprit itself
REMEMBER_MS = 60_000  # an expired lease that nobody waits for is news for this long


@dataclass(frozen=True)
class Stall:
    waiter: str  # "" when nobody waits
    culprit: str
    what: str  # the method or thing that is waited for
    since_s: float
    reason: str
    job: str = ""  # that stands still by it; empty: the mesh's own, or all
    host: str = ""  # of the culprit; empty: it is none that has one, or is not known


def diagnose(mesh: MeshSnapshot, full: str = "", stopped: Collection[str] = ()) -> list[Stall]:
    """Every stall of a mesh, the longest first; then processes that nobody waits for, and jobs that
    make no progress, whatever else is said.

    `full`: which disk is full, and what to do. `stopped`: processes that a signal has stopped, as a
    kernel says.
    """
    board = _Board(mesh, full, stopped)
    stalls: dict[tuple[str, str], Stall] = {}
    unplanned = [
        Stall("planner", x.culprit, x.what, x.since_s, x.said(board.unwell(x.culprit)), x.job)
        for x in planned.late(mesh)
    ]
    for stall in [*board.stalls(), *unplanned]:
        known = stalls.get((stall.waiter, stall.culprit))
        if known is None or known.since_s < stall.since_s:
            stalls[stall.waiter, stall.culprit] = stall
    waited_for = {culprit for _, culprit in stalls}
    unwaited = [*board.failing(), *board.overdue(), *board.stopped()]
    quiet = [stall for stall in unwaited if stall.culprit not in waited_for]
    once = {stall.culprit: stall for stall in reversed(quiet)}
    without_progress = [
        Stall("", f"{JOB_WORD}{job.id}", "to make progress", since_ms / 1000, told(job), job.id)
        for job in mesh.jobs
        if (since_ms := quiet_ms(job, mesh.now_ms))
    ]
    longest_first = sorted(stalls.values(), key=lambda s: -s.since_s)
    every = longest_first + list(reversed(once.values())) + without_progress
    return [replace(stall, host=board.host(stall.culprit)) for stall in every]


def redis_silent(since_s: float, why: str = "redis does not answer") -> list[Stall]:
    """The diagnosis when Redis does not answer, or takes no writes: nothing else can be known, all
    wait for it. `why`: in its own words.
    """
    return [Stall("everyone", "redis", "any command", since_s, why)]


class _Board:
    """The graph of waits of one moment."""

    def __init__(self, mesh: MeshSnapshot, full: str, stopped: Collection[str]) -> None:
        self.now_ms = mesh.now_ms
        self.entries = {entry.name: entry for entry in mesh.entries}
        self.ended = {end.name: end for end in mesh.ended}
        self._full, self._held = full, {job.id for job in mesh.jobs if job.held}
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
        self._residents = {resident.id: resident for _, resident in mesh.residents}
        self._wanted = {name for _, name in mesh.services} | {
            role_process(resident, place)
            for resident in self._residents.values()
            for place in range(len(resident.ranks))
        }

    def host(self, name: str) -> str:
        """Where a process is, or was last."""
        return self.entries[name].host if name in self.entries else ""

    def stalls(self) -> Iterator[Stall]:
        for entry in self.entries.values():
            if not entry.alive:
                continue  # who waited then waits no more, or has come back and says so itself
            if self._job_of(entry.name) in self._held:
                continue  # its waits stand still with it
            for wait in entry.waits:
                yield from self._follow(entry.name, wait)

    def overdue(self) -> Iterator[Stall]:
        """Processes that should have renewed, whether or not anyone waits for them."""
        for entry in self.entries.values():
            age = self.now_ms - entry.renewed_ms
            lost = entry.kind in PLACED and not entry.alive
            replaced = lost and entry.name not in self._wanted  # something else does its work
            if OVERDUE_MS < age < REMEMBER_MS and not _left(entry) and not replaced:
                reason = f"{self.unwell(entry.name)}; overdue, nobody waits"
                yield Stall(
                    "", entry.name, "its lease", age / 1000, reason, self._job_of(entry.name)
                )

    def stopped(self) -> Iterator[Stall]:
        """Processes that a signal has stopped: environments, which have no lease, as their shards
        report, and others as the kernel says, also when something else does their work by now.
        """
        for name, (process, since_ms) in self._stopped.items():
            if (job := self._job_of(process)) not in self._held:
                reason = f"{self.unwell(name)}; nobody waits"
                yield Stall("", name, "to run", (self.now_ms - since_ms) / 1000, reason, job)

    def failing(self) -> Iterator[Stall]:
        """Processes that errors end again and again, or have ended for good."""
        for end in self.ended.values():
            entry, age = self.entries.get(end.name), self.now_ms - end.at_ms
            there = entry is not None and entry.alive
            if age < REMEMBER_MS and end.error.get("type") and not (there and end.times == 1):
                reason = f"it has ended {_times(end.times)}, the last time by {end.told}"
                yield Stall("", end.name, "to stay up", age / 1000, reason, end.job)

    def unwell(self, name: str) -> str:
        """Why a process cannot be expected to answer; empty when it renews (or is no process)."""
        if name == DISK:
            return self._full or "a disk is full. Make room there: it goes on by itself"
        if name == QUOTA:
            return (
                "its versions have reached weights.quota_gb. `meshrl weights list RUN` says what "
                "stays and why: unpin some, or raise it; it goes on by itself"
            )
        entry = self.entries.get(name)
        if entry is None:
            end = self.ended.get(name)  # before it came
            gone = f"{name} has ended {_times(end.times)}: {end.told}" if end is not None else ""
            return self._stop_of(name) or gone
        age = self.now_ms - entry.renewed_ms
        if _left(entry):
            gone_s = (self.now_ms - entry.expires_ms) / 1000
            why = self.ended[name].told if name in self.ended else ""
            why = f": {why}" if why else ""
            return f"{name} ended {gone_s:.1f} s ago and is not back{why}"
        if not entry.alive:
            return f"{name}{self._at(entry)} lost its lease; last renewed {age / 1000:.1f} s ago"
        if age > OVERDUE_MS:
            return f"{name}{self._at(entry)} has not renewed its lease for {age / 1000:.1f} s"
        if stop := self._stop_of(name):
            return stop
        still_ms = float(entry.stats.get("loop_lag_ms", 0.0))
        if still_ms > OVERDUE_MS:
            return f"{name} renews, but its event loop has stood still for {still_ms / 1000:.1f} s"
        return ""

    def _stop_of(self, name: str) -> str:
        """Since when a signal has stopped a process; empty if none has."""
        if name not in self._stopped:
            return ""
        since_s = (self.now_ms - self._stopped[name][1]) / 1000
        return f"{name} has been stopped by a signal for {since_s:.1f} s"

    def _at(self, entry: Entry) -> str:
        """On which host, where there are several."""
        others = any(one.host != entry.host for one in self.entries.values() if one.alive)
        return f" on {entry.host}" if entry.host and others else ""

    def _job_of(self, name: str) -> str:
        """The job that a process works for alone; empty for others."""
        entry = self.entries.get(name)
        resident = self._residents.get(name.partition("/")[2])
        return (owner(entry) if entry is not None else "") or (resident.job if resident else "")

    def _meant(self, wait: Mapping[str, Any], waiter: str) -> str:
        """The process that is waited for: who has the turn that is asked for; one of the same job
        that is to serve, where any would do.
        """
        on = str(wait["on"])
        if wait["what"] == TURN and on in self.entries and not self.unwell(on):
            holders = WorkerStats.of(self.entries[on].stats).turn_of
            found = (self._residents.get(holder) for holder in holders)
            names = [role_process(resident) for resident in found if resident is not None]
            return next((name for name in names if name != waiter), on)
        if on != ANY_ENGINE:
            return on
        job = self._job_of(waiter)
        wanted = (r for r in self._residents.values() if r.role == Role.ROLLOUT and not r.settled)
        names = sorted(role_process(r) for r in wanted if job in ("", r.job))
        return next((name for name in names if self.unwell(name)), next(iter(names), on))

    def _follow(self, waiter: str, wait: dict[str, Any]) -> Iterator[Stall]:
        since_s = (self.now_ms - wait["since_ms"]) / 1000
        wait = wait | {"on": self._meant(wait, waiter)}
        job = self._job_of(waiter)
        chain = self._tounwell(wait["on"], [waiter])
        if chain:
            culprit = chain[-1]
            end = self.unwell(culprit)
            yield Stall(waiter, culprit, wait["what"], since_s, _told(chain, end), job)
            return
        if since_s * 1000 > self._limit_ms(wait):
            chain, circle = self._oldest_chain(wait["on"], [waiter])
            culprit = chain[-1]
            end = "they wait in a circle" if circle else f"{culprit} renews but does not answer"
            if culprit not in self.entries:
                is_name = " " not in culprit or culprit == ANY_ENGINE  # other causes are in words
                end = f"{culprit} has not come" if is_name else "it has not ended yet"
            if wait["what"] == TURN and culprit == wait["on"] and not culprit.startswith("worker/"):
                end = f"{culprit} has the turn and has not given it back"
            yield Stall(waiter, culprit, wait["what"], since_s, _told(chain, end), job)

    def _tounwell(self, name: str, path: list[str]) -> list[str]:
        """The shortest chain of waits from `path` through `name` to an unwell process, or []."""
        fringe, seen = [[*path, name]], set(path)
        while fringe:
            chain = fringe.pop(0)
            last = chain[-1]
            if last in seen:
                continue
            seen.add(last)
            if self.unwell(last):
                return chain
            if last in self.entries:
                waits = self.entries[last].waits
                fringe.extend([*chain, self._meant(wait, last)] for wait in waits)
        return []

    def _oldest_chain(self, name: str, path: list[str]) -> tuple[list[str], bool]:
        """The chain along each process's oldest long wait; True when it closes on itself."""
        chain = [*path, name]
        while (entry := self.entries.get(chain[-1])) is not None:
            long = [w for w in entry.waits if self.now_ms - w["since_ms"] > self._limit_ms(w)]
            if not long:
                break
            following = self._meant(min(long, key=lambda w: w["since_ms"]), chain[-1])
            if following in chain:
                return chain, True
            chain.append(following)
        return chain, False

    def _limit_ms(self, wait: dict[str, Any]) -> int:
        """How long a wait is no news."""
        if wait["what"] == TURN:
            return TURN_MS
        return LONG_WAIT_MS if wait["on"] in self.entries else OVERDUE_MS


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _left(entry: Entry) -> bool:
    """Whether its lease was given back or evicted; one that lapses ends a full term later."""
    return not entry.alive and entry.expires_ms - entry.renewed_ms < LEASE_MS


def _told(chain: list[str], end: str) -> str:
    """`end`, with the processes between waiter and culprit when there are any."""
    return f"{end} (through {' -> '.join(chain[1:-1])})" if len(chain) > 2 else end
