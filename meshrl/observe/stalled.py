"""Diagnoses stalls: it follows who waits for whom to the process that does not move.

Every process publishes what it waits for with each renewal of its lease (1.5 s). A process whose
renewal is overdue is stopped, starved or gone; if someone waits for it, directly or through others
that are well, it is the culprit. A long wait on processes that all renew is followed to its end and
named too, because a live process that does not answer is just as much in the way. Pure: the caller
supplies entries, gangs and the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from common.state.registry import LEASE_MS
from meshrl.observe.quiet import quiet_jobs, told

if TYPE_CHECKING:
    from common.state.ended import Ended
    from common.state.gangs import Gang
    from common.state.jobs import JobRow
    from common.state.registry import Entry

OVERDUE_MS = 3_000  # two renewals missed
LONG_WAIT_MS = 10_000  # nothing in a mesh takes this long but loading and a long generation
SETTLE_MS = 30_000  # a gang that has not reached its role by then is stuck; loading renews this
ANY_ENGINE = "an engine"  # what a shard waits for while none of its job is there
ROLLOUT = "rollout"  # the role of gangs that engines serve
DISK = "disk"  # what a process waits for while there is no room
JOB_WORD = "job "  # before the name of a job that is the culprit itself
REMEMBER_MS = 60_000  # an expired lease that nobody waits for is news for this long


@dataclass(frozen=True)
class Stall:
    waiter: str  # "" when nobody waits
    culprit: str
    what: str  # the method or thing that is waited for
    since_s: float
    reason: str


def diagnose(
    entries: Sequence[Entry],
    gangs: Sequence[Gang],
    now_ms: float,
    ended: Sequence[Ended] = (),
    jobs: Sequence[JobRow] = (),
    full: str = "",
) -> list[Stall]:
    """Every stall of a mesh, the longest first; then processes that nobody waits for, and jobs that
    make no progress, whatever else is said.

    `ended`: the last ends of processes, which say why one is not there. `full`: which disk is full,
    and what to do.
    """
    board = _Board(entries, now_ms, ended, gangs, full)
    stalls: dict[tuple[str, str], Stall] = {}
    for stall in [*board.stalls(), *_unsettled(gangs, now_ms, board.ended)]:
        known = stalls.get((stall.waiter, stall.culprit))
        if known is None or known.since_s < stall.since_s:
            stalls[stall.waiter, stall.culprit] = stall
    waited_for = {culprit for _, culprit in stalls}
    quiet = [s for s in [*board.failing(), *board.overdue()] if s.culprit not in waited_for]
    once = {stall.culprit: stall for stall in reversed(quiet)}
    without_progress = [
        Stall("", f"{JOB_WORD}{job.id}", "to make progress", since_ms / 1000, told(job))
        for job, since_ms in quiet_jobs(jobs, now_ms)
    ]
    longest_first = sorted(stalls.values(), key=lambda s: -s.since_s)
    return longest_first + list(reversed(once.values())) + without_progress


def redis_silent(since_s: float, why: str = "redis does not answer") -> list[Stall]:
    """The diagnosis when Redis does not answer, or takes no writes: nothing else can be known, all
    wait for it. `why`: in its own words.
    """
    return [Stall("everyone", "redis", "any command", since_s, why)]


class _Board:
    """The graph of waits of one moment."""

    def __init__(
        self,
        entries: Sequence[Entry],
        now_ms: float,
        ended: Sequence[Ended],
        gangs: Sequence[Gang],
        full: str,
    ) -> None:
        self.now_ms = now_ms
        self.entries = {entry.name: entry for entry in entries}
        self.ended = {end.name: end for end in ended}
        self._gangs, self._full = gangs, full

    def stalls(self) -> Iterator[Stall]:
        for entry in self.entries.values():
            if not entry.alive and self.now_ms - entry.expires_ms > REMEMBER_MS:
                continue
            for wait in entry.waits:
                yield from self._follow(entry.name, wait)

    def overdue(self) -> Iterator[Stall]:
        """Processes that should have renewed, whether or not anyone waits for them."""
        for entry in self.entries.values():
            age = self.now_ms - entry.renewed_ms
            if OVERDUE_MS < age < REMEMBER_MS and not _left(entry):
                reason = f"{self._unwell(entry.name)}; overdue, nobody waits"
                yield Stall("", entry.name, "its lease", age / 1000, reason)

    def failing(self) -> Iterator[Stall]:
        """Processes that errors end again and again, or have ended for good."""
        for end in self.ended.values():
            entry, age = self.entries.get(end.name), self.now_ms - end.at_ms
            there = entry is not None and entry.alive
            if age < REMEMBER_MS and end.error.get("type") and not (there and end.times == 1):
                reason = f"it has ended {_times(end.times)}, the last time by {end.told}"
                yield Stall("", end.name, "to stay up", age / 1000, reason)

    def _unwell(self, name: str) -> str:
        """Why a process cannot be expected to answer; empty when it renews (or is no process)."""
        if name == DISK:
            return self._full or "a disk is full. Make room there: it goes on by itself"
        entry = self.entries.get(name)
        if entry is None:
            return self._missing(name)
        age = self.now_ms - entry.renewed_ms
        if _left(entry):
            gone_s = (self.now_ms - entry.expires_ms) / 1000
            why = self.ended[name].told if name in self.ended else ""
            why = f": {why}" if why else ""
            return f"{name} ended {gone_s:.1f} s ago and is not back{why}"
        if not entry.alive:
            return f"{name} lost its lease; last renewed {age / 1000:.1f} s ago"
        if age > OVERDUE_MS:
            return f"{name} has not renewed its lease for {age / 1000:.1f} s"
        still_ms = float(entry.stats.get("loop_lag_ms", 0.0))
        if still_ms > OVERDUE_MS:
            return f"{name} renews, but its event loop has stood still for {still_ms / 1000:.1f} s"
        return ""

    def _missing(self, name: str) -> str:
        """Why one is not there that has ended before it came."""
        end = self.ended.get(name)
        return f"{name} has ended {_times(end.times)}: {end.told}" if end is not None else ""

    def _meant(self, on: str) -> str:
        """The process that is waited for; one that is to serve where any would do."""
        if on != ANY_ENGINE:
            return on
        wanted = [g.id for g in self._gangs if g.desired_role == ROLLOUT and not g.settled]
        names = sorted(f"engine/{gang}" for gang in wanted)
        return next((name for name in names if self._unwell(name)), next(iter(names), on))

    def _follow(self, waiter: str, wait: dict[str, Any]) -> Iterator[Stall]:
        since_s = (self.now_ms - wait["since_ms"]) / 1000
        wait = wait | {"on": self._meant(wait["on"])}
        chain = self._to_unwell(wait["on"], [waiter])
        if chain:
            culprit = chain[-1]
            yield Stall(waiter, culprit, wait["what"], since_s, _told(chain, self._unwell(culprit)))
            return
        if since_s * 1000 > self._limit_ms(wait):
            chain, circle = self._oldest_chain(wait["on"], [waiter])
            culprit = chain[-1]
            end = "they wait in a circle" if circle else f"{culprit} renews but does not answer"
            if culprit not in self.entries:
                end = f"{culprit} has not come" if _is_name(culprit) else "it has not ended yet"
            yield Stall(waiter, culprit, wait["what"], since_s, _told(chain, end))

    def _to_unwell(self, name: str, path: list[str]) -> list[str]:
        """The shortest chain of waits from `path` through `name` to an unwell process, or []."""
        fringe, seen = [[*path, name]], set(path)
        while fringe:
            chain = fringe.pop(0)
            last = chain[-1]
            if last in seen:
                continue
            seen.add(last)
            if self._unwell(last):
                return chain
            if last in self.entries:
                waits = self.entries[last].waits
                fringe.extend([*chain, self._meant(wait["on"])] for wait in waits)
        return []

    def _oldest_chain(self, name: str, path: list[str]) -> tuple[list[str], bool]:
        """The chain along each process's oldest long wait; True when it closes on itself."""
        chain = [*path, name]
        while (entry := self.entries.get(chain[-1])) is not None:
            long = [w for w in entry.waits if self.now_ms - w["since_ms"] > self._limit_ms(w)]
            if not long:
                break
            following = self._meant(min(long, key=lambda w: w["since_ms"])["on"])
            if following in chain:
                return chain, True
            chain.append(following)
        return chain, False

    def _limit_ms(self, wait: dict[str, Any]) -> int:
        """How long a wait is no news."""
        return LONG_WAIT_MS if wait["on"] in self.entries else OVERDUE_MS


def _is_name(culprit: str) -> bool:
    """Whether it is a process of the mesh; other causes are said in words."""
    return " " not in culprit or culprit == ANY_ENGINE


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _left(entry: Entry) -> bool:
    """Whether its lease was given back or evicted; one that lapses ends a full term later."""
    return not entry.alive and entry.expires_ms - entry.renewed_ms < LEASE_MS


def _told(chain: list[str], end: str) -> str:
    """`end`, with the processes between waiter and culprit when there are any."""
    return f"{end} (through {' -> '.join(chain[1:-1])})" if len(chain) > 2 else end


def _unsettled(gangs: Sequence[Gang], now_ms: float, ended: Mapping[str, Ended]) -> Iterator[Stall]:
    """Gangs that do not come to their role: late, or because their process fails."""
    for gang in gangs:
        age = now_ms - gang.changed_ms
        failed = gang.detail if gang.actual_epoch == gang.epoch else ""
        name = failed.split(" ")[0].rstrip(":")
        if not gang.settled and name in ended:
            what = f"gang {gang.id} to become {gang.desired_role}"
            yield Stall("planner", name, what, age / 1000, failed)
        elif not gang.settled and age > SETTLE_MS:
            yield Stall(
                waiter="planner",
                culprit=f"worker/{gang.id}",
                what=f"gang {gang.id} to become {gang.desired_role}",
                since_s=age / 1000,
                reason=f"it is {gang.actual_role} ({gang.actual_state}) since {age / 1000:.0f} s",
            )
