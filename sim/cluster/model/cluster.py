"""Modelled cluster under the planner's decisions: workers, gangs and jobs, as discrete events.

The machines are modelled: the time of an engine's step, of a training step, of a switch. The
decisions are those of the product's code: `services/planner/decision.py`, and the queues and the
balancer of `services/rollout/routing`. The same cluster has the same run, to the byte.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from meshrl.common.base.errors import ConfigError
from meshrl.common.job.constraints import (
    ConfigTable,
    JobName,
    NonNegativeInteger,
    NonNegativeNumber,
    PositiveInteger,
)
from meshrl.common.state.pool.demand.measurements import parse_accelerator_kind
from meshrl.common.state.pool.scheduling.decisions import (
    Decision,
    FailJob,
    FinishMove,
    ReportMoveOutcome,
)
from meshrl.common.state.pool.scheduling.snapshot import PoolHost
from meshrl.common.state.pool.store.planner_reports import SPEEDUP_RULES
from meshrl.common.state.pool.workers.rows import Instance, Role, Tier, WorkerRow
from meshrl.common.state.pool.workers.settings import PoolSettings
from meshrl.services.planner.decision import decide
from meshrl.services.planner.memory import PlannerMemory
from meshrl.services.planner.policies.offload import EnginePrices
from meshrl.sim.cluster.model.availability import Availability
from meshrl.sim.cluster.model.event_queue import EventQueue
from meshrl.sim.cluster.model.job import JobSpec, SimJob
from meshrl.sim.cluster.model.pool import SimPool

POLL_S = 0.5  # interval of planner passes, as in a mesh
BALANCE_INTERVAL_S = 1.0  # and of the router's balancer


@dataclass(frozen=True)
class SimHosts(ConfigTable):
    """`[[hosts]]`: equal hosts."""

    count: NonNegativeInteger = 1
    accelerators: PositiveInteger = 8
    kind: JobName = "CPU"  # of their accelerators, as in common/hardware/accelerators.toml
    name: str = ""  # in changes of arms
    market: Literal["reserved", "lent", "spot"] = "reserved"
    price: NonNegativeNumber = 0.0  # of an hour of an accelerator
    # name of one of `[[segments]]`, or a CSV file with `time_s` and `instances`: hosts over time
    availability: str = ""
    notice_s: NonNegativeNumber = 0.0  # between a notice and the end of a host


@dataclass(frozen=True)
class Switches(ConfigTable):
    """`[switches]`: seconds from a decision until an instance reaches its desired state."""

    rollout_s: NonNegativeNumber = 1.0
    training_s: NonNegativeNumber = 1.0


@dataclass(frozen=True)
class SimFailure(ConfigTable):
    """`[[failures]]`: a temporary loss of a host with all its instances."""

    host: NonNegativeInteger = 0  # in the order of `[[hosts]]`, from 0
    at_s: NonNegativeNumber = 0.0
    back_s: NonNegativeNumber = 0.0  # seconds until it returns; 0: never
    notice_s: NonNegativeNumber = 0.0  # seconds before it at which its engines are left


@dataclass(frozen=True, slots=True)
class MoveRecord:
    """Move of the planner, or its verdict on one."""

    at_s: float
    job: str
    details: dict[str, object]


class SimCluster:
    """Hosts, and jobs that run on them from the start. A job without a worker for each of its roles
    waits. Only with `has_time_slices` engines of a job share the workers of its core; cores of
    several jobs share none.
    """

    def __init__(
        self,
        hosts: Sequence[SimHosts],
        jobs: Sequence[JobSpec],
        switches: Switches = Switches(),
        settings: PoolSettings | None = None,
        failures: Sequence[SimFailure] = (),
        has_time_slices: bool = False,
        availability: Mapping[int, Availability] | None = None,
        planner_interval_s: float = POLL_S,
    ) -> None:
        """Create a cluster. `availability`: hosts that are there, by the index in `hosts`."""
        self.event_queue = EventQueue()
        self.jobs = {spec.name: SimJob(self.event_queue, spec) for spec in jobs}
        self.moves: list[MoveRecord] = []
        self.judged_moves: list[MoveRecord] = []
        self._switches = switches
        self._memory = PlannerMemory()
        chosen = replace(settings or PoolSettings(), time_slicing=has_time_slices, jobs_per_gang=1)
        self._pool = _build_pool(hosts, chosen)
        self._kinds = {
            worker.id: parse_accelerator_kind(worker.accelerator) for worker in self._pool.workers
        }
        self._job_of_instance: dict[str, str] = {}  # job of each instance
        self._planner_interval_s, self.has_availability = planner_interval_s, bool(availability)
        self._set_prices(hosts)
        # (time, cost of an hour from then on, workers in use that may vanish)
        self.costs: list[tuple[float, float, int]] = []
        for one in failures:
            self._schedule_end(one.at_s, one.notice_s, partial(list, [f"host{one.host}"]))
            self.event_queue.schedule_at(
                one.at_s, partial(self._fail_host, f"host{one.host}", one.back_s)
            )
        first = 0
        for number, group in enumerate(hosts):
            names = [f"host{first + n}" for n in range(group.count)]
            first += group.count
            for at_s, count in (availability or {}).get(number, ()):
                self._schedule_count(names, at_s, count, group.notice_s)
        self._colocated_jobs = [job for job in self.jobs.values() if job.spec.switch_s is not None]
        for job in self.jobs.values():
            for degree in job.spec.initial_tensor_parallel_sizes:
                self._start_instance(*self._pool.place_engine(job.spec.name, degree))

    def run(self, until_s: float, report_progress: Callable[[], None] = lambda: None) -> None:
        """Simulate until all jobs have ended, or `until_s`; call `report_progress` often."""
        for job in self._colocated_jobs:
            self._colocate(job)
        self._record_cost()
        self._run_planner()
        self._balance_load()

        def has_ended() -> bool:
            report_progress()
            return all(job.training.is_finished for job in self.jobs.values())

        self.event_queue.run(until_s, has_ended)

    def get_block_reason(self, job: str) -> str:
        """Return the block reason of a job; empty: it is not blocked."""
        return self._pool.block_reasons.get(job, "")

    def _run_planner(self) -> None:
        now_s = self.event_queue.now_s
        planned = [
            job.planned_job
            for job in self.jobs.values()
            if not job.training.is_finished and job.spec.switch_s is None
        ]
        if not planned:
            return
        seeding = {
            name: job.window.limits for name, job in self.jobs.items() if job.spec.offload.use
        }
        self._memory = replace(self._memory, seeding=seeding)
        decisions, self._memory = decide(self._pool.read_snapshot(now_s, planned), self._memory)
        if decisions:
            self._apply_decisions(decisions)
        self._record_cost()
        self.event_queue.schedule_after(self._planner_interval_s, self._run_planner)

    def _colocate(self, job: SimJob) -> None:
        """Place engines on all accelerators, and a core on the same ones."""
        degree, name, count = job.spec.requirements.smallest_engine, job.spec.name, 0
        for host in self._pool.hosts:
            there = [worker for worker in self._pool.workers if worker.host == host]
            for _ in range(len(there) // degree):
                ranks = tuple(range(degree))
                engine = Instance(f"{host}.{count}", name, Role.ROLLOUT, ranks=ranks)
                job.add_instance(engine, self._kinds[there[0].id])
                count += 1
        ranks = tuple(range(len(self._pool.workers)))
        core = Instance("core", name, Role.TRAINING, core=True, ranks=ranks)
        job.add_instance(core, self._kinds[self._pool.workers[0].id])

    def _apply_decisions(self, decisions: Sequence[Decision]) -> None:
        now_s = self.event_queue.now_s
        begin = self._pool.apply_decisions(decisions, now_s)
        there = {r.id for gang in self._pool.gangs.values() for r in gang.instances}
        for removed in [one for one in self._job_of_instance if one not in there]:
            self.jobs[self._job_of_instance.pop(removed)].remove_instance(removed)
        for gang, resident in begin:
            if resident.tier != Tier.ACCELERATOR and self._job_of_instance.pop(resident.id, ""):
                self.jobs[resident.job].remove_instance(resident.id)
            self._start_instance(gang, resident)
        for one in decisions:
            if isinstance(one, FinishMove) and one.rationale.rule in SPEEDUP_RULES:
                self.moves.append(MoveRecord(now_s, one.rationale.job, one.details))
            if isinstance(one, FailJob):
                raise ConfigError(one.error, where=f"job {one.job}")
            if isinstance(one, ReportMoveOutcome):
                self.judged_moves.append(MoveRecord(now_s, one.job, one.details))

    def _start_instance(self, gang: str, instance: Instance) -> None:
        rolls = instance.role == Role.ROLLOUT
        takes_s = self._switches.rollout_s if rolls else self._switches.training_s
        self.event_queue.schedule_after(takes_s, partial(self._on_instance_ready, gang, instance))

    def _on_instance_ready(self, gang: str, instance: Instance) -> None:
        if not self._pool.mark_reconciled(gang, instance) or instance.id in self._job_of_instance:
            return
        if instance.tier != Tier.ACCELERATOR:
            return
        self._job_of_instance[instance.id] = instance.job
        first = self._pool.gangs[gang].workers[instance.ranks[0]]
        self.jobs[instance.job].add_instance(instance, self._kinds[first])

    def _schedule_count(
        self, names: Sequence[str], at_s: float, count: int, notice_s: float
    ) -> None:
        """Let `count` of some hosts be there from a time on: the newest ones vanish first."""
        if at_s:
            self._schedule_end(at_s, notice_s, lambda: self._list_present(names)[count:])
            self.event_queue.schedule_at(at_s, partial(self._set_count, names, count))
        else:
            self._set_count(names, count)

    def _set_count(self, names: Sequence[str], count: int) -> None:
        present = self._list_present(names)
        for name in present[count:]:
            self._fail_host(name, 0.0)
        absent = [name for name in names if name in self._pool.offline_hosts]
        for name in absent[: max(0, count - len(present))]:
            self._restore_host(name)

    def _list_present(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if name not in self._pool.offline_hosts]

    def _schedule_end(
        self, at_s: float, notice_s: float, list_hosts: Callable[[], Sequence[str]]
    ) -> None:
        """Let the requests of hosts leave at the notice of their end, if there is one."""

        def leave() -> None:
            for host in list_hosts():
                for resident in self._pool.list_instances(host):
                    if job := self._job_of_instance.get(resident, ""):
                        self.jobs[job].leave_engine(resident)

        if notice_s:
            self.event_queue.schedule_at(at_s - notice_s, leave)

    def _set_prices(self, hosts: Sequence[SimHosts]) -> None:
        reserved = self._reserved_cost = sum(
            one.price * one.count * one.accelerators for one in hosts if one.market == "reserved"
        )
        spot = max((one.price for one in hosts if one.market != "reserved"), default=0.0)
        for job in self.jobs.values():
            if job.spec.offload.sees_prices:
                job.window.prices = EnginePrices(reserved, spot)

    def _record_cost(self) -> None:
        """Record the cost of an hour: of all reserved workers, and of others in use."""
        used = {worker for gang in self._pool.gangs.values() for worker in gang.workers}
        spot = [
            worker
            for worker in self._pool.workers
            if worker.market != "reserved"
            and worker.id in used
            and worker.host not in self._pool.offline_hosts
        ]
        cost = self._reserved_cost + sum(worker.price for worker in spot)
        if not self.costs or self.costs[-1][1:] != (cost, len(spot)):
            self.costs.append((self.event_queue.now_s, cost, len(spot)))

    def compute_cost(self, until_s: float) -> tuple[float, float]:
        """Compute the cost from the start to a time, and the mean number of workers that may
        vanish.
        """
        ends_s = [since_s for since_s, *_ in self.costs[1:]] + [until_s]
        cost = worker_s = 0.0
        for (since_s, hourly, spot), end_s in zip(self.costs, ends_s, strict=True):
            seconds = max(0.0, min(end_s, until_s) - since_s)
            cost += hourly * seconds / 3600
            worker_s += spot * seconds
        return cost, worker_s / max(until_s, 1e-9)

    def _fail_host(self, host: str, back_s: float) -> None:
        for resident in self._pool.fail_host(host):
            if job := self._job_of_instance.pop(resident, ""):
                self.jobs[job].fail_instance(resident)
        self._record_cost()
        if back_s:
            self.event_queue.schedule_after(back_s, partial(self._restore_host, host))

    def _restore_host(self, host: str) -> None:
        """Restore a host; instances desired there start again."""
        for gang, resident in self._pool.restore_host(host):
            self._start_instance(gang, resident)

    def _balance_load(self) -> None:
        for job in self.jobs.values():
            for shard in job.shards:
                shard.balance_load(0 if job.spec.max_staleness else job.training.version)
        self.event_queue.schedule_after(BALANCE_INTERVAL_S, self._balance_load)


def _build_pool(hosts: Sequence[SimHosts], settings: PoolSettings) -> SimPool:
    workers: list[WorkerRow] = []
    names: list[str] = []
    for one in hosts:
        for _ in range(one.count):
            names.append(f"host{len(names)}")
            for _ in range(one.accelerators):
                number = len(workers)
                workers.append(
                    WorkerRow(
                        f"w{number}",
                        names[-1],
                        one.kind,
                        number + 1,
                        market=one.market,
                        price=one.price,
                    )
                )
    return SimPool(tuple(workers), {name: PoolHost(name) for name in names}, settings)
