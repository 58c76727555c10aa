"""Rows of the pool: what workers read and report, and what the leader reads and writes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from weakref import WeakKeyDictionary

from meshrl.common.state import registry
from meshrl.common.state.pool.demand.measurements import parse_accelerator_kind
from meshrl.common.state.pool.demand.planned_jobs import ProcessStats, build_planned_job
from meshrl.common.state.pool.scheduling.decisions import Decision
from meshrl.common.state.pool.scheduling.snapshot import Move, PoolHost, PoolRequest, PoolSnapshot
from meshrl.common.state.pool.store.documents import (
    decode_gang,
    decode_worker,
    encode_decision,
    encode_report,
    encode_worker,
    id_sort_key,
)
from meshrl.common.state.pool.store.planner_reports import JobPrediction, decode_predictions
from meshrl.common.state.pool.workers.process_names import PLACED_KINDS
from meshrl.common.state.pool.workers.process_names import agent_name as agent_process
from meshrl.common.state.pool.workers.rows import Gang, InstanceReport, WorkerRow
from meshrl.common.state.pool.workers.settings import PoolSettings
from meshrl.common.state.redis.client import StateClient
from meshrl.common.state.redis.keys import MESH_PREFIX, PLANNER_ELECTION
from meshrl.common.state.registry import RegistryEntry

WORKER = f"{MESH_PREFIX}:worker:"
SERVICES, HOSTS = f"{MESH_PREFIX}:services:", f"{MESH_PREFIX}:hosts"
PLANNER_KEY = f"{MESH_PREFIX}:planner"  # memory that leaders pass to their successors
MOVES_KEY = f"{MESH_PREFIX}:moves"  # moves in progress, by the arriving instance
# Decisions of one script: each blocks Redis for up to about 50 us.
DECISIONS_PER_SCRIPT = 128
EXIT_RETENTION_S = 3600.0  # how long the last exit of a removed instance's process is retained
# stats that a host's agent reports
SERVICE_STATS = ("accepted_services", "isolation_tiers")
CORE_STATS = ("cores", "busy_cores")
_POLLED_FIELDS = ("details", "token", "gang", "membership", "revision")


@dataclass(frozen=True, slots=True)
class PlannerInput:
    """Input of one planner decision round."""

    snapshot: PoolSnapshot
    memory: dict[str, Any] | None  # memory of the leaders; None before the first write
    revision: int  # writes so far: a write based on another snapshot is rejected


@dataclass(frozen=True, slots=True)
class RejectedDecision:
    """Decision that was not written because its preconditions no longer hold."""

    decision: Decision
    reason: str


# -- workers -----------------------------------------------------------------------------------


async def join_worker(state: StateClient, worker: WorkerRow) -> WorkerRow:
    """Create or renew the record of a worker and return its row.

    The worker stays in its gang, if any. A restarted worker (another token) voids its earlier
    reports. Fenced without the live lease `worker.token` of its process.
    """
    answer = await state.run_mesh_script(
        "join_worker",
        worker=worker.id,
        token=worker.token,
        host=worker.host,
        accelerator=worker.accelerator,
        details=json.dumps(encode_worker(worker)),
    )
    return decode_worker(answer["row"])


async def read_worker(state: StateClient, id: str) -> WorkerRow | None:
    """Return the record that a worker polls, in one cheap command; its liveness is not read.

    None if the record has been removed because the worker was gone for long: it may join again.
    """
    row = await state.run_command("HMGET", f"{WORKER}{id}", *_POLLED_FIELDS)
    if row[0] is None:
        return None
    found = dict(zip(_POLLED_FIELDS, row, strict=True))
    numbers = {name: int(found[name]) for name in ("token", "membership", "revision")}
    return decode_worker(found | numbers | {"id": id, "details": json.loads(found["details"])})


async def read_workers(state: StateClient) -> list[WorkerRow]:
    """Return all workers on record, w2 before w10."""
    rows = (await state.run_mesh_script("pool_rows", what="workers"))["rows"]
    return sorted(map(decode_worker, rows), key=lambda worker: id_sort_key(worker.id))


async def report_instance(
    state: StateClient, worker_id: str, gang: str, instance_id: str, report: InstanceReport
) -> bool:
    """Record the state of an instance's process on a worker.

    Return False if the report is for a desired state other than the recorded one, or if the worker
    does not have this rank of this gang. Fenced when `report.token` is not the live lease of the
    worker's process.
    """
    answer = await state.run_mesh_script(
        "report_instance",
        worker=worker_id,
        token=report.token,
        gang=gang,
        instance=instance_id,
        rank=report.rank,
        generation=report.generation,
        epoch=report.epoch,
        report=json.dumps(encode_report(report)),
    )
    return bool(answer["accepted"])


# -- gangs and services --------------------------------------------------------------------------


async def read_gangs(state: StateClient) -> list[Gang]:
    """Return all gangs in the order in which they were formed."""
    rows = (await state.run_mesh_script("pool_rows", what="gangs"))["rows"]
    return [decode_gang(row) for row in rows]


async def read_gang(state: StateClient, id: str) -> Gang | None:
    """Return a gang; None if there is none with that id."""
    rows = (await state.run_mesh_script("pool_rows", gang=id))["rows"]
    return decode_gang(rows[0]) if rows else None


async def read_planner_memory(state: StateClient) -> dict[str, Any]:
    """Return the memory that leaders pass to their successors; empty before the first leader."""
    text = await state.run_command("HGET", PLANNER_KEY, "memory")
    found: dict[str, Any] = json.loads(text) if text else {}
    return found


async def read_entitlements(state: StateClient) -> dict[str, int]:
    """Return the number of workers by job that the leader assigned last."""
    found: dict[str, int] = (await read_planner_memory(state)).get("entitled", {})
    return found


async def read_predictions(state: StateClient) -> dict[str, JobPrediction]:
    """Return the leader's last predictions by job: of its steps, and why no move is made.

    Jobs without a prediction are left out.
    """
    return decode_predictions(await read_planner_memory(state))


async def read_moves_in_progress(state: StateClient) -> list[Move]:
    """Return the moves that are decided and not complete, the oldest first."""
    flat = await state.run_command("HGETALL", MOVES_KEY)
    rows = flat if isinstance(flat, dict) else dict(zip(flat[::2], flat[1::2], strict=True))
    found = [Move(id, **json.loads(row)) for id, row in rows.items()]
    return sorted(found, key=lambda move: (move.started_ms, move.id))


async def read_host_services(state: StateClient, host: str) -> tuple[str, ...]:
    """Return the names of the shards and sandboxes that a host is to run."""
    text = await state.run_command("GET", f"{SERVICES}{host}")
    return tuple(json.loads(text)) if text else ()


async def read_all_services(state: StateClient) -> list[tuple[str, str]]:
    """Return (host, name) of all shards and sandboxes that are to run, by host."""
    hosts = await state.run_command("ZRANGE", HOSTS, 0, -1)
    return [
        (host, name) for host in sorted(hosts) for name in await read_host_services(state, host)
    ]


# -- people ----------------------------------------------------------------------------------------


async def submit_request(state: StateClient, request: PoolRequest) -> None:
    """Submit a request to the leader, once for `request.op`.

    The request stays on record until the leader grants it (the event of the decision has its `op`)
    or rejects it (event `move_declined`). A host to be drained is marked as draining at once.
    """
    await state.run_mesh_script("submit_request", **asdict(request))


async def set_drain_reason(
    state: StateClient, host: str, reason: str, expected: str | None = None
) -> bool:
    """Set why nothing new is placed on a host; an empty reason allows placement again.

    With `expected`, only if the current reason equals it. Return True if this changed anything.
    """
    args = {"host": host, "reason": reason} | ({} if expected is None else {"expected": expected})
    return bool((await state.run_mesh_script("set_drain_reason", **args))["changed"])


async def read_drain_reasons(state: StateClient) -> dict[str, str]:
    """Return the hosts that are being drained, each with the reason."""
    found = await state.run_command("HGETALL", f"{MESH_PREFIX}:draining")
    return found if isinstance(found, dict) else dict(zip(found[::2], found[1::2], strict=True))


async def is_draining(state: StateClient, host: str) -> bool:
    """Return True if a host is being drained."""
    return bool(await state.run_command("HGET", f"{MESH_PREFIX}:draining", host))


async def write_settings(state: StateClient, settings: PoolSettings) -> int:
    """Write the planner's settings of a starting mesh; return the start time in ms."""
    return int(
        (await state.run_mesh_script("write_settings", pool=json.dumps(asdict(settings))))[
            "up_since_ms"
        ]
    )


async def read_settings(state: StateClient) -> PoolSettings:
    """Return the settings of the running mesh; the defaults before it runs."""
    text = await state.run_command("GET", f"{MESH_PREFIX}:settings")
    return PoolSettings.from_document(json.loads(text)["pool"]) if text else PoolSettings()


# -- the leader ------------------------------------------------------------------------------------

# Documents of jobs by their digests, of the last snapshot over each connection: they are long and
# rarely change.
_documents: WeakKeyDictionary[StateClient, dict[str, dict[str, Any]]] = WeakKeyDictionary()


async def read_snapshot(state: StateClient, token: int) -> PlannerInput:
    """Return one snapshot of everything, read by one script; Fenced for a former leader."""
    known = _documents.setdefault(state, {})
    found = await state.run_mesh_script(
        "snapshot", election=PLANNER_ELECTION, token=token, known=list(known)
    )
    documents = {}
    for row in found["jobs"]:
        row["document"] = row["document"] or known[row["digest"]]
        if row["digest"]:
            documents[row["digest"]] = row["document"]
    _documents[state] = documents
    return PlannerInput(_decode_snapshot(found), found["memory"], found["revision"])


async def write_decisions(
    state: StateClient,
    token: int,
    op_id: str,
    decisions: Sequence[Decision],
    memory: Mapping[str, Any] | None,
    expected_revision: int | None = None,
) -> list[RejectedDecision]:
    """Write the decisions made from one snapshot and return those that no longer apply.

    Decisions are written in chunks, once for `op_id`; the leaders' memory (None: unchanged) is
    written with the last chunk. Fenced for a former leader, and if anything has been written since
    the snapshot whose `revision` is `expected_revision`. A leader that stops between two chunks
    leaves the rest undecided.
    """
    documents = [encode_decision(decision, index) for index, decision in enumerate(decisions)]
    # Finish moves first: the removal of a finished move must not remove a move that begins here.
    documents.sort(key=lambda row: row["kind"] != "finish_move")
    chunks = [
        documents[i : i + DECISIONS_PER_SCRIPT]
        for i in range(0, len(documents), DECISIONS_PER_SCRIPT)
    ]
    if not chunks and memory is not None:
        chunks = [[]]
    rejected: list[RejectedDecision] = []
    for number, chunk in enumerate(chunks):
        args: dict[str, Any] = {
            "election": PLANNER_ELECTION,
            "token": token,
            "op": f"{op_id}.{number}",
            "decisions": chunk,
        }
        if expected_revision is not None:
            args["after"] = expected_revision + number
        if memory is not None and number == len(chunks) - 1:
            args["memory"] = json.dumps(memory)
        answer = await state.run_script("write_decisions", [MESH_PREFIX], args)
        rejected += [
            RejectedDecision(decisions[r["index"]], r["reason"]) for r in answer["rejected"] or []
        ]
    return rejected


async def remove_gone(
    state: StateClient, token: int, gone_s: float, exit_retention_s: float = EXIT_RETENTION_S
) -> int:
    """Remove the rows of idle workers and of hosts whose processes have been gone for `gone_s`.

    Also remove the last exits of removed instances that are older than `exit_retention_s`. Return
    the number of removed workers. Fenced for a former leader.
    """
    answer = await state.run_mesh_script(
        "remove_gone",
        election=PLANNER_ELECTION,
        token=token,
        gone_ms=int(1000 * gone_s),
        ended_ms=int(1000 * exit_retention_s),
        most=DECISIONS_PER_SCRIPT,
    )
    return int(answer["removed"])


def _decode_snapshot(answer: dict[str, Any]) -> PoolSnapshot:
    processes = [ProcessStats(**row) for row in answer["processes"]]
    by_job: dict[str, list[ProcessStats]] = {}
    for process in processes:
        by_job.setdefault(process.stats.get("job", ""), []).append(process)
    alive = frozenset(answer["alive"])
    ends = {host: row["preempt_at_s"] for host, row in answer.get("notices", {}).items()}
    rows = (
        decode_worker(
            row | {"alive": row["id"] in alive, "preempt_at_s": ends.get(row["details"]["host"])}
        )
        for row in answer["workers"]
    )
    workers = tuple(sorted(rows, key=lambda one: id_sort_key(one.id)))
    kinds = {
        worker.gang: parse_accelerator_kind(worker.accelerator) for worker in workers if worker.gang
    }
    requests = [PoolRequest(op, **row) for op, row in answer["requests"].items()]
    settings = answer["settings"]
    return PoolSnapshot(
        now_ms=answer["now_ms"],
        workers=workers,
        gangs=tuple(sorted(map(decode_gang, answer["gangs"]), key=lambda one: id_sort_key(one.id))),
        jobs=tuple(
            build_planned_job(row, row["document"], by_job.get(row["id"], ()), kinds)
            for row in answer["jobs"]
        ),
        hosts=_decode_hosts(answer, workers, processes),
        requests=tuple(sorted(requests, key=lambda one: (one.requested_ms, one.op))),
        moves=tuple(Move(id, **row) for id, row in sorted(answer["moves_in_progress"].items())),
        evictable_services=frozenset(p.name for p in processes if p.stats.get("safe_to_evict")),
        settings=PoolSettings.from_document(settings.get("pool", {})),
        gangs_formed=answer["formed"],
        up_since_ms=settings.get("up_since_ms", 0),
    )


def _decode_hosts(
    answer: dict[str, Any], workers: Sequence[WorkerRow], processes: Sequence[ProcessStats]
) -> tuple[PoolHost, ...]:
    agents = {p.name.partition("/")[2]: p for p in processes if p.kind == "node"}
    stats_by_agent = {row["name"]: row["stats"] for row in answer["offline_agents"]}
    stats_by_agent |= {agent.name: agent.stats for agent in agents.values()}
    services = {row["name"]: tuple(row["services"]) for row in answer["hosts"]}
    draining = answer["draining"]
    names = sorted({*agents, *services, *(worker.host for worker in workers)})
    return tuple(
        PoolHost(
            name,
            alive=name in agents,
            drain_reason=draining.get(name, "")
            or (str(agents[name].stats.get("draining") or "") if name in agents else ""),
            services=services.get(name, ()),
            **_decode_offer(stats_by_agent.get(agent_process(name), {})),
        )
        for name in names
    )


def decode_host(agent: RegistryEntry) -> PoolHost:
    """Return a host from its agent's entry in the registry, without its services."""
    draining = str(agent.stats.get("draining") or "")
    return PoolHost(
        agent.host, alive=agent.alive, drain_reason=draining, **_decode_offer(agent.stats)
    )


def _decode_offer(stats: Mapping[str, Any]) -> dict[str, Any]:
    offer: dict[str, Any] = {key: float(stats[key]) for key in CORE_STATS if key in stats}
    return offer | {key: tuple(stats[key]) for key in SERVICE_STATS if stats.get(key) is not None}


async def list_remaining(state: StateClient, host: str) -> list[str]:
    """Return the names of all that remains on a host.

    These are instances, assigned shards and sandboxes, and live processes of shards and sandboxes.
    """
    workers_on_host = {worker.id for worker in await read_workers(state) if worker.host == host}
    remaining = set(await read_host_services(state, host))
    for gang in await read_gangs(state):
        for instance in gang.instances:
            if workers_on_host.intersection(gang.workers[rank] for rank in instance.ranks):
                remaining.add(instance.id)
    entries = await registry.list_entries(state)
    remaining |= {e.name for e in entries if e.alive and e.host == host and e.kind in PLACED_KINDS}
    return sorted(remaining)
