"""Pool snapshots for the planner, whose instances reach their desired state at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from meshrl.common.state.jobs import Phase
from meshrl.common.state.pool.demand.requirements import JobRequirements, PlannedJob
from meshrl.common.state.pool.scheduling.decisions import (
    AssignServices,
    Decision,
    DissolveGang,
    FailJob,
    FinishMove,
    FormGang,
    PlaceInstance,
    RejectRequest,
    RemoveInstance,
    SetBlockReason,
)
from meshrl.common.state.pool.scheduling.feasibility import (
    estimate_slice_bytes,
    explain_no_residency,
)
from meshrl.common.state.pool.scheduling.snapshot import PoolHost, PoolSnapshot
from meshrl.common.state.pool.workers.rows import (
    Gang,
    Instance,
    InstancePhase,
    InstanceReport,
    Role,
    Tier,
    WorkerRow,
)
from meshrl.common.state.pool.workers.settings import PoolSettings
from meshrl.services.planner.decision import decide
from meshrl.services.planner.memory import PlannerMemory

NOW_MS = 1_000_000
LOOK_MS = 500


def pool(
    hosts: Sequence[int], *jobs: PlannedJob, networks: Sequence[str] = (), **other: Any
) -> PoolSnapshot:
    """Return a mesh that has been running for long, with that many workers on each host, `host0`
    first.

    All hosts are in the head's network unless `networks` names theirs.
    """
    workers: list[WorkerRow] = []
    for host, count in enumerate(hosts):
        network = networks[host] if networks else ""
        for number in range(len(workers), len(workers) + count):
            worker = WorkerRow(f"w{number}", f"host{host}", "cpu:0", number + 1, network=network)
            workers.append(worker)
    names = tuple(PoolHost(f"host{host}") for host in range(len(hosts)))
    return PoolSnapshot(NOW_MS, tuple(workers), (), jobs, names, **other)


def job(id: str = "job", **other: Any) -> PlannedJob:
    """Return a job in training. Keyword arguments override fields of the job or of its
    requirements.
    """
    needs = {key: other.pop(key) for key in list(other) if key in JobRequirements.__slots__}
    about: dict[str, Any] = {"phase": Phase.TRAINING, "steps_done": 10, "groups_per_step": 16}
    about |= {"group_size": 8, "slots": 64, "total_steps": 1000}
    return PlannedJob(id, requirements=JobRequirements(**needs), **(about | other))


def set_reconciled(gang: Gang) -> Gang:
    """Return the gang with all instances at their desired state."""
    return replace(gang, instances=tuple(set_phase(r, InstancePhase.READY) for r in gang.instances))


def set_phase(instance: Instance, doing: InstancePhase) -> Instance:
    reports = {
        rank: InstanceReport(rank, instance.generation, instance.epoch, 1, doing, instance.tier)
        for rank in instance.ranks
    }
    return replace(instance, reports=reports)


def apply_decisions(
    snapshot: PoolSnapshot, decisions: Iterable[Decision], ready: bool = True
) -> PoolSnapshot:
    """Return the next snapshot. Each decision must apply as it would in Redis."""
    gangs = {gang.id: gang for gang in snapshot.gangs}
    jobs = {job.id: job for job in snapshot.jobs}
    hosts = {host.name: host for host in snapshot.hosts}
    requests = {request.op: request for request in snapshot.requests}
    moves = {move.id: move for move in snapshot.moves}
    formed = snapshot.gangs_formed
    removed_names: list[str] = []
    for decision in decisions:
        match decision:
            case FormGang(gang, workers):
                assert gang == f"g{formed}"
                assert not {w for other in gangs.values() for w in other.workers} & set(workers)
                gangs[gang] = Gang(gang, workers, 1, (), snapshot.now_ms)
                formed += 1
            case DissolveGang(gang):
                assert not gangs.pop(gang).instances
            case PlaceInstance(gang, instance):
                _placed(gangs, gang, instance)
                requests.pop(decision.request_id, None)
                if decision.move is not None:
                    moves[instance.id] = decision.move
            case RemoveInstance(gang, resident_id):
                before = gangs[gang]
                remaining = tuple(r for r in before.instances if r.id != resident_id)
                assert len(remaining) == len(before.instances) - 1
                gangs[gang] = replace(before, instances=remaining)
                removed_names.append(resident_id)
                requests.pop(decision.request_id, None)
            case SetBlockReason(id, held):
                jobs[id] = replace(jobs[id], block_reason=held)
            case FailJob(id):
                del jobs[id]
            case AssignServices(host, services):
                hosts[host] = replace(hosts[host], services=services)
            case FinishMove(move):
                del moves[move.id]
            case RejectRequest(op):
                del requests[op]
    assert not set(removed_names) & set(moves), "Redis strikes these off: they must be told of"
    where = {worker: gang.id for gang in gangs.values() for worker in gang.workers}
    for id, planned in jobs.items():
        has_core = any(r.core and r.job == id for g in gangs.values() for r in g.instances)
        if planned.phase == Phase.QUEUED and has_core:
            jobs[id] = replace(planned, phase=Phase.TRAINING)
    return replace(
        snapshot,
        now_ms=snapshot.now_ms + LOOK_MS,
        workers=tuple(replace(w, gang=where.get(w.id, "")) for w in snapshot.workers),
        gangs=tuple(set_reconciled(gang) if ready else gang for gang in gangs.values()),
        jobs=tuple(jobs.values()),
        hosts=tuple(hosts.values()),
        requests=tuple(requests.values()),
        moves=tuple(moves.values()),
        gangs_formed=formed,
    )


def _placed(gangs: dict[str, Gang], gang: str, instance: Instance) -> None:
    before = gangs[gang]
    there = {r.id: r for r in before.instances}
    placed = before.next_instance
    if instance.id in there:
        assert instance.epoch == there[instance.id].epoch + 1
        assert instance.generation == there[instance.id].generation
    else:
        assert instance.id == f"{gang}.{placed}"
        placed += 1
    assert set(instance.ranks) <= set(range(len(before.workers)))
    residents = (there | {instance.id: instance}).values()
    gangs[gang] = replace(before, instances=tuple(residents), next_instance=placed)


class PlannerBench:
    """Planner decisions over a sequence of snapshots of a pool."""

    def __init__(self, snapshot: PoolSnapshot, memory: PlannerMemory | None = None) -> None:
        self.snapshot, self.memory = snapshot, memory or PlannerMemory()
        self.decisions: list[Decision] = []  # of the last snapshot

    def decide_once(self, ready: bool = True) -> list[Decision]:
        """Decide once and apply the decisions; with `ready`, instances reach their desired state at
        once.
        """
        self.decisions, self.memory = decide(
            self.snapshot, PlannerMemory.decode(self.memory.encode())
        )
        self.snapshot = apply_decisions(self.snapshot, self.decisions, ready)
        check(self.snapshot)
        return self.decisions

    def settle(self, within: int = 12) -> list[Decision]:
        """Decide until no decision is left, and return all decisions."""
        found: list[Decision] = []
        for _ in range(within):
            if not self.decide_once():
                return found
            found += self.decisions
        raise AssertionError(f"still deciding: {self.decisions}")

    def update(self, **other: Any) -> None:
        self.snapshot = replace(self.snapshot, **other)

    def update_worker(self, id: str, **other: Any) -> None:
        """Change a worker's state."""
        found = [replace(w, **other) if w.id == id else w for w in self.snapshot.workers]
        self.update(workers=tuple(found))

    def drain(self, host: str) -> None:
        """Drain a host: no new instance is to be placed there."""
        hosts = self.snapshot.hosts
        found = [replace(h, drain_reason="maintenance") if h.name == host else h for h in hosts]
        self.update(hosts=tuple(found))

    def update_job(self, id: str, **other: Any) -> None:
        """Change a job's state."""
        found = [replace(j, **other) if j.id == id else j for j in self.snapshot.jobs]
        self.update(jobs=tuple(found))

    def list_instances(self, job: str = "job") -> list[tuple[str, Instance]]:
        """Return (first worker, instance) pairs of a job, by worker."""
        found = [
            (gang.workers[instance.ranks[0]], instance)
            for gang in self.snapshot.gangs
            for instance in gang.instances
            if instance.job == job
        ]
        return sorted(found, key=lambda one: (len(one[0]), one[0], one[1].id))

    def roles(self, job: str = "job") -> dict[str, str]:
        """Return each worker's role for a job (core, training, rollout, scoring), with its tier if
        it sleeps.
        """
        found: dict[str, str] = {}
        for gang in self.snapshot.gangs:
            for r in gang.instances:
                if r.job == job:
                    name = "core" if r.core else str(r.role)
                    name = name if r.tier == Tier.ACCELERATOR else f"{name}@{r.tier}"
                    for rank in r.ranks:
                        worker = gang.workers[rank]
                        found[worker] = f"{found[worker]}+{name}" if worker in found else name
        return dict(sorted(found.items(), key=lambda one: (len(one[0]), one[0])))

    def count_awake_workers(self, job: str) -> int:
        """Return the number of workers on which a job is awake."""
        return len(awake(self.snapshot, job))


def start_pool(hosts: Sequence[int], *jobs: PlannedJob, **other: Any) -> PlannerBench:
    """Return the bench of a pool after its initial decisions."""
    bench = PlannerBench(pool(hosts, *jobs, **other))
    bench.settle()
    return bench


def awake(snapshot: PoolSnapshot, job: str) -> set[str]:
    return {
        gang.workers[rank]
        for gang in snapshot.gangs
        for instance in gang.instances
        if instance.job == job and instance.tier == Tier.ACCELERATOR
        for rank in instance.ranks
    }


def check(snapshot: PoolSnapshot) -> None:
    """Assert the invariants of every snapshot.

    A worker is in one gang. Its accelerator has one instance, or time-sliced ones: an engine, a
    core and frozen models of each of at most `jobs_per_gang` jobs, whose tensors fit. A job has one
    core, and its gang has one host, or one network if the pool says so, with the ranks of a host
    next to each other. An engine is on one host; an engine of several workers is not time sliced.
    """
    members = [worker for gang in snapshot.gangs for worker in gang.workers]
    assert len(members) == len(set(members))
    there_are = {worker.id: worker for worker in snapshot.workers}
    cores: list[str] = []
    for gang in snapshot.gangs:
        assert (
            len({snapshot.settings.get_gang_location(there_are[worker]) for worker in gang.workers})
            == 1
        )
        hosts = [there_are[worker].host for worker in gang.workers]
        assert sum(one != other for one, other in pairwise(hosts)) == len(set(hosts)) - 1
        cores += [instance.job for instance in gang.instances if instance.core]
        for instance in gang.instances:
            if instance.role == Role.ROLLOUT:
                degree = len(instance.ranks)
                assert len({hosts[rank] for rank in instance.ranks}) == 1
                assert degree == 1 or not instance.time_sliced
        for rank in range(len(gang.workers)):
            there = [r for r in gang.instances if rank in r.ranks and r.tier == Tier.ACCELERATOR]
            if len(there) > 1:
                check_time_sliced(snapshot, there_are[gang.workers[rank]], there)
    assert len(cores) == len(set(cores))


def check_time_sliced(
    snapshot: PoolSnapshot, worker: WorkerRow, instances: Sequence[Instance]
) -> None:
    """Assert the invariants of the instances that take time slices on one worker."""
    assert all(r.time_sliced for r in instances)
    assert all(r.core or r.role in (Role.ROLLOUT, Role.SCORING) for r in instances)
    assert len({(r.job, r.role) for r in instances}) == len(instances)
    jobs = {r.job for r in instances}
    assert len(jobs) <= snapshot.settings.jobs_per_gang
    needs = {one.id: one.requirements for one in snapshot.jobs}
    if jobs <= needs.keys():
        slices = [
            estimate_slice_bytes(r.role, r.core, len(r.ranks), needs[r.job]) for r in instances
        ]
        assert not explain_no_residency(worker.budget, slices)


QUIET = PoolSettings(time_slicing=False)
