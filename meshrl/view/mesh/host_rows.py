"""Rows of a mesh's hosts, from its records, its registry and its launcher."""

from __future__ import annotations

from dataclasses import dataclass

from meshrl.common.api.stats import NodeStats
from meshrl.common.base.host.settings import MeshSettings
from meshrl.common.mesh.transport.address import parse_endpoint
from meshrl.common.state.pool.scheduling.host_services import ALL_SERVICES
from meshrl.common.state.pool.scheduling.snapshot import HOST_LEFT
from meshrl.common.state.pool.store.host_notices import HostNotice
from meshrl.common.state.pool.workers.process_names import PLACED_KINDS
from meshrl.common.state.redis.client import StateClient
from meshrl.common.state.registry import RegistryEntry
from meshrl.directory.directory_paths import MeshPaths
from meshrl.directory.joined_hosts import JoinedHost, read_joined_hosts
from meshrl.view.mesh.mesh_snapshot import MeshSnapshot, read_full_snapshot


@dataclass(frozen=True)
class HostRow:
    """Row of one host. `meshrl hosts --json` prints these fields: names stay."""

    host: str
    state: str  # up | away | joining | draining | drained
    head: bool
    address: str  # address by which other hosts reach it
    since_s: float  # wall clock, when it joined; 0: as long as the mesh is up
    workers: list[str]
    accelerators: list[str]
    markets: list[str]  # of its workers
    prices: list[float]  # of an hour of a worker, without unknown ones
    instances: list[str]  # instances in its desired state
    processes: list[str]  # live processes that were placed there
    services: list[str]  # shards and sandboxes in its desired state
    accepted_services: list[str]  # services that it accepts
    isolation_tiers: list[str] | None  # of isolation, that sandboxes have there; None: not probed
    planner: str  # name of its standby planner; empty: none
    drain_reason: str  # why nothing new is placed there; empty: something may be
    preempt_at_s: float | None  # announced end, wall clock; 0: within seconds; None: not announced
    notice: str  # that end, or why notices cannot be read, for people; empty: neither
    redis_round_trip_ms: float | None  # round trip to Redis; None: not measured
    clock_offset_ms: float | None  # its clock, ahead of that of Redis' host
    cores: float | None  # processors that its processes share; None: not known
    busy_cores: float | None  # of these, that were busy in the last seconds


async def read_hosts(state: StateClient, mesh_paths: MeshPaths) -> list[HostRow]:
    """Read all hosts, see `build_host_rows`."""
    return build_host_rows(await read_full_snapshot(state, ()), mesh_paths)


def build_host_rows(mesh: MeshSnapshot, mesh_paths: MeshPaths) -> list[HostRow]:
    """Return all hosts, the head first, then in the order in which they joined."""
    settings = MeshSettings.from_file(mesh_paths.settings)
    joined = read_joined_hosts(mesh_paths)
    entries = {e.host: e for e in mesh.entries if e.kind == "node"}
    names = {settings.host, *joined, *(e.host for e in entries.values() if e.alive)}
    names |= {worker.host for worker in mesh.workers}
    names -= {name for name, why in mesh.drain_reasons.items() if why == HOST_LEFT}
    order = [settings.host, *joined]
    ordered = sorted(names, key=lambda n: (order.index(n) if n in order else len(order), n))
    return [
        _build_host_row(name, name == settings.host, entries.get(name), joined.get(name), mesh)
        for name in ordered
    ]


def _build_host_row(
    name: str,
    is_head: bool,
    entry: RegistryEntry | None,
    joined: JoinedHost | None,
    mesh: MeshSnapshot,
) -> HostRow:
    workers = [worker for worker in mesh.workers if worker.host == name]
    ids = {worker.id for worker in workers}
    residents = sorted(
        resident.id
        for gang, resident in mesh.instances
        for rank in resident.ranks
        if gang.workers[rank] in ids
    )
    processes = sorted(
        e.name for e in mesh.entries if e.alive and e.kind in PLACED_KINDS and e.host == name
    )
    services = [service for host, service in mesh.services if host == name]
    draining = mesh.drain_reasons.get(name, "")
    reported_stats = NodeStats.decode(entry.stats if entry is not None else {})
    stats = reported_stats if entry is not None and entry.alive else NodeStats()
    notice = mesh.notices.get(name, HostNotice())
    address = joined.address if joined is not None else ""
    state = "joining" if entry is None else "away"
    if entry is not None and entry.alive:
        busy = residents or processes or services
        state = ("draining" if busy else "drained") if draining else "up"
        address = parse_endpoint(entry.address).removeprefix("tcp://").rpartition(":")[0]
    return HostRow(
        host=name,
        state=state,
        head=is_head,
        address=address,
        since_s=joined.joined_at_s if joined is not None else 0.0,
        workers=[worker.id for worker in workers],
        accelerators=[worker.accelerator for worker in workers],
        markets=sorted({worker.market for worker in workers}),
        prices=sorted({mesh.prices[worker.id] for worker in workers} - {0.0}),
        instances=residents,
        processes=processes,
        services=services,
        accepted_services=list(
            ALL_SERVICES
            if reported_stats.accepted_services is None
            else reported_stats.accepted_services
        ),
        isolation_tiers=None
        if reported_stats.isolation_tiers is None
        else list(reported_stats.isolation_tiers),
        planner=joined.planner_name if joined is not None else "",
        drain_reason=draining,
        preempt_at_s=notice.preempt_at_s,
        notice=notice.describe(mesh.now_ms / 1000),
        redis_round_trip_ms=stats.redis_round_trip_ms,
        clock_offset_ms=stats.clock_ahead_ms,
        cores=stats.cores,
        busy_cores=stats.busy_cores,
    )
