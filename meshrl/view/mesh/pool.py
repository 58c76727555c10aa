"""The workers and gangs of a mesh, as what people look at shows them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from common.pool.rows import Gang, Resident, Worker
from common.state import pool as rows
from common.state.client import State


@dataclass(frozen=True, slots=True)
class Pool:
    """The rows of a mesh's workers and gangs at one moment."""

    workers: tuple[Worker, ...] = ()
    gangs: tuple[Gang, ...] = ()
    entitled: Mapping[str, int] = field(default_factory=dict)  # job -> workers that it is to have
    services: tuple[tuple[str, str], ...] = ()  # (host, shard or sandbox that it is to run)

    def gang_of(self, worker: Worker) -> Gang | None:
        """The gang that a worker is in; None: it is idle."""
        return next((g for g in self.gangs if worker.id in g.workers), None)

    def residents(self, job: str) -> list[tuple[Gang, Resident]]:
        """A job's residents, with their gangs."""
        return [(g, r) for g in self.gangs for r in g.residents if r.job == job]

    def workers_of(self, job: str) -> set[str]:
        """Ids of the workers that a job has residents on, in whatever tier."""
        return {g.workers[rank] for g, r in self.residents(job) for rank in r.ranks}


async def pool(state: State) -> Pool:
    """What Redis has on record of workers and gangs."""
    workers, gangs = await rows.workers(state), await rows.gangs(state)
    return Pool(tuple(workers), tuple(gangs), await rows.entitled(state))


async def with_services(state: State) -> Pool:
    """The same with the shards and sandboxes that are to run on each host."""
    found = await pool(state)
    return replace(found, services=tuple(await rows.served(state)))
