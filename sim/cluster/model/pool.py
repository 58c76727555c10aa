"""The pool as the planner's decisions change it: what a look decides, the next one finds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from meshrl.common.base.errors import ConfigError
from meshrl.common.state.pool.demand.needs import PlannedJob
from meshrl.common.state.pool.placing.decisions import (
    Admit,
    Decision,
    Dissolve,
    FinishMove,
    Form,
    Place,
    Remove,
    Serve,
)
from meshrl.common.state.pool.placing.snapshot import Move, PoolHost, Snapshot
from meshrl.common.state.pool.workers.rows import Doing, Gang, Report, Resident, Role, WorkerRow
from meshrl.common.state.pool.workers.settings import PoolSettings


@dataclass
class SimPool:
    """Workers, gangs and hosts of a simulated cluster."""

    workers: tuple[WorkerRow, ...]
    hosts: dict[str, PoolHost]
    settings: PoolSettings = field(default_factory=PoolSettings)
    gangs: dict[str, Gang] = field(default_factory=dict)
    moves: dict[str, Move] = field(default_factory=dict)
    held: dict[str, str] = field(default_factory=dict)  # by job
    formed: int = 0  # gangs so far
    away: set[str] = field(default_factory=set)  # hosts

    def snapshot(self, now_s: float, jobs: Iterable[PlannedJob]) -> Snapshot:
        where = {worker: gang.id for gang in self.gangs.values() for worker in gang.workers}
        away = self.away
        self.workers = tuple(
            worker
            if worker.gang == (gang := where.get(worker.id, ""))
            and worker.alive == (worker.host not in away)
            else replace(worker, gang=gang, alive=worker.host not in away)
            for worker in self.workers
        )
        return Snapshot(
            now_ms=round(1000 * now_s),
            workers=self.workers,
            gangs=tuple(self.gangs.values()),
            jobs=tuple(replace(job, held=self.held.get(job.id, "")) for job in jobs),
            hosts=tuple(self.hosts.values()),
            moves=tuple(self.moves.values()),
            settings=self.settings,
            gangs_formed=self.formed,
            up_ms=-round(1000 * self.settings.gather_s),
        )

    def apply(self, decisions: Iterable[Decision], now_s: float) -> list[tuple[str, Resident]]:
        """Does what was decided at this time; residents, each with its gang, that are to do
        something else than before.
        """
        begin: dict[str, tuple[str, Resident]] = {}
        for decision in decisions:
            match decision:
                case Form(gang, workers):
                    self.gangs[gang] = Gang(gang, workers, 1, (), round(1000 * now_s))
                    self.formed += 1
                case Dissolve(gang):
                    del self.gangs[gang]
                case Place(gang, resident, move=move):
                    there = self.gangs[gang]
                    new = resident.id not in {r.id for r in there.residents}
                    self._put(replace(there, placed=there.placed + new), resident)
                    begin[resident.id] = gang, resident
                    if move is not None:
                        self.moves[resident.id] = move
                case Remove(gang, resident_id):
                    there = self.gangs[gang]
                    kept = tuple(r for r in there.residents if r.id != resident_id)
                    self.gangs[gang] = replace(there, residents=kept)
                    begin.pop(resident_id, None)
                    self.moves.pop(resident_id, None)
                case FinishMove(move):
                    self.moves.pop(move.id, None)
                case Admit(job, held):
                    self.held[job] = held
                case Serve(host, services):
                    self.hosts[host] = replace(self.hosts[host], services=services)
                case _:
                    pass
        return list(begin.values())

    def seat(self, job: str, degree: int) -> tuple[str, Resident]:
        """A gang of so many workers of one host that nobody has, and an engine on it; ConfigError
        when no host has them.
        """
        taken = {worker for gang in self.gangs.values() for worker in gang.workers}
        for host in self.hosts:
            free = [w.id for w in self.workers if w.host == host and w.id not in taken][:degree]
            if len(free) == degree:
                gang, ranks = f"g{self.formed}", tuple(range(degree))
                resident = Resident(f"{gang}.0", job, Role.ROLLOUT, ranks=ranks)
                self.gangs[gang] = Gang(gang, tuple(free), 1, (resident,), placed=1)
                self.formed += 1
                return gang, resident
        raise ConfigError(f"no host has {degree} accelerators left for an engine of job {job}")

    def fail(self, host: str) -> list[str]:
        """A host is away; the residents that it takes along."""
        self.away.add(host)
        self.hosts[host] = replace(self.hosts[host], alive=False)
        return [resident.id for _, resident in self._on(host)]

    def back(self, host: str) -> list[tuple[str, Resident]]:
        """A host is there again; residents, each with its gang, that begin there anew."""
        self.away.discard(host)
        self.hosts[host] = replace(self.hosts[host], alive=True)
        return self._on(host)

    def _on(self, host: str) -> list[tuple[str, Resident]]:
        there = {worker.id for worker in self.workers if worker.host == host}
        return [
            (gang.id, resident)
            for gang in self.gangs.values()
            for resident in gang.residents
            if any(gang.workers[rank] in there for rank in resident.ranks)
        ]

    def done(self, gang_id: str, wished: Resident) -> bool:
        """A resident does what was wished; False where something else is wished by now."""
        gang = self.gangs.get(gang_id)
        there = {r.id: r for r in gang.residents} if gang is not None else {}
        now = there.get(wished.id)
        if gang is None or now is None or now.epoch != wished.epoch:
            return False
        if any(one.id == now.id for host in self.away for _, one in self._on(host)):
            return False
        reports = {
            rank: Report(rank, now.generation, now.epoch, 1, Doing.READY, now.tier)
            for rank in now.ranks
        }
        self._put(gang, replace(now, reports=reports))
        return True

    def _put(self, gang: Gang, resident: Resident) -> None:
        there = {r.id: r for r in gang.residents} | {resident.id: resident}
        self.gangs[gang.id] = replace(gang, residents=tuple(there.values()))
