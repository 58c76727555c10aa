"""A draft of the pool: each decision is made on what the last one left, and is kept in order."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from meshrl.common.state.pool.placing.decisions import Decision, Dissolve, Form, Place, Remove, Why
from meshrl.common.state.pool.placing.snapshot import Move, Snapshot
from meshrl.common.state.pool.store.documents import numbered
from meshrl.common.state.pool.workers.rows import Gang, Resident, Role, WorkerRow
from meshrl.services.planner.pool.team import Seated, Team


class Draft:
    """The pool as it will be when all that is decided so far is done."""

    def __init__(self, snapshot: Snapshot, usable: Iterable[WorkerRow]) -> None:
        self.snapshot = snapshot
        self.decisions: list[Decision] = []
        self.workers = {worker.id: worker for worker in snapshot.workers}
        self.needs = {job.id: job.need for job in snapshot.jobs}
        self.gangs = {gang.id: gang for gang in snapshot.gangs}
        self.usable = {worker.id for worker in usable}
        self.placeable = {w for w in self.usable if self.workers[w].alive}
        self.where = {w: gang.id for gang in snapshot.gangs for w in gang.workers}
        self.on: dict[str, dict[str, Seated]] = {worker: {} for worker in self.workers}
        self.of: dict[str, dict[str, Seated]] = {}
        self._teams: dict[str, Team] = {}
        self._formed = snapshot.gangs_formed
        for gang in snapshot.gangs:
            for resident in gang.residents:
                self._index(gang, resident)
        self._teams.clear()
        free = (w for w in self.placeable if not self.on[w] or not self._taken(w))
        self._free = sorted(map(numbered, free))
        self._is_free = {worker for _, worker in self._free}

    # -- what there is -----------------------------------------------------------------------------

    def place(self, worker: str) -> str:
        """What the workers of its gang have in common, by name."""
        return self.snapshot.settings.place(self.workers[worker])

    def team(self, job: str) -> Team:
        """The residents of a job, by what they do."""
        if job not in self._teams:
            seats = self.of.get(job, {}).values()
            self._teams[job] = Team.of(sorted(seats, key=lambda s: numbered(s.workers[0])))
        return self._teams[job]

    def free(self, fits: Callable[[str], bool] = lambda _: True) -> str:
        """A worker that nobody is awake on: the first that nobody sleeps on either, if there is
        one; empty when there is none.
        """
        sleepers = ""
        for _, worker in self._free:
            if fits(worker):
                if not self.on[worker]:
                    return worker
                sleepers = sleepers or worker
        return sleepers

    @property
    def idle(self) -> list[str]:
        """The workers that nobody is awake on, in their order."""
        return [worker for _, worker in self._free]

    def beside(self, worker: str) -> list[Seated]:
        """The residents of the other workers of its gang, who lose it when it joins another one."""
        gang = self.gangs.get(self.where.get(worker, ""))
        seats = [self.of[r.job][r.id] for r in gang.residents] if gang is not None else []
        return [seated for seated in seats if worker not in seated.workers]

    def awake_on(self, worker: str) -> list[Seated]:
        """The residents of a worker that have its accelerator."""
        return [seated for seated in self.on[worker].values() if seated.awake]

    # -- what is decided ---------------------------------------------------------------------------

    def decide(self, decision: Decision) -> None:
        """Adds a decision that changes nothing of the draft itself."""
        self.decisions.append(decision)

    def seat(
        self,
        workers: Sequence[str],
        job: str,
        role: Role,
        why: Why,
        *,
        move: Callable[[str, str], Move] | None = None,
        op: str = "",
        **wishes: Any,
    ) -> Seated:
        """Places a new resident on workers that are in one gang, or become one. `move` makes the
        move that this is, from the ids of resident and gang; `wishes` are further fields of the
        resident.
        """
        gang = self._gang_of(workers, why)
        resident = Resident(
            id=f"{gang.id}.{gang.placed}",
            job=job,
            role=role,
            ranks=tuple(gang.workers.index(worker) for worker in workers),
            changed_ms=self.snapshot.now_ms,
            **wishes,
        )
        gang = self.gangs[gang.id] = replace(gang, placed=gang.placed + 1)
        made = move(resident.id, gang.id) if move is not None else None
        self.decide(Place(gang.id, resident, why, made, op))
        return self._add(gang, resident)

    def change(self, seated: Seated, why: Why, **wishes: Any) -> Seated:
        """Wishes something else of a resident, of the same process."""
        before = seated.resident
        after = replace(before, epoch=before.epoch + 1, changed_ms=self.snapshot.now_ms, **wishes)
        self.decide(Place(seated.gang, after, why))
        self._drop(seated)
        return self._add(self.gangs[seated.gang], after)

    def remove(self, seated: Seated, why: Why, op: str = "") -> None:
        """A resident leaves; a gang of several workers that is empty then is dissolved."""
        self.decide(Remove(seated.gang, seated.resident.id, why, op))
        self._drop(seated)
        gang = self.gangs[seated.gang]
        if len(gang.workers) > 1 and not gang.residents:
            self.dissolve(gang, why)

    def dissolve(self, gang: Gang, why: Why) -> None:
        """A gang ends, that nobody is on."""
        assert not self.gangs[gang.id].residents, f"somebody is on {gang.id}"
        self.decide(Dissolve(gang.id, why))
        del self.gangs[gang.id]
        for worker in gang.workers:
            self.where.pop(worker, None)

    def clear(self) -> None:
        """Dissolves the gangs that nobody is on."""
        for gang in [gang for gang in self.gangs.values() if not gang.residents]:
            self.dissolve(gang, Why("idle"))

    # -- its books ---------------------------------------------------------------------------------

    def _gang_of(self, workers: Sequence[str], why: Why) -> Gang:
        gangs = {self.where.get(worker, "") for worker in workers}
        if len(gangs) == 1 and "" not in gangs:
            return self.gangs[gangs.pop()]
        for other in sorted(gangs - {""}):  # who gathers workers has emptied them
            self.dissolve(self.gangs[other], why)
        gang = Gang(f"g{self._formed}", tuple(workers), 0, (), self.snapshot.now_ms)
        self._formed += 1
        self.gangs[gang.id] = gang
        self.where.update(dict.fromkeys(workers, gang.id))
        self.decide(Form(gang.id, gang.workers, why))
        return gang

    def _add(self, gang: Gang, resident: Resident) -> Seated:
        kept = tuple(r for r in self.gangs[gang.id].residents if r.id != resident.id)
        self.gangs[gang.id] = replace(self.gangs[gang.id], residents=(*kept, resident))
        seated = self._index(gang, resident)
        self._tell(seated.workers)
        return seated

    def _index(self, gang: Gang, resident: Resident) -> Seated:
        seated = Seated(gang.id, resident, tuple(gang.workers[rank] for rank in resident.ranks))
        self.of.setdefault(resident.job, {})[resident.id] = seated
        self._teams.pop(resident.job, None)
        for worker in seated.workers:
            self.on.setdefault(worker, {})[resident.id] = seated
        return seated

    def _drop(self, seated: Seated) -> None:
        gang, resident = self.gangs[seated.gang], seated.resident
        kept = tuple(r for r in gang.residents if r.id != resident.id)
        self.gangs[gang.id] = replace(gang, residents=kept)
        del self.of[resident.job][resident.id]
        self._teams.pop(resident.job, None)
        for worker in seated.workers:
            self.on[worker].pop(resident.id, None)
        self._tell(seated.workers)

    def _taken(self, worker: str) -> bool:
        """Whether someone is awake there, or has not fallen asleep yet."""
        return any(s.awake or not s.resident.settled for s in self.on[worker].values())

    def _tell(self, workers: Iterable[str]) -> None:
        """Keeps the list of free workers."""
        for worker in workers:
            free = worker in self.placeable and not self._taken(worker)
            if free and worker not in self._is_free:
                self._is_free.add(worker)
                insort(self._free, numbered(worker))
            elif not free and worker in self._is_free:
                self._is_free.remove(worker)
                self._free.remove(numbered(worker))
