"""The snapshot of a mesh that all views are drawn from, read from its Redis in one place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from meshrl.common.mesh.process.handle import start_time, usage_of
from meshrl.common.mesh.process.supervision import ended
from meshrl.common.mesh.process.supervision.ended import LastEnd
from meshrl.common.state import jobs, leader, registry
from meshrl.common.state.jobs import JobRow
from meshrl.common.state.pool.placing.snapshot import Move
from meshrl.common.state.pool.store import store as pool
from meshrl.common.state.pool.store.explained import Explained, explained_of
from meshrl.common.state.pool.workers.rows import Gang, Resident, WorkerRow
from meshrl.common.state.redis.client import State, server_ms
from meshrl.common.state.redis.keys import MESH, PLANNER
from meshrl.common.state.registry import Entry

Rows = Sequence[Mapping[str, Any]]  # of a job's steps


@dataclass(frozen=True)
class MeshSnapshot:
    """The rows of a mesh at one moment. Times are Redis' own, in milliseconds.

    What `read_with_troubles` adds is empty in a snapshot of `read_mesh`.
    """

    workers: tuple[WorkerRow, ...] = ()
    gangs: tuple[Gang, ...] = ()
    entries: Sequence[Entry] = ()
    jobs: Sequence[JobRow] = ()
    now_ms: float = 0.0
    entitled: Mapping[str, int] = field(default_factory=dict)  # job -> workers that it is to have
    explained: Mapping[str, Explained] = field(default_factory=dict)  # by job
    moves: Sequence[Move] = ()  # under way
    steps: Mapping[str, Rows] = field(default_factory=dict)  # last rows, by job
    # -- of `read_with_troubles`
    leader: str = ""  # process that leads the planners; empty: none does
    ended: Sequence[LastEnd] = ()
    services: tuple[tuple[str, str], ...] = ()  # (host, shard or sandbox that it is to run)
    draining: Mapping[str, str] = field(default_factory=dict)  # host -> why

    @property
    def stats(self) -> dict[str, dict[str, Any]]:
        """Figures of the processes that live, by name."""
        return {entry.name: entry.stats for entry in self.entries if entry.alive}

    @property
    def live_jobs(self) -> list[JobRow]:
        """The jobs that have not ended."""
        return [row for row in self.jobs if not row.ended]

    @property
    def renewed_ms(self) -> float:
        """When a process last renewed its lease: nothing is late while none does."""
        return max((entry.renewed_ms for entry in self.entries), default=0)

    @property
    def residents(self) -> list[tuple[Gang, Resident]]:
        """All residents, with their gangs."""
        return [(gang, resident) for gang in self.gangs for resident in gang.residents]

    def residents_of(self, job: str) -> list[tuple[Gang, Resident]]:
        """A job's residents, with their gangs."""
        return [(gang, resident) for gang, resident in self.residents if resident.job == job]

    def workers_of(self, job: str) -> set[str]:
        """Ids of the workers that a job has residents on, in whatever tier."""
        return {g.workers[rank] for g, r in self.residents_of(job) for rank in r.ranks}


async def read_mesh(state: State, known: Sequence[JobRow] | None = None) -> MeshSnapshot:
    """Read a mesh's rows. `known`: the jobs, which have long documents, if they were read lately.

    StateUnavailable, DeadlineExceeded.
    """
    memory = await pool.remembered(state)
    return MeshSnapshot(
        tuple(await pool.workers(state)),
        tuple(await pool.gangs(state)),
        tuple(await registry.entries(state)),
        tuple(await jobs.jobs(state)) if known is None else known,
        await server_ms(state),
        memory.get("entitled", {}),
        explained_of(memory),
        await pool.under_way(state),
    )


async def read_with_troubles(state: State, known: Sequence[JobRow] | None = None) -> MeshSnapshot:
    """Read what tells of troubles as well: leader, ends of processes, services, drained hosts."""
    mesh = await read_mesh(state, known)
    leading, _ = await leader.leader(state, PLANNER)
    return replace(
        mesh,
        leader=leading,
        ended=await ended.ended(state),
        services=tuple(await pool.served(state)),
        draining=await pool.draining(state),
    )


PROBE = f"{MESH}:probe"  # a key of a second, which shows whether Redis takes writes


async def read_writable(state: State) -> MeshSnapshot:
    """Read a mesh with its troubles. StateUnavailable also when Redis takes no writes: without any,
    every process seems to be late.
    """
    await state.command("SET", PROBE, 1, "PX", 1000)
    return await read_with_troubles(state)


def stopped_here(mesh: MeshSnapshot, host: str) -> list[str]:
    """Return the processes that a signal has stopped, as the kernel of this `host` tells."""
    return [
        entry.name
        for entry in mesh.entries
        if entry.host == host
        and (usage := usage_of(entry.pid)) is not None
        and usage.state == "T"
        and start_time(entry.pid) == entry.start_time
    ]
