"""A modelled cluster that the planner decides for: workers, gangs and jobs, in discrete events.

What is modelled are machines: how long a step of an engine takes, a step of training, a switch.
What is decided is decided by the code that runs a mesh: `services/planner/decide.py`, the queues
and the balancer of `services/rollout/routing`. The same cluster has the same run, to the byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from meshrl.common.base.errors import ConfigError
from meshrl.common.job.constraints import Count, FileTable, Name, Natural, NonNegative
from meshrl.common.state.pool.demand.measured import kind_of
from meshrl.common.state.pool.placing.decisions import Decision, FailJob, FinishMove, Judge
from meshrl.common.state.pool.placing.snapshot import PoolHost
from meshrl.common.state.pool.store.explained import PLANNED
from meshrl.common.state.pool.workers.rows import Resident, Role, Tier, WorkerRow
from meshrl.common.state.pool.workers.settings import PoolSettings
from meshrl.services.planner.decide import decide
from meshrl.services.planner.memory import PlannerMemory
from meshrl.sim.cluster.model.agenda import Agenda
from meshrl.sim.cluster.model.job import JobSpec, SimJob
from meshrl.sim.cluster.model.pool import SimPool

LOOK_S = 0.5  # between two looks of the planner, as of a mesh
BALANCE_S = 1.0  # and of the router's balancer


@dataclass(frozen=True)
class SimHosts(FileTable):
    """`[[hosts]]`: hosts that are alike."""

    count: Natural = 1
    accelerators: Count = 8
    kind: Name = "CPU"  # of their accelerators, as common/hardware/accelerators.toml has them


@dataclass(frozen=True)
class Switches(FileTable):
    """`[switches]`: seconds from a decision until a resident does what was wished."""

    rollout_s: NonNegative = 1.0
    training_s: NonNegative = 1.0


@dataclass(frozen=True)
class SimFailure(FileTable):
    """`[[failures]]`: a host that is away for a while, with all that it did."""

    host: Natural = 0  # in the order of `[[hosts]]`, from 0
    at_s: NonNegative = 0.0
    back_s: NonNegative = 0.0  # so much later it is there again; 0: never


@dataclass(frozen=True, slots=True)
class SimChange:
    """A move of the planner's, or its verdict on one."""

    at_s: float
    job: str
    details: dict[str, object]


class Cluster:
    """Hosts, and jobs that run on them from the beginning. Nobody takes turns: a job that has no
    worker of its own for each of its roles waits.
    """

    def __init__(
        self,
        hosts: Sequence[SimHosts],
        jobs: Sequence[JobSpec],
        switches: Switches = Switches(),
        settings: PoolSettings | None = None,
        failures: Sequence[SimFailure] = (),
    ) -> None:
        self.agenda = Agenda()
        self.jobs = {spec.name: SimJob(self.agenda, spec) for spec in jobs}
        self.moves: list[SimChange] = []
        self.judged: list[SimChange] = []
        self._switches = switches
        self._memory = PlannerMemory()
        self._pool = _pool(hosts, replace(settings or PoolSettings(), turns=False))
        self._kinds = {worker.id: kind_of(worker.accelerator) for worker in self._pool.workers}
        self._residents: dict[str, str] = {}  # who does something -> for which job
        for one in failures:
            self.agenda.at(one.at_s, partial(self._fail, f"host{one.host}", one.back_s))
        self._alone = [job for job in self.jobs.values() if job.spec.switch_s is not None]
        for job in self.jobs.values():
            for degree in job.spec.engines:
                self._begin(*self._pool.seat(job.spec.name, degree))

    def run(self, until_s: float) -> None:
        for job in self._alone:
            self._colocate(job)
        self._look()
        self._balance()
        self.agenda.run(until_s, lambda: all(j.training.over for j in self.jobs.values()))

    def held(self, job: str) -> str:
        """Why a job waits; empty: it does not."""
        return self._pool.held.get(job, "")

    def _look(self) -> None:
        now_s = self.agenda.now_s
        planned = [
            job.planned
            for job in self.jobs.values()
            if not job.training.over and job.spec.switch_s is None
        ]
        if not planned:
            return
        decisions, self._memory = decide(self._pool.snapshot(now_s, planned), self._memory)
        if decisions:
            self._do(decisions)
        self.agenda.after(LOOK_S, self._look)

    def _colocate(self, job: SimJob) -> None:
        """Engines on all accelerators, and a core on the same ones."""
        degree, name, count = job.spec.need.smallest, job.spec.name, 0
        for host in self._pool.hosts:
            there = [worker for worker in self._pool.workers if worker.host == host]
            for _ in range(len(there) // degree):
                ranks = tuple(range(degree))
                engine = Resident(f"{host}.{count}", name, Role.ROLLOUT, ranks=ranks)
                job.ready(engine, self._kinds[there[0].id])
                count += 1
        ranks = tuple(range(len(self._pool.workers)))
        core = Resident("core", name, Role.TRAINING, core=True, ranks=ranks)
        job.ready(core, self._kinds[self._pool.workers[0].id])

    def _do(self, decisions: Sequence[Decision]) -> None:
        now_s = self.agenda.now_s
        begin = self._pool.apply(decisions, now_s)
        there = {r.id for gang in self._pool.gangs.values() for r in gang.residents}
        for gone in [one for one in self._residents if one not in there]:
            self.jobs[self._residents.pop(gone)].gone(gone)
        for gang, resident in begin:
            if resident.tier != Tier.ACCELERATOR and self._residents.pop(resident.id, ""):
                self.jobs[resident.job].gone(resident.id)
            self._begin(gang, resident)
        for one in decisions:
            if isinstance(one, FinishMove) and one.why.rule in PLANNED:
                self.moves.append(SimChange(now_s, one.why.job, one.details))
            if isinstance(one, FailJob):
                raise ConfigError(one.error, where=f"job {one.job}")
            if isinstance(one, Judge):
                self.judged.append(SimChange(now_s, one.job, one.details))

    def _begin(self, gang: str, resident: Resident) -> None:
        rolls = resident.role == Role.ROLLOUT
        takes_s = self._switches.rollout_s if rolls else self._switches.training_s
        self.agenda.after(takes_s, partial(self._ready, gang, resident))

    def _ready(self, gang: str, resident: Resident) -> None:
        if not self._pool.done(gang, resident) or resident.id in self._residents:
            return
        if resident.tier != Tier.ACCELERATOR:
            return
        self._residents[resident.id] = resident.job
        first = self._pool.gangs[gang].workers[resident.ranks[0]]
        self.jobs[resident.job].ready(resident, self._kinds[first])

    def _fail(self, host: str, back_s: float) -> None:
        for resident in self._pool.fail(host):
            if job := self._residents.pop(resident, ""):
                self.jobs[job].failed(resident)
        if back_s:
            self.agenda.after(back_s, partial(self._back, host))

    def _back(self, host: str) -> None:
        """It is there again; what is still wished there begins anew."""
        for gang, resident in self._pool.back(host):
            self._begin(gang, resident)

    def _balance(self) -> None:
        for job in self.jobs.values():
            for shard in job.shards:
                shard.look()
        self.agenda.after(BALANCE_S, self._balance)


def _pool(hosts: Sequence[SimHosts], settings: PoolSettings) -> SimPool:
    workers: list[WorkerRow] = []
    names: list[str] = []
    for one in hosts:
        for _ in range(one.count):
            names.append(f"host{len(names)}")
            for _ in range(one.accelerators):
                number = len(workers)
                workers.append(WorkerRow(f"w{number}", names[-1], one.kind, number + 1))
    return SimPool(tuple(workers), {name: PoolHost(name) for name in names}, settings)
