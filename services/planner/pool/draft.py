"""Draft of the pool: each decision builds on the previous ones, and is recorded in order."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from meshrl.common.state.pool.scheduling.decisions import (
    Decision,
    DissolveGang,
    FormGang,
    PlaceInstance,
    Rationale,
    RemoveInstance,
)
from meshrl.common.state.pool.scheduling.snapshot import Move, PoolSnapshot
from meshrl.common.state.pool.store.documents import id_sort_key
from meshrl.common.state.pool.workers.rows import MARKETS, Gang, Instance, Role, WorkerRow
from meshrl.services.planner.pool.job_instances import InstancePlacement, JobInstances


class PoolDraft:
    """Pool as it will be after all decisions so far."""

    def __init__(self, snapshot: PoolSnapshot, usable: Iterable[WorkerRow]) -> None:
        self.snapshot = snapshot
        self.decisions: list[Decision] = []
        self.workers = {worker.id: worker for worker in snapshot.workers}
        self.present_markets = {worker.market for worker in snapshot.workers}
        self.requirements_by_job = {job.id: job.requirements for job in snapshot.jobs}
        self.gangs = {gang.id: gang for gang in snapshot.gangs}
        self.usable_workers = {worker.id for worker in usable}
        self.placeable_workers = {w for w in self.usable_workers if self.workers[w].alive}
        self.gang_by_worker = {w: gang.id for gang in snapshot.gangs for w in gang.workers}
        self.placements_by_worker: dict[str, dict[str, InstancePlacement]] = {
            worker: {} for worker in self.workers
        }
        self.placements_by_job: dict[str, dict[str, InstancePlacement]] = {}
        self._job_instances: dict[str, JobInstances] = {}
        self._gangs_formed = snapshot.gangs_formed
        for gang in snapshot.gangs:
            for resident in gang.instances:
                self._index_placement(gang, resident)
        self._job_instances.clear()
        free = (
            w
            for w in self.placeable_workers
            if not self.placements_by_worker[w] or not self._is_occupied(w)
        )
        self._free_workers = sorted(map(id_sort_key, free))
        self._free_worker_ids = {worker for _, worker in self._free_workers}

    # -- state of the pool -------------------------------------------------------------------------

    def get_place(self, worker: str) -> str:
        """Return the name of the place that a gang with this worker lies in."""
        return self.snapshot.settings.get_gang_location(self.workers[worker])

    def get_instances(self, job: str) -> JobInstances:
        """Return the instances of a job, by role."""
        if job not in self._job_instances:
            seats = self.placements_by_job.get(job, {}).values()
            self._job_instances[job] = JobInstances.from_placements(
                sorted(seats, key=lambda s: id_sort_key(s.workers[0]))
            )
        return self._job_instances[job]

    def find_free_worker(
        self, fits: Callable[[str], bool], markets: Sequence[str] = MARKETS
    ) -> str:
        """Return a fitting worker without an awake instance; empty if there is none.

        Prefer one without a sleeping instance, then one of the first of `markets`.
        """
        sleepers = ""
        for market in markets:
            for _, worker in self._free_workers if market in self.present_markets else ():
                if self.workers[worker].market == market and fits(worker):
                    if not self.placements_by_worker[worker]:
                        return worker
                    sleepers = sleepers or worker
        return sleepers

    @property
    def idle_workers(self) -> list[str]:
        """Workers without an awake instance, in order."""
        return [worker for _, worker in self._free_workers]

    def list_gang_neighbours(self, worker: str) -> list[InstancePlacement]:
        """List the instances on other workers of its gang, which lose the gang when it joins
        another one.
        """
        gang = self.gangs.get(self.gang_by_worker.get(worker, ""))
        seats = (
            [self.placements_by_job[r.job][r.id] for r in gang.instances]
            if gang is not None
            else []
        )
        return [seated for seated in seats if worker not in seated.workers]

    def list_awake_on(self, worker: str) -> list[InstancePlacement]:
        """List the instances on a worker that occupy its accelerator."""
        return [seated for seated in self.placements_by_worker[worker].values() if seated.is_awake]

    # -- decisions ---------------------------------------------------------------------------------

    def add_decision(self, decision: Decision) -> None:
        """Add a decision that does not change the draft itself."""
        self.decisions.append(decision)

    def place_instance(
        self,
        workers: Sequence[str],
        job: str,
        role: Role,
        rationale: Rationale,
        *,
        move: Callable[[str, str], Move] | None = None,
        op: str = "",
        **fields: Any,
    ) -> InstancePlacement:
        """Place a new instance on workers that are, or become, one gang. `move` makes the move from
        the ids of instance and gang; `fields` are further fields of the instance.
        """
        gang = self._get_or_form_gang(workers, rationale)
        resident = Instance(
            id=f"{gang.id}.{gang.next_instance}",
            job=job,
            role=role,
            ranks=tuple(gang.workers.index(worker) for worker in workers),
            desired_since_ms=self.snapshot.now_ms,
            **fields,
        )
        gang = self.gangs[gang.id] = replace(gang, next_instance=gang.next_instance + 1)
        planned_move = move(resident.id, gang.id) if move is not None else None
        self.add_decision(PlaceInstance(gang.id, resident, rationale, planned_move, op))
        return self._add_placement(gang, resident)

    def update_instance(
        self, placement: InstancePlacement, rationale: Rationale, **fields: Any
    ) -> InstancePlacement:
        """Update the desired state of an instance, in the same process."""
        before = placement.instance
        after = replace(
            before, epoch=before.epoch + 1, desired_since_ms=self.snapshot.now_ms, **fields
        )
        self.add_decision(PlaceInstance(placement.gang, after, rationale))
        self._drop_placement(placement)
        return self._add_placement(self.gangs[placement.gang], after)

    def remove_instance(
        self, placement: InstancePlacement, rationale: Rationale, op: str = ""
    ) -> None:
        """Remove an instance; dissolve its gang of several workers if it is empty then."""
        self.add_decision(RemoveInstance(placement.gang, placement.instance.id, rationale, op))
        self._drop_placement(placement)
        gang = self.gangs[placement.gang]
        if len(gang.workers) > 1 and not gang.instances:
            self.dissolve_gang(gang, rationale)

    def dissolve_gang(self, gang: Gang, rationale: Rationale) -> None:
        """Dissolve a gang without instances."""
        assert not self.gangs[gang.id].instances, f"{gang.id} still has instances"
        self.add_decision(DissolveGang(gang.id, rationale))
        del self.gangs[gang.id]
        for worker in gang.workers:
            self.gang_by_worker.pop(worker, None)

    def dissolve_empty_gangs(self) -> None:
        """Dissolve all gangs without instances."""
        for gang in [gang for gang in self.gangs.values() if not gang.instances]:
            self.dissolve_gang(gang, Rationale("idle"))

    # -- indexes -----------------------------------------------------------------------------------

    def _get_or_form_gang(self, workers: Sequence[str], rationale: Rationale) -> Gang:
        gangs = {self.gang_by_worker.get(worker, "") for worker in workers}
        if len(gangs) == 1 and "" not in gangs:
            return self.gangs[gangs.pop()]
        for other in sorted(gangs - {""}):  # the caller has emptied them
            self.dissolve_gang(self.gangs[other], rationale)
        gang = Gang(f"g{self._gangs_formed}", tuple(workers), 0, (), self.snapshot.now_ms)
        self._gangs_formed += 1
        self.gangs[gang.id] = gang
        self.gang_by_worker.update(dict.fromkeys(workers, gang.id))
        self.add_decision(FormGang(gang.id, gang.workers, rationale))
        return gang

    def _add_placement(self, gang: Gang, instance: Instance) -> InstancePlacement:
        other_instances = tuple(r for r in self.gangs[gang.id].instances if r.id != instance.id)
        self.gangs[gang.id] = replace(self.gangs[gang.id], instances=(*other_instances, instance))
        seated = self._index_placement(gang, instance)
        self._update_free_workers(seated.workers)
        return seated

    def _index_placement(self, gang: Gang, instance: Instance) -> InstancePlacement:
        seated = InstancePlacement(
            gang.id, instance, tuple(gang.workers[rank] for rank in instance.ranks)
        )
        self.placements_by_job.setdefault(instance.job, {})[instance.id] = seated
        self._job_instances.pop(instance.job, None)
        for worker in seated.workers:
            self.placements_by_worker.setdefault(worker, {})[instance.id] = seated
        return seated

    def _drop_placement(self, placement: InstancePlacement) -> None:
        gang, resident = self.gangs[placement.gang], placement.instance
        remaining = tuple(r for r in gang.instances if r.id != resident.id)
        self.gangs[gang.id] = replace(gang, instances=remaining)
        del self.placements_by_job[resident.job][resident.id]
        self._job_instances.pop(resident.job, None)
        for worker in placement.workers:
            self.placements_by_worker[worker].pop(resident.id, None)
        self._update_free_workers(placement.workers)

    def _is_occupied(self, worker: str) -> bool:
        """Return True if an instance on a worker is awake, or has not fallen asleep yet."""
        return any(
            s.is_awake or not s.instance.is_reconciled
            for s in self.placements_by_worker[worker].values()
        )

    def _update_free_workers(self, workers: Iterable[str]) -> None:
        """Update the list of free workers."""
        for worker in workers:
            free = worker in self.placeable_workers and not self._is_occupied(worker)
            if free and worker not in self._free_worker_ids:
                self._free_worker_ids.add(worker)
                insort(self._free_workers, id_sort_key(worker))
            elif not free and worker in self._free_worker_ids:
                self._free_worker_ids.remove(worker)
                self._free_workers.remove(id_sort_key(worker))
