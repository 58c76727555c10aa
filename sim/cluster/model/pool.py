"""Pool state under the planner's decisions: the next snapshot contains the effects of each pass."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from meshrl.common.base.errors import ConfigError
from meshrl.common.state.pool.demand.requirements import PlannedJob
from meshrl.common.state.pool.scheduling.decisions import (
    AssignServices,
    Decision,
    DissolveGang,
    FinishMove,
    FormGang,
    PlaceInstance,
    RemoveInstance,
    SetBlockReason,
)
from meshrl.common.state.pool.scheduling.snapshot import Move, PoolHost, PoolSnapshot
from meshrl.common.state.pool.workers.rows import (
    Gang,
    Instance,
    InstancePhase,
    InstanceReport,
    Role,
    WorkerRow,
)
from meshrl.common.state.pool.workers.settings import PoolSettings


@dataclass
class SimPool:
    """Workers, gangs and hosts of a simulated cluster."""

    workers: tuple[WorkerRow, ...]
    hosts: dict[str, PoolHost]
    settings: PoolSettings = field(default_factory=PoolSettings)
    gangs: dict[str, Gang] = field(default_factory=dict)
    moves: dict[str, Move] = field(default_factory=dict)
    block_reasons: dict[str, str] = field(default_factory=dict)  # by job
    gangs_formed: int = 0  # gangs so far
    offline_hosts: set[str] = field(default_factory=set)  # hosts

    def read_snapshot(self, now_s: float, jobs: Iterable[PlannedJob]) -> PoolSnapshot:
        where = {worker: gang.id for gang in self.gangs.values() for worker in gang.workers}
        away = self.offline_hosts
        self.workers = tuple(
            worker
            if worker.gang == (gang := where.get(worker.id, ""))
            and worker.alive == (worker.host not in away)
            else replace(worker, gang=gang, alive=worker.host not in away)
            for worker in self.workers
        )
        return PoolSnapshot(
            now_ms=round(1000 * now_s),
            workers=self.workers,
            gangs=tuple(self.gangs.values()),
            jobs=tuple(
                replace(job, block_reason=self.block_reasons.get(job.id, "")) for job in jobs
            ),
            hosts=tuple(self.hosts.values()),
            moves=tuple(self.moves.values()),
            settings=self.settings,
            gangs_formed=self.gangs_formed,
            up_since_ms=-round(1000 * self.settings.join_grace_s),
        )

    def apply_decisions(
        self, decisions: Iterable[Decision], now_s: float
    ) -> list[tuple[str, Instance]]:
        """Apply the decisions at this time; return the instances, each with its gang, with a new
        desired state.
        """
        begin: dict[str, tuple[str, Instance]] = {}
        for decision in decisions:
            match decision:
                case FormGang(gang, workers):
                    self.gangs[gang] = Gang(gang, workers, 1, (), round(1000 * now_s))
                    self.gangs_formed += 1
                case DissolveGang(gang):
                    del self.gangs[gang]
                case PlaceInstance(gang, resident, move=move):
                    there = self.gangs[gang]
                    new = resident.id not in {r.id for r in there.instances}
                    self._update_instance(
                        replace(there, next_instance=there.next_instance + new), resident
                    )
                    begin[resident.id] = gang, resident
                    if move is not None:
                        self.moves[resident.id] = move
                case RemoveInstance(gang, resident_id):
                    there = self.gangs[gang]
                    remaining = tuple(r for r in there.instances if r.id != resident_id)
                    self.gangs[gang] = replace(there, instances=remaining)
                    begin.pop(resident_id, None)
                    self.moves.pop(resident_id, None)
                case FinishMove(move):
                    self.moves.pop(move.id, None)
                case SetBlockReason(job, held):
                    self.block_reasons[job] = held
                case AssignServices(host, services):
                    self.hosts[host] = replace(self.hosts[host], services=services)
                case _:
                    pass
        return list(begin.values())

    def place_engine(self, job: str, tensor_parallel_size: int) -> tuple[str, Instance]:
        """Form a gang of free workers of one host, with an engine; raise ConfigError if no host has
        enough.
        """
        used_workers = {worker for gang in self.gangs.values() for worker in gang.workers}
        for host in self.hosts:
            free = [w.id for w in self.workers if w.host == host and w.id not in used_workers][
                :tensor_parallel_size
            ]
            if len(free) == tensor_parallel_size:
                gang, ranks = f"g{self.gangs_formed}", tuple(range(tensor_parallel_size))
                resident = Instance(f"{gang}.0", job, Role.ROLLOUT, ranks=ranks)
                self.gangs[gang] = Gang(gang, tuple(free), 1, (resident,), next_instance=1)
                self.gangs_formed += 1
                return gang, resident
        raise ConfigError(
            f"no host has {tensor_parallel_size} accelerators left for an engine of job {job}"
        )

    def fail_host(self, host: str) -> list[str]:
        """Fail a host; return its instances."""
        self.offline_hosts.add(host)
        self.hosts[host] = replace(self.hosts[host], alive=False)
        return self.list_instances(host)

    def list_instances(self, host: str) -> list[str]:
        return [resident.id for _, resident in self._find_instances(host)]

    def restore_host(self, host: str) -> list[tuple[str, Instance]]:
        """Restore a host; return the instances, each with its gang, that start there again."""
        self.offline_hosts.discard(host)
        self.hosts[host] = replace(self.hosts[host], alive=True)
        return self._find_instances(host)

    def _find_instances(self, host: str) -> list[tuple[str, Instance]]:
        there = {worker.id for worker in self.workers if worker.host == host}
        return [
            (gang.id, resident)
            for gang in self.gangs.values()
            for resident in gang.instances
            if any(gang.workers[rank] in there for rank in resident.ranks)
        ]

    def mark_reconciled(self, gang_id: str, desired: Instance) -> bool:
        """Mark an instance as reconciled; return False if its desired state has changed."""
        gang = self.gangs.get(gang_id)
        there = {r.id: r for r in gang.instances} if gang is not None else {}
        now = there.get(desired.id)
        if gang is None or now is None or now.epoch != desired.epoch:
            return False
        if any(
            one.id == now.id for host in self.offline_hosts for _, one in self._find_instances(host)
        ):
            return False
        reports = {
            rank: InstanceReport(rank, now.generation, now.epoch, 1, InstancePhase.READY, now.tier)
            for rank in now.ranks
        }
        self._update_instance(gang, replace(now, reports=reports))
        return True

    def _update_instance(self, gang: Gang, instance: Instance) -> None:
        there = {r.id: r for r in gang.instances} | {instance.id: instance}
        self.gangs[gang.id] = replace(gang, instances=tuple(there.values()))
